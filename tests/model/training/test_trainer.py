"""The trainer: determinism, accumulation, resuming, precision, and the files of a run."""

import contextlib
import dataclasses
import json
import math
import re
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from parallel_runs import stored_values

import hal
from hal.mesh import Layout
from hal.model.apps.convert import hal_format
from hal.model.checkpoint import reader
from hal.model.config.command_line import parse
from hal.model.config.schema import ConfigError
from hal.model.gpt.float8 import delayed_scales
from hal.model.gpt.model import GPT
from hal.model.parallel import document_mask
from hal.model.training import pipeline
from hal.model.training import run as command
from hal.model.training import trainer as trainer_module
from hal.model.training.microbatches import Microbatch
from hal.model.training.optimizer import Optimizer, no_decay
from hal.model.training.run_log import RunLog
from hal.model.training.step_result import TrainingFailed
from hal.testing.spy import Spy

BF16, FP16 = {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**24, "loss_scale_window": 2, "hysteresis": 1}


@pytest.fixture(autouse=True)
def backend(cpu_ref):
    return cpu_ref


def start(config):
    return command.build(config)[0]


def steps(trainer, count):
    return [(r.loss, r.grad_norm, r.lr, r.loss_scale) for r in (trainer.step() for _ in range(count))]


def test_a_run_that_is_killed_leaves_its_record_up_to_the_last_checkpoint(tiny, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    config = tiny(save=str(tmp_path / "save"), save_interval=2, train_iters=5, sample_tokens=0)
    save = trainer_module.Trainer.save

    def dying(self, root):
        save(self, root)
        if self.iteration == 4:  # the checkpoint is complete, but nothing after the save runs
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "save", dying)
        patch.setattr(RunLog, "__exit__", lambda *error: None)  # a killed process does not close its log
        with pytest.raises(Killed):
            command.train(config)
    command.train(tiny(load=config.save, save=config.save, train_iters=5, sample_tokens=0))
    whole = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [n for n, _ in whole["losses"]] == [1, 2, 3, 4, 5]


def test_a_validation_loss_that_is_not_finite_is_said_and_recorded(tiny, tmp_path, capsys):
    command.train(tiny(lr=1e30, train_iters=1, eval_interval=1, eval_iters=1, sample_tokens=0))
    assert "lm loss value: NAN | lm loss PPL: NAN" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["evaluations"] == [[1, None]]


def test_losses_are_kept_when_no_sample_can_be_made(tiny, tmp_path):
    with pytest.raises(hal.HalError, match="no token can be chosen"):
        command.train(tiny(lr=1e30, train_iters=1, sample_tokens=4))
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["losses"]) == 1


def test_one_seed_gives_one_run_and_another_seed_another(tiny):
    torch.set_num_threads(2)
    first, second, other = (steps(start(tiny(seed=s)), 4) for s in (7, 7, 8))
    assert first == second != other


def test_the_loss_falls(tiny):
    losses = [r[0] for r in steps(start(tiny(train_iters=40, lr_decay_style="cosine", min_lr=1e-3)), 40)]
    assert losses[0] == pytest.approx(math.log(384), abs=0.1)  # bytes and eod, padded to 3 x 128
    assert sum(losses[-5:]) / 5 < 2.9


def test_no_decay_is_for_biases_and_one_dimensional_parameters(tiny):
    trainer = start(tiny())
    exempt = {n for n, p in trainer.model.named_parameters() if no_decay(trainer.config, n, p)}
    assert exempt == {n for n, _ in trainer.model.named_parameters() if "norm" in n or n.endswith(".bias")}
    (decayed, yes, _), (rest, no, _), (own, *_) = trainer.optimizer.groups
    assert set(rest) == exempt and (yes, no) == (True, False) and set(decayed).isdisjoint(rest) and not own


