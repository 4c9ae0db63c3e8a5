"""Which parts of a checkpoint --load restores, option by option, and how many checkpoints --save keeps."""

import warnings
from pathlib import Path

import pytest
import torch

import hal
from hal.model.checkpoint import reader
from hal.model.checkpoint.saved_config import saved_vocabulary
from hal.model.config.schema import ConfigError
from hal.model.training import run as command
from hal.model.training.trainer_state import require_same_model


@pytest.fixture(autouse=True)
def backend(cpu_ref):
    return cpu_ref


@pytest.fixture
def saved(tiny, tmp_path):
    trainer = command.build(tiny())[0]
    for _ in range(3):
        trainer.step()
    trainer.save(tmp_path)
    return trainer, tmp_path


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_rank_writes_what_it_owns_and_reads_without_a_warning(saved, monkeypatch):
    trainer, root = saved
    assert trainer.whole_model() is trainer.model, "one rank has the whole model"
    every = set(trainer.model.state_dict())
    owned = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
    monkeypatch.setattr(trainer.optimizer, "owned", owned)
    state = trainer._model_state
    assert {name for name in state.tensors() if not name.startswith("optimizer.")} == owned
    assert {name for name in state.tensors(replicas=True) if not name.startswith("optimizer.")} == every
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.read_state(root)[1]["iteration"] == 3


def test_finetune_takes_the_weights_only(saved, tiny):
    before, root = saved
    after = command.build(tiny(load=str(root), finetune=True, seed=99))[0]
    after.load(root)
    assert same(weights(after), weights(before))
    assert (after.iteration, after.consumed, after.optimizer.steps, after.notes) == (0, 0, 0, [])
    assert all(not bool(m.any()) for m in after.optimizer.exp_avg.values())


@pytest.mark.parametrize(
    "same_thing",
    [
        {"next_tokens": 0, "pre_tokens": 1 << 16},
        {"next_tokens": 7},
        {"num_layers": 3, "noop_layers": ("2",)},
        {"rotary_base": 500.0},
    ],
)
def test_the_same_model_in_other_words_continues(saved, tiny, same_thing):
    _, root = saved
    config = tiny(load=str(root))
    for name, value in same_thing.items():  # the command line would refuse some of these because they have no effect
        setattr(config, name, value)
    require_same_model(reader.read_state(root, hal.SingleRankComm())[1], config, root, weights_only=False)


def test_finetuned_weights_may_serve_another_function(saved, tiny):
    before, root = saved
    after = command.build(tiny(load=str(root), finetune=True, pre_tokens=3))[0]
    after.load(root)
    assert same(weights(after), weights(before))


def test_progress_that_is_incomplete_serves_finetuning_only(saved, tiny):
    trainer, root = saved
    trainer.saver.save(root, 4, trainer.tensors(), {n: x for n, x in trainer.state().items() if n != "skipped"})
    with pytest.raises(hal.HalError, match="its state has no skipped"):
        command.build(tiny(load=str(root)))[0].load(root)
    after = command.build(tiny(load=str(root), finetune=True))[0]
    after.load(root)
    assert same(weights(after), weights(trainer)) and after.iteration == 0


def test_no_load_optim_keeps_the_place_and_restarts_the_optimizer(saved, tiny):
    before, root = saved
    after = command.build(tiny(load=str(root), no_load_optim=True, clip_grad=0.5))[0]
    after.load(root)
    assert any("clip-grad 1.0 -> 0.5" in note for note in after.notes)
    assert same(weights(after), weights(before))
    assert (after.iteration, after.consumed) == (before.iteration, before.consumed) and after.optimizer.steps == 0
    assert all(not bool(m.any()) for m in after.optimizer.exp_avg_sq.values())


@pytest.mark.parametrize(
    "other, words",
    [
        ({"num_attention_heads": 2}, r"num-attention-heads 4, this run has 2; .* saved with(?!, or)"),
        ({"position_embedding_type": "rope"}, "position-embedding-type learned_absolute, this run has rope"),
        ({"norm_epsilon": 0.1}, "norm-epsilon 1e-05, this run has 0.1"),
        ({"pre_tokens": 3}, "pre-tokens None, this run has 3; .*--finetune to begin with its weights alone"),
        ({"num_layers": 3, "noop_layers": ("1",)}, "num-layers 2, this run has 3 without 1"),
        ({"num_layers": 1}, "num-layers 2, this run has 1"),
        ({"disable_bias_linear": True, "finetune": True}, "disable-bias-linear False, this run has True"),
        ({"normalization": "RMSNorm", "finetune": True}, "normalization LayerNorm, this run has RMSNorm"),
    ],
)
def test_another_model_of_the_same_shapes_is_refused(saved, tiny, other, words):
    with pytest.raises(ConfigError, match=words):
        command.build(tiny(load=str(saved[1]), **other))[0].load(saved[1])


def test_no_load_rng_goes_on_with_another_seed(saved, tiny):
    before, root = saved
    other = command.build(tiny(load=str(root), seed=99))[0]
    other.config.given = frozenset()
    with pytest.raises(ConfigError, match="the default; the same seed continues"):
        other.load(root)
    after = command.build(tiny(load=str(root), seed=99, no_load_rng=True))[0]
    after.load(root)
    assert same(weights(after), weights(before)) and after.rng.seed == 99
    assert same(after.optimizer.exp_avg, before.optimizer.exp_avg) and after.optimizer.steps == 3


def test_only_the_newest_checkpoints_are_kept(tiny, tmp_path):
    trainer = command.build(tiny(save=str(tmp_path), keep_checkpoint_max=2))[0]
    for _ in range(4):
        trainer.step()
        trainer.save(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]
    assert reader.newest(tmp_path) == 4


@pytest.mark.parametrize(
    "options", [{"finetune": True}, {"no_load_optim": True}, {"keep_checkpoint_max": 2}, {"accept_changed_data": True}]
)
def test_options_that_nothing_reads_are_noted(options, tiny):
    assert any("has no effect" in note for note in tiny(**options).notes)


@pytest.mark.parametrize("count", [0, -1, 3.0, "330", True, [330]])
def test_a_vocabulary_that_is_no_count_is_refused(count):
    with pytest.raises(hal.HalError, match="vocabulary should be a count of rows; found"):
        saved_vocabulary({"config": {"vocabulary": count}}, Path("saved"))


def test_older_checkpoints_do_not_say_which_rows_are_padding():
    assert saved_vocabulary({}, Path("saved")) is saved_vocabulary({"config": {}}, Path("saved")) is None
    assert saved_vocabulary({"config": {"vocabulary": 330}}, Path("saved")) == 330
