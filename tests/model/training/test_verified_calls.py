"""--verify-ops: persistent corruptions end a run with their names, passing ones are computed again, and the record says
what was compared."""

import functools
import json

import pytest

import hal
from hal import ops
from hal.model.checkpoint import reader
from hal.model.training.run import train
from hal.model.training.step_result import TrainingFailed


@pytest.fixture
def corrupted():
    """Activates cpu_ref with forward(its forward) and bwd(its backward) in place of an op's implementations."""
    plain = hal.use("cpu_ref")

    def make(op, forward=lambda f: f, bwd=lambda f: f):
        class Corrupted(type(plain)):
            pass

        first = plain.impls[op.name][0]
        Corrupted.impls[op.name] = []
        Corrupted.impl(op, id=first.id, bwd=first.bwd and bwd(first.bwd))(forward(first.forward))
        instance = Corrupted()
        instance.build()
        hal.activate(instance)

    yield make
    hal.activate(plain)


def last_output_lost(forward):
    def linear(x, weight, bias=None):
        y, residuals = forward(x, weight, bias)
        y[..., -1] = 0
        return y, residuals

    return linear


def last_row_lost(bwd):
    def backward(residuals, dy):
        dx, *rest = bwd(residuals, dy)
        dx[-1] *= 0.5
        return dx, *rest

    return backward


def no_decay(forward):
    @functools.wraps(forward)
    def adamw(*lists, weight_decay, **rest):
        forward(*lists, weight_decay=-weight_decay, **rest)

    return adamw


@pytest.mark.parametrize(
    "op, change, named",
    [
        (ops.linear, {"forward": last_output_lost}, "on rank 0: the output, a tile"),
        (ops.layer_norm, {"bwd": last_row_lost}, "layer_norm (cpu_ref/c) on rank 0: the gradient of x, rows"),
        (ops.adamw, {"forward": no_decay}, "adamw (cpu_ref/c) on rank 0: params"),
    ],
)
def test_a_persistent_corruption_is_found_within_200_steps(op, change, named, corrupted, tiny, tmp_path):
    corrupted(op, **change)
    folder = tmp_path / "run"
    with pytest.raises(TrainingFailed) as caught:
        train(tiny(verify_ops=0.05, train_iters=200, lr=1e-2, weight_decay=1.0, run_dir=str(folder)))
    assert named in str(caught.value)
    # A wrong gradient is found before the update, a wrong update before the checkpoint.
    consequence = "no checkpoint of this iteration was written" if op is ops.adamw else "nothing was updated"
    assert consequence in str(caught.value)
    assert len(list((folder / "wrong-calls").iterdir())) >= 1
    (violation, *_) = json.loads((folder / "run.json").read_text())["verified_ops"]["violations"]
    assert named in violation


@pytest.mark.slow
def test_a_passing_corruption_is_computed_again(corrupted, tiny, tmp_path):
    calls = iter(range(10**6))

    def once(forward):
        def linear(x, weight, bias=None):
            y, residuals = forward(x, weight, bias)
            return (2 * y if next(calls) == 20 else y), residuals

        return linear

    corrupted(ops.linear, once)
    options = {"verify_ops": 1.0, "rerun_mode": "validate_results", "train_iters": 4}
    train(tiny(**options, run_dir=str(tmp_path / "found")))
    record = json.loads((tmp_path / "found" / "run.json").read_text())
    assert len(record["verified_ops"]["violations"]) == 1 and next(calls) > 20
    hal.use("cpu_ref")
    train(tiny(train_iters=4, run_dir=str(tmp_path / "whole")))
    assert record["losses"] == json.loads((tmp_path / "whole" / "run.json").read_text())["losses"]


def test_a_corruption_now_and_then_ends_the_run(corrupted, tiny, tmp_path):
    """Executions of the step differ, as after a transient fault, but each is wrong."""
    calls = iter(range(1, 10**6))

    def drifting(forward):
        def linear(x, weight, bias=None):
            y, residuals = forward(x, weight, bias)
            return y * (1 + 0.1 * next(calls)), residuals

        return linear

    corrupted(ops.linear, drifting)
    with pytest.raises(TrainingFailed, match=r"a transient fault. But linear .*; nothing was updated"):
        train(tiny(verify_ops=1.0, rerun_mode="validate_results", train_iters=4))


def test_a_wrong_update_is_found_before_it_is_saved(corrupted, tiny, tmp_path):
    """In the last iteration, after which no other step would find it. Each has two calls: with and without decay."""
    calls = iter(range(1, 10**6))

    def last_wrong(forward):
        @functools.wraps(forward)
        def adamw(*lists, weight_decay, **rest):
            forward(*lists, weight_decay=-weight_decay if next(calls) > 4 else weight_decay, **rest)

        return adamw

    corrupted(ops.adamw, last_wrong)
    save = tmp_path / "save"
    options = {"verify_ops": 1.0, "train_iters": 3, "weight_decay": 10.0, "save": str(save), "save_interval": 1}
    with pytest.raises(TrainingFailed, match=r"iteration 3, after the gradients: adamw .*no checkpoint of this"):
        train(tiny(**options))
    assert reader.iterations(save) == [1, 2]


def test_the_log_and_the_record_say_what_was_compared(tiny, tmp_path, capsys):
    hal.use("cpu_ref")
    train(tiny(verify_ops=0.2, train_iters=4, log_interval=2, run_dir=str(tmp_path)))
    found = json.loads((tmp_path / "run.json").read_text())["verified_ops"]
    assert found["violations"] == [] and found["rate"] == 0.2 and found["calls"]["linear"] > 0
    assert all(0 <= worst < 1 for worst in found["worst_error_in_tolerances"].values())
    assert capsys.readouterr().out.count(" verified ") == 2