def test_the_optimizer_is_torchs_adamw_with_clipping(tiny):
    trainer = start(tiny(clip_grad=0.5, weight_decay=0.1))
    theirs = {n: p.detach().clone().requires_grad_() for n, p in trainer.model.named_parameters()}
    groups = [
        {"params": [theirs[n] for n in names], "weight_decay": 0.1 * decayed}
        for names, decayed, _ in trainer.optimizer.groups
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(3):
        trainer.forward_backward()
        for name, parameter in trainer.model.named_parameters():
            theirs[name].grad = parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        grad_norm = trainer.optimizer.grad_norm()
        assert float(grad_norm) == pytest.approx(norm.item(), rel=1e-5) and grad_norm > 0.5
        adamw.step()
        trainer.optimizer.step(1e-2, trainer.optimizer.clip_factor(grad_norm))
        trainer.optimizer.zero_grad()
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), theirs[name].detach(), rtol=1e-5, atol=1e-6)
            theirs[name].data.copy_(parameter.detach())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_accumulation_changes_only_rounding(tiny, dropout):
    runs = [
        steps(start(tiny(micro_batch_size=m, attention_dropout=dropout, hidden_dropout=dropout)), 4) for m in (4, 2, 1)
    ]
    for run in runs[1:]:
        for a, b in zip(runs[0], run):
            assert a[0] == pytest.approx(b[0], rel=1e-5) and a[1] == pytest.approx(b[1], rel=1e-4)


@pytest.mark.parametrize("precision", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stop", range(1, 6))
def test_a_resumed_run_is_bit_equal_at_every_step(tiny, tmp_path, precision, stop):
    options = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, **precision}
    whole = start(tiny(**options))
    expected = steps(whole, 6)
    before = start(tiny(**options))
    steps(before, stop)
    before.save(tmp_path)
    after = start(tiny(**options))
    after.load(tmp_path)
    assert (after.iteration, after.consumed) == (stop, 4 * stop)
    assert steps(after, 6 - stop) == expected[stop:]
    expected_values, values = stored_values(whole), stored_values(after)
    assert expected_values.keys() == values.keys()
    for name, tensor in expected_values.items():
        assert torch.equal(tensor, values[name]), name
    if precision is FP16:
        assert whole.skipped > 0  # the scale started too high, so the test covers skipped steps


def test_a_resumed_run_continues_with_the_scales_of_earlier_iterations(tiny, tmp_path):
    options = {**BF16, "fp8_format": "hybrid", "fp8_amax_history_len": 3, "fp8_amax_compute_algo": "max"}
    whole = start(tiny(**options))
    expected = steps(whole, 5)
    before = start(tiny(**options))
    steps(before, 2)
    before.save(tmp_path)
    after = start(tiny(**options, load=str(tmp_path)))
    after.load(tmp_path)
    assert steps(after, 3) == expected[2:]
    histories = {n: x for n, x in stored_values(after).items() if n.endswith(".amax_history")}
    assert len(histories) == 4 * 2 and all(x.shape == (3, 3) and (x > 0.0).all() for x in histories.values())
    weights = hal_format.read(tmp_path)
    weights.check()
    assert not [name for name in weights.tensors if "amax" in name]
    # A checkpoint of another recipe has no histories, which then begin anew.
    other = start(tiny(**{**options, "fp8_recipe": "tensorwise"}))
    other.save(tmp_path / "other")
    after.load(tmp_path / "other")


def test_an_iteration_forgets_the_magnitudes_that_were_recorded_before_it(tiny):
    """As those of an evaluation are."""
    plain, disturbed = (start(tiny(**BF16, fp8_format="hybrid")) for _ in range(2))
    assert steps(plain, 1) == steps(disturbed, 1)
    for scales in delayed_scales(disturbed.model):
        scales.recorded.fill_(1e3)
    assert steps(plain, 3) == steps(disturbed, 3)


@pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
def test_low_precision_follows_float32_and_keeps_masters(tiny, low):
    full = steps(start(tiny()), 6)
    trainer = start(tiny(**{**low, **({"initial_loss_scale": 1024.0} if "fp16" in low else {})}))
    assert [r[0] for r in steps(trainer, 6)] == pytest.approx([r[0] for r in full], rel=2e-2)
    optimizer = trainer.optimizer
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype == trainer.config.params_dtype and optimizer.main[name].dtype == torch.float32
        assert torch.equal(optimizer.main[name].to(parameter.dtype), parameter)
    assert any(not torch.equal(m, optimizer.model[n].float()) for n, m in optimizer.main.items())


