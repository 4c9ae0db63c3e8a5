"""The trainer: determinism, accumulation, resuming, precision, and the files of a run."""

import json
import math
import re

import pytest
import torch
from parallel_runs import stored_values

import hal
from hal.model.config.schema import ConfigError
from hal.model.training import run as command
from hal.model.training import trainer as trainer_module
from hal.model.training.optimizer import Optimizer, no_decay
from hal.model.training.run_log import RunLog
from hal.model.training.trainer import TrainingFailed

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
    exempt = {n for n, p in trainer.model.named_parameters() if no_decay(n, p)}
    assert exempt == {n for n, _ in trainer.model.named_parameters() if "norm" in n or n.endswith(".bias")}
    (decayed, rate), (rest, zero) = trainer.optimizer.groups
    assert set(rest) == exempt and (rate, zero) == (0.01, 0.0) and set(decayed).isdisjoint(rest)


def test_the_optimizer_is_torchs_adamw_with_clipping(tiny):
    trainer = start(tiny(clip_grad=0.5, weight_decay=0.1))
    theirs = {n: p.detach().clone().requires_grad_() for n, p in trainer.model.named_parameters()}
    groups = [{"params": [theirs[n] for n in names], "weight_decay": rate} for names, rate in trainer.optimizer.groups]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(3):
        trainer.forward_backward()
        for name, parameter in trainer.model.named_parameters():
            theirs[name].grad = parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        grad_norm = trainer.optimizer.grad_norm()
        assert grad_norm == pytest.approx(norm.item(), rel=1e-5) and grad_norm > 0.5
        adamw.step()
        trainer.optimizer.step(1e-2, grad_norm)
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
    trainer = start(tiny(eval_interval=2, eval_iters=2, hidden_dropout=0.5))
    assert trainer.evaluate() == trainer.evaluate()
    assert steps(trainer, 2) == steps(start(tiny(hidden_dropout=0.5)), 2)


def test_a_run_leaves_its_folder_and_continues_it(tiny, tmp_path, capsys):
    options = {"save": str(tmp_path / "save"), "eval_interval": 3, "eval_iters": 1, "save_interval": 2}
    whole = command.train(tiny(run_dir=str(tmp_path / "whole")))
    command.train(tiny(**options, exit_interval=4))
    command.train(tiny(**options, load=options["save"]))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    reference = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert record["losses"] == reference["losses"] and record["grad_norms"] == reference["grad_norms"]
    assert [n for n, _ in record["losses"]] == [1, 2, 3, 4, 5, 6] and record["evaluations"]
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
        ({"load": save, "seed": 8}, "--seed 7"),
    ):
        with pytest.raises(ConfigError, match=words):
            command.train(tiny(**options))


def test_optimizer_state_is_addressed_by_name(tiny):
    trainer = start(tiny())
    shuffled = dict(reversed(list(trainer.model.named_parameters())))
    assert Optimizer(trainer.config, shuffled).exp_avg.keys() == trainer.optimizer.exp_avg.keys()