def test_low_precision_sums_microbatches_in_float32(tiny):
    # The float32 sum of four bf16 gradients differs from a sum that is rounded after each addition.
    trainer = start(tiny(micro_batch_size=1, **BF16))
    trainer.forward_backward()
    grads = trainer.optimizer.grads()
    assert all(g.dtype == torch.float32 for g in grads.values())
    assert any(not torch.equal(g, g.bfloat16().float()) for g in grads.values())


def test_an_overflow_skips_the_step_and_lowers_the_scale(tiny):
    trainer = start(tiny(fp16=True, initial_loss_scale=2.0**40, hysteresis=1, lr_warmup_iters=2))
    before = stored_values(trainer)
    result = trainer.step()
    assert result.skipped and result.grad_norm is None and math.isfinite(result.loss)
    assert all(torch.equal(before[n], t) for n, t in stored_values(trainer).items())
    assert trainer.optimizer.steps == 0 and trainer.optimizer.scaler.scale == 2.0**39
    assert (trainer.iteration, trainer.consumed) == (1, 4)  # the data position advances


def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_change(tiny):
    trainer = start(tiny())
    steps(trainer, 1)
    weight = trainer.model.embedding.word_embeddings.weight
    before = trainer.optimizer.exp_avg["embedding.word_embeddings.weight"].clone()
    weight.data[:] = float("nan")
    with pytest.raises(TrainingFailed, match="iteration 2"):
        trainer.step()
    assert torch.equal(before, trainer.optimizer.exp_avg["embedding.word_embeddings.weight"])


def test_recomputation_is_bit_equal(tiny):
    plain = steps(start(tiny()), 3)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    assert steps(start(tiny(**full)), 3) == plain
    assert steps(start(tiny(recompute_granularity="selective")), 3) == plain


def test_evaluation_draws_no_dropout_and_changes_nothing(tiny):
    trainer, none = (
        start(tiny(eval_interval=2, eval_iters=2, hidden_dropout=p, attention_dropout=p)) for p in (0.5, 0.0)
    )
    assert trainer.evaluate() == none.evaluate()
    assert steps(trainer, 2) == steps(start(tiny(hidden_dropout=0.5, attention_dropout=0.5)), 2)


def test_a_run_leaves_its_folder_and_continues_it(tiny, tmp_path, capsys):
    options = {"save": str(tmp_path / "save"), "eval_interval": 3, "eval_iters": 1, "save_interval": 2}
    whole = command.train(tiny(run_dir=str(tmp_path / "whole")))
    assert command.train(tiny(**options, exit_interval=4)).iteration == 4
    assert reader.iterations(Path(options["save"])) == [2, 4]
    command.train(tiny(**options, load=options["save"]))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    reference = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert record["losses"] == reference["losses"] and record["grad_norms"] == reference["grad_norms"]
    assert [n for n, _ in record["losses"]] == [1, 2, 3, 4, 5, 6]
    assert [n for n, _ in record["evaluations"]] == [3, 6]
    assert set(record) >= {"config", "versions", "device", "fallbacks", "tokens_per_second", "peak_memory_bytes"}
    assert record["fallbacks"] == hal.fallbacks()
    assert record["tokens_per_second"] > 0 and record["peak_memory_bytes"] > 1 << 20
    assert record["config"]["hidden_size"] == 32 and record["device"]["backend"] == "cpu_ref"
    assert whole.iteration == 6
    names = {p.name.split(".")[0] for p in (tmp_path / "run").iterdir()}
    assert {"run", "loss", "sample", "events"} <= names
    assert (tmp_path / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    out = capsys.readouterr().out
    line = next(text for text in out.splitlines() if "iteration        6/" in text)
    for cell in ("lm loss:", "learning rate:", "grad norm:", "loss scale:", "tokens per second:", "model GFLOP/s:"):
        assert cell in line
    assert "validation loss at iteration 3" in out
    assert re.search(r"tokens/s; [1-9][0-9,]* MiB at the peak; results are in", out)


def test_checkpoints_are_not_mixed_or_misread(tiny, tmp_path):
    save = str(tmp_path / "save")
    command.train(tiny(save=save, train_iters=2))
    for options, words in (
        ({"save": save}, "holds a checkpoint of iteration 2"),
        ({"load": str(tmp_path / "absent")}, "there is no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=words):
            command.train(tiny(**options))


def test_optimizer_state_is_addressed_by_name(tiny):
    trainer = start(tiny())
    shuffled = dict(reversed(list(trainer.model.named_parameters())))
    assert Optimizer(trainer.config, shuffled).exp_avg.keys() == trainer.optimizer.exp_avg.keys()


class Limited(Spy):
    """cpu_ref with other capabilities, which notes the ranges of a profiler."""

    def __init__(self, inner, **capabilities):
        super().__init__(inner)
        self.given, self.ranges = capabilities, []

    def capabilities(self):
        return dataclasses.replace(self.inner.capabilities(), **self.given)

    @contextlib.contextmanager
    def profile_range(self, name):
        self.ranges.append(name)
        yield
        self.ranges.append("end")


def test_a_model_that_the_device_cannot_store_is_refused_with_every_reason(tiny, backend):
    limited = Limited(backend, dtypes=frozenset({torch.float32}), max_elements=2 * 32 * 384 - 1)
    with hal.activated(limited), pytest.raises(ConfigError, match="bfloat16 cannot be stored on the device") as error:
        start(tiny(bf16=True))
    assert "backend 'spy' cannot train" in str(error.value) and "the logits [32, 2, 384]" in str(error.value)


def test_the_phases_of_a_step_are_ranges_of_the_backends_profiler(tiny, backend):
    spy = Limited(backend)
    with hal.activated(spy):
        start(tiny()).step()
    pairs = [spy.ranges[n : n + 2] for n in range(0, len(spy.ranges), 2)]
    assert pairs == [[name, "end"] for name in PHASES]


PHASES = ["data", "forward", "backward", "forward", "backward", "gradient reduction", "optimizer"]


def test_an_error_of_the_device_surfaces_where_the_loss_is_read(tiny, backend, monkeypatch):
    with hal.activated(Limited(backend, asynchronous=True)):
        trainer = start(tiny())

        def late(self):
            raise RuntimeError("device-side assertion")

        monkeypatch.setattr(Optimizer, "grad_norm", late)
        with pytest.raises(hal.DeviceError, match="device-side assertion") as error:
            trainer.step()
    assert any(call.startswith("cross_entropy (") for call in error.value.calls)


def test_the_batch_ramps_up_and_the_schedule_counts_samples(tiny):
    """Steps of 2, 2, 4, ... samples: each step is the same as that of a run with this constant batch size, from the
    same weights and data."""
    ramp = {"rampup_batch_size": ("2", "2", "4"), "train_iters": 4, "lr_decay_iters": 4, "lr_decay_style": "linear"}
    ramp |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}  # whose numbers depend on the full batch size
    run = start(tiny(**ramp))
    sizes, results = [], []
    for _ in range(4):
        sizes.append(run.batch_size)
        results.append(run.step())
    assert sizes == [2, 2, 4, 4] == [r.batch_size for r in results] and results[-1].consumed == 12
    # The decay ends after 4 steps of 4 samples.
    assert [r.lr for r in results] == pytest.approx([1e-2 * (1 - done / 16) for done in (0, 2, 4, 8)])
    small = start(tiny(**{**ramp, "rampup_batch_size": (), "global_batch_size": 2, "lr_decay_iters": 8}))
    assert [(r.loss, r.grad_norm) for r in results[:2]] == [(r.loss, r.grad_norm) for r in (small.step(), small.step())]


def test_a_run_in_samples_is_the_run_in_iterations(tiny):
    common = {"lr_decay_style": "cosine", "min_lr": 1e-3}
    one = start(tiny(train_iters=6, lr_decay_iters=5, lr_warmup_iters=2, **common))
    # 25 samples are 6 steps of 4; the last partial batch is left out.
    samples = {"train_samples": 25, "lr_decay_samples": 20, "lr_warmup_samples": 8}
    config = tiny(**common, **samples, train_iters=None)
    assert config.train_iters == 6
    other = start(config)
    assert steps(one, 6) == steps(other, 6)


def test_a_resumed_ramp_continues_exactly(tiny, tmp_path):
    options = {"rampup_batch_size": ("2", "2", "6"), "train_iters": 6, "lr_warmup_iters": 3, "lr_decay_iters": 6}
    whole = start(tiny(**options))
    expected = steps(whole, 6)
    first = start(tiny(**options, save=str(tmp_path / "save")))
    assert steps(first, 2) == expected[:2]
    first.save(tmp_path / "save")
    first.saver.wait()
    second = start(tiny(**options, load=str(tmp_path / "save")))
    second.load(tmp_path / "save")
    assert steps(second, 4) == expected[2:]


def test_the_checkpoints_schedule_is_continued_on_request(tiny, tmp_path):
    schedule = {"lr": 1e-2, "lr_decay_style": "cosine", "min_lr": 1e-3, "train_iters": 6}
    first = start(tiny(**schedule))
    expected = steps(first, 2)
    first.save(tmp_path / "save")
    first.saver.wait()
    expected += steps(first, 2)
    other = {"lr": 5e-2, "train_iters": 12, "load": str(tmp_path / "save")}
    for use in (True, False):
        second = start(tiny(**other, use_checkpoint_opt_param_scheduler=use))
        second.load(tmp_path / "save")
        assert (steps(second, 2) == expected[2:]) == use


def test_a_decoupled_learning_rate_is_that_of_embedding_and_output_layer(tiny):
    usual, still = (start(tiny(untie_embeddings_and_output_weights=True, decoupled_lr=lr)) for lr in (None, 0.0))
    before = {n: p.detach().clone() for n, p in still.model.named_parameters()}
    usual.step(), still.step()
    after = dict(usual.model.named_parameters())
    for name, parameter in still.model.named_parameters():
        own = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        assert torch.equal(parameter, before[name] if own else after[name]), name
        assert not torch.equal(after[name], before[name]), name


def test_weight_decay_grows_over_the_run(tiny):
    """With a learning rate that only decays, i.e. without gradients, a weight shrinks by 1 - lr * decay per step."""
    ramp = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 6.0}
    trainer = start(tiny(**ramp, train_iters=6, lr_decay_style="constant", lr=1e-2))
    weight = trainer.optimizer.main["decoder.layers.0.mlp.linear_fc1.weight"]
    plain = start(tiny(train_iters=6, lr_decay_style="constant", lr=1e-2, weight_decay=0.0))
    other = plain.optimizer.main["decoder.layers.0.mlp.linear_fc1.weight"]
    trainer.step(), plain.step()
    assert torch.equal(weight, other), "no decay at the start"
    before = weight.clone()
    trainer.step(), plain.step()
    torch.testing.assert_close(other - weight, 1e-2 * 1.0 * before, rtol=1e-3, atol=1e-6)


def test_a_run_stops_after_some_minutes_and_can_refuse_to_start_anew(tiny, tmp_path):
    trainer = command.train(tiny(exit_duration_in_mins=1e-9, train_iters=50, sample_tokens=0))
    assert trainer.iteration == 1
    folder = str(tmp_path / "save")
    again = {"save": folder, "load": folder, "train_iters": 1, "sample_tokens": 0}
    with pytest.raises(hal.HalError, match="no checkpoint"):
        command.train(tiny(**again, exit_on_missing_checkpoint=True))
    assert command.train(tiny(**again)).iteration == 1


def test_the_minutes_of_a_run_are_those_of_the_clock(tiny, monkeypatch):
    trainer, seconds = start(tiny(exit_duration_in_mins=2.0)), iter([1000.0, 1120.0, 1120.6])
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    nothing = dict.fromkeys(("on_step", "on_evaluation", "on_save"), lambda *given: None)
    trainer.run(stop=lambda: False, **nothing)
    assert trainer.iteration == 2, "after more than 120 seconds"


class Pair(hal.SingleRankComm):
    """The first of two ranks, of which the other contributes `other` to every reduction."""

    def __init__(self, other):
        super().__init__()
        self.size, self.other = 2, other

    def all_reduce(self, x, op="sum"):
        return torch.maximum(x, torch.full_like(x, self.other)) if op == "max" else x + self.other


def test_numbers_of_all_ranks(tiny):
    trainer = start(tiny(distributed_timeout_minutes=3.0))
    assert trainer.mesh.timeout == 180.0 and trainer.lead
    state = trainer.state()
    assert [state[n] for n in ("iteration", "consumed_samples", "skipped", "scheduled_samples", "bad_batches")] == [
        0
    ] * 5
    # Table and positions; per layer QKV, projection, both of the MLP, and two norms; the last norm.
    layer = 3 * 32 * 33 + 32 * 33 + 128 * 33 + 32 * 129 + 4 * 32
    parameters = 384 * 32 + 32 * 32 + 2 * layer + 2 * 32
    assert trainer.parameter_count() == parameters and trainer.all_reduce_max(5) == 5
    trainer.world = Pair(7)
    assert trainer.parameter_count() == parameters + 7
    assert (trainer.all_reduce_max(5), trainer.all_reduce_max(9)) == (7, 9)


def test_a_replica_counts_its_own_microbatches_and_the_tokens_of_all(tiny, monkeypatch):
    trainer, noted = start(tiny()), []
    trainer.replicas = Pair(3)
    monkeypatch.setattr(trainer._gradient_sums, "expect", noted.append)
    monkeypatch.setattr(trainer.expert_load, "start", noted.append)
    trainer.forward_backward()
    assert noted == [2, 2 / 4], "two microbatches, each half of the batch"
    monkeypatch.setattr(trainer, "config", replace(trainer.config, eod_mask_loss=True))
    labels = torch.tensor([[document_mask.IGNORED, 5]])
    for comm, part, count in ((Pair(3), labels, 4), (hal.SingleRankComm(), labels, 1), (Pair(0), labels[:, :1], 1)):
        trainer.replicas = comm
        assert float(trainer._counted([Microbatch(part, part, 0, None)])) == count, "at least 1, to divide by"


def test_the_loss_is_differentiated_into_the_logits(tiny, monkeypatch):
    logits, loss = [], GPT.loss

    def recorded(self, y, labels, **options):
        logits.append((y.detach(), y.detach().clone()))
        return loss(self, y, labels, **options)

    monkeypatch.setattr(GPT, "loss", recorded)
    start(tiny()).forward_backward()
    assert len(logits) == 2 and not any(torch.equal(now, before) for now, before in logits)


def test_stages_on_several_ranks_are_a_pipeline(tiny, monkeypatch):
    trainer = start(tiny())
    monkeypatch.setattr(pipeline, "Pipeline", lambda stages, config, layout, group, *rest: (stages, group))
    trainer.mesh = SimpleNamespace(layout=Layout(pp=2), torch_group=lambda *dims: dims)
    assert trainer._make_pipeline() == (trainer.stages, ("pp",))


@pytest.mark.parametrize("experts, replicas", [({}, None), ({"num_experts": 4}, ("edp",))])
def test_experts_are_sharded_over_their_own_replicas(tiny, monkeypatch, experts, replicas):
    trainer, meshes = start(tiny(disable_bias_linear=True, **experts)), []
    monkeypatch.setattr(trainer_module, "shard", lambda stage, *given: meshes.append(given[:2]))
    monkeypatch.setattr(trainer.mesh, "device_mesh", lambda *dims: dims)
    trainer_module.Trainer(trainer.config, trainer.data, trainer.mesh, replace(trainer.layout, zero=1))
    assert meshes == [(("dp", "cp"), replicas)]


def test_the_peak_of_memory_is_the_devices_or_else_the_processs(backend, monkeypatch):
    spy = Spy(backend)
    with hal.activated(spy):
        monkeypatch.setattr(spy, "memory_stats", lambda: {"peak": 7})
        assert trainer_module.peak_memory_bytes() == 7
        monkeypatch.setattr(spy, "memory_stats", dict)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert before * 1024 <= trainer_module.peak_memory_bytes() < (before + before // 2048) * 1024


def test_an_error_of_an_engine_names_the_rank_that_failed_if_there_are_others(tiny, monkeypatch):
    trainer = start(tiny())

    def failing(*given):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(trainer.pipeline, "run", failing)
    monkeypatch.setattr(hal, "engine_failure", lambda error, what, timeout, number: hal.HalError(f"{what} {number}"))
    with pytest.raises(RuntimeError, match="connection closed"):
        trainer.step()
    trainer.world = Pair(0)
    with pytest.raises(hal.HalError, match="step 1"):
        trainer.step()


@pytest.mark.parametrize("kind", ["attention_dropout", "hidden_dropout"])
def test_either_dropout_is_drawn(tiny, kind):
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    plain, dropped = (float(start(tiny(**{**none, **more})).forward_backward()) for more in ({}, {kind: 0.5}))
    assert plain != dropped


@pytest.mark.parametrize("size", [4, 8])
def test_an_evaluation_is_the_mean_over_the_first_samples_of_its_split(tiny, monkeypatch, size):
    own = {} if size == 4 else {"eval_global_batch_size": size}
    trainer, fetched = start(tiny(eval_interval=1, eval_iters=3, **own)), []
    fetch = trainer.data["valid"].fetch

    def recorded(first, count):
        fetched.extend(range(first, first + count))
        return fetch(first, count)

    monkeypatch.setattr(trainer.data["valid"], "fetch", recorded)
    assert trainer.evaluate() == pytest.approx(math.log(384), abs=0.1)
    assert fetched == list(range(3 * size))


def test_tokens_that_do_not_count_leave_the_mean_of_the_others(tiny):
    numbers = {"mock_data": True, "text_file": None, "tokenizer_type": "NullTokenizer", "vocab_size": 50}
    losses = []
    for size in (4, 1):
        config = tiny(**numbers, split="98,1,1", micro_batch_size=size, eod_mask_loss=True, init_method_std=0.5)
        losses.append(float(start(config).forward_backward()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_older_checkpoints_and_new_data_begin_at_zero(tiny, tmp_path):
    old = start(tiny())
    steps(old, 2)
    state = old.state()
    del state["scheduled_samples"], state["bad_batches"], state["config"]["vocabulary"]
    old.saver.save(tmp_path, 2, old.tensors(), state)
    for options, consumed in (({}, 8), ({"new_dataset": True}, 0)):
        new = start(tiny(load=str(tmp_path), **options))
        new.load(tmp_path)
        assert (new.iteration, new.consumed, new.bad_batches, new.scheduled) == (2, consumed, 0, 8)
        assert new.config.vocabulary == old.config.vocabulary == 257


def test_no_evaluation_with_zero_batches(tiny, tmp_path):
    command.train(tiny(train_iters=2, eval_interval=1, eval_iters=0, sample_tokens=0, split="1,0,0"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["evaluations"] == []


def test_a_small_version_of_a_real_command_line_trains_like_hals_own_options(cache, monkeypatch):
    """Layers, width, length and layout of Megatron-LM's gpt3 example are cut by options; the others are its own."""
    facts = yaml.safe_load((Path(__file__).parents[2] / "fixtures" / "command_lines.yaml").read_text())
    line = next(f["options"] for f in facts if "train_gpt3_175b" in f["source"])
    monkeypatch.setenv("HAL_CACHE_DIR", str(cache))
    for name in ("data-path", "vocab-file", "merge-file", "load", "save", "rampup-batch-size 16 16"):
        line = re.sub(rf"--{name} \S+", "", line)
    cut = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 2 --global-batch-size 4 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 200 --rampup-batch-size 2 2 4"
    )
    own = (
        "--fp16 --weight-decay 0.1 --init-method-std 0.006 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine "
        "--adam-beta2 0.95 --lr-decay-iters 430000 --lr-warmup-fraction 0.001 --train-iters 500000 --split 949,50,1"
    )
    theirs, ours = (parse(f"{options} {cut}".split(), {}) for options in (line, own))
    assert {"--attention-backend"} == set(theirs.noted)
    # Index maps for 500000 steps of the script would be large; the number of samples does not change the first ones.
    assert steps(start(replace(theirs, train_iters=50)), 3) == steps(start(replace(ours, train_iters=50)), 3)
