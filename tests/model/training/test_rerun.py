"""Suspect steps are repeated: transient faults are corrected, persistent ones end the run, bad batches are skipped."""

import math

import pytest
import torch

from hal import HalError
from hal.model.training import rerun
from hal.model.training.rerun import Gradients, RerunCheck
from hal.model.training.run import build
from hal.model.training.step_result import TrainingFailed


@pytest.fixture
def trainer(tiny, references):
    def make(**options):
        made = build(tiny(rerun_mode="validate_results", **options))[0]
        made.lines = []
        made.write_line = made.lines.append
        return made

    return make


def plant(trainer, monkeypatch, calls):
    """Has the forward and backward passes number `calls` give a loss that is not a number."""
    plain, count = trainer.forward_backward, iter(range(1000))

    def forward_backward(microbatches):
        loss = plain(microbatches)
        return torch.full_like(loss, math.nan) if next(count) in calls else loss

    monkeypatch.setattr(trainer, "forward_backward", forward_backward)


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def test_a_passing_fault_changes_nothing(trainer, monkeypatch):
    whole, faulty = trainer(), trainer()
    plant(faulty, monkeypatch, {2})
    for _ in range(4):
        expected, found = whole.step(), faulty.step()
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert same(weights(whole), weights(faulty))
    assert len(faulty.lines) == 1 and "iteration 3" in faulty.lines[0] and "a transient fault" in faulty.lines[0]
    assert whole.lines == []


def test_a_batch_that_causes_it_is_skipped_if_allowed(trainer, monkeypatch):
    made = trainer(skip_bad_batches=1)
    plant(made, monkeypatch, {1, 2, 3, 5, 6, 7, 8})
    monkeypatch.setattr(made.optimizer.scaler, "update", (overflows := []).append)
    assert not made.step().skipped
    before = weights(made)
    result = made.step()
    assert result.skipped and math.isnan(result.loss) and result.grad_norm is None and same(before, weights(made))
    assert "the batch is skipped (1 of 1)" in made.lines[0] and made.bad_batches == 1
    made.step()
    assert overflows == [False, False], "a bad batch says nothing about the loss scale"
    with pytest.raises(TrainingFailed, match="the loss is nan"):
        made.step()


def test_an_outlier_goes_on_with_the_same_gradients(trainer, monkeypatch):
    whole, outlier = trainer(), trainer()
    for _ in range(3):
        whole.step()
    plain = RerunCheck.suspicion
    seen = iter(range(100))
    monkeypatch.setattr(RerunCheck, "suspicion", lambda self, g: "planted" if next(seen) == 1 else plain(self, g))
    for _ in range(3):
        outlier.step()
    assert "the batch or the model's state causes it; it goes on" in outlier.lines[0]
    assert same(weights(whole), weights(outlier))


def test_what_is_suspect():
    check = RerunCheck()
    assert check.suspicion(Gradients(1e9, 1.0)) == ""
    check = RerunCheck()
    for loss in (2.0, 3.0, 2.5):
        assert check.suspicion(Gradients(loss, 1.0)) == ""
    assert check.suspicion(Gradients(30.0, 1.0)) == ""
    assert "300.1 is more than 10 times" in check.suspicion(Gradients(300.1, 1.0))
    assert check.suspicion(Gradients(math.nan, 1.0)) == "the loss is nan"
    assert check.suspicion(Gradients(1.0, math.inf)) == "the gradient norm is inf"
    assert check.suspicion(Gradients(1.0, None)) == "", "an overflow in float16 is handled by the loss scale"


def test_a_resumed_run_remembers_the_losses_that_decide_what_is_an_outlier(trainer, tmp_path):
    first, resumed = trainer(), trainer()
    for _ in range(3):
        first.step()
    first.save(tmp_path)
    resumed.load(tmp_path)
    assert list(resumed._rerun.losses) == list(first._rerun.losses) and len(first._rerun.losses) == 3
    assert "times the largest of the last 3" in resumed._rerun.suspicion(Gradients(1e3, 1.0))


def test_losses_of_a_checkpoint_are_numbers(trainer, tmp_path):
    first = trainer()
    state = {**first.state(), "rerun_losses": ["a"]}
    first.saver.save(tmp_path, 0, first.tensors(), state)
    with pytest.raises(HalError, match="its state has no rerun_losses"):
        trainer().load(tmp_path)


def test_a_fault_of_every_execution_is_not_transient(trainer, monkeypatch):
    made = trainer()
    made.step()
    plain, factors = made.forward_backward, iter([math.nan, 2.0, 3.0])
    monkeypatch.setattr(made, "forward_backward", lambda microbatches: plain() * next(factors))
    before = weights(made)
    with pytest.raises(TrainingFailed, match=r"a transient fault\. But a third execution gave another result again"):
        made.step()
    assert same(before, weights(made))


def test_a_wrong_backward_pass_is_persistent_although_the_loss_is_right(references):
    again = iter([Gradients(2.0, math.nan), Gradients(2.0, 1.0)])
    first = Gradients(2.0, math.nan)
    verdict = RerunCheck().verdict(first, "the gradient norm is nan", lambda: next(again))
    assert verdict.cause == "persistent" and "a loss of 2 and a gradient norm of 1:" in verdict.text


@pytest.mark.parametrize(
    "results, cause",
    [([2.0], "transient"), ([math.nan, 2.0], "persistent"), ([math.nan, math.nan], "input"), ([math.inf], "transient")],
)
def test_the_cause_is_found_by_computing_again(references, results, cause):
    again = iter(results)
    verdict = RerunCheck().verdict(Gradients(math.nan, 1.0), "the loss is nan", lambda: Gradients(next(again), 1.0))
    assert verdict.cause == cause and next(again, None) is None


def test_a_lasting_fault_of_an_implementation_stops_the_run(trainer, monkeypatch):
    made = trainer()
    made.step()
    monkeypatch.setattr(rerun.RerunCheck, "verdict", lambda *a: rerun.Verdict("persistent", "an implementation", None))
    monkeypatch.setattr(rerun.RerunCheck, "suspicion", lambda *a: "planted")
    before = weights(made)
    with pytest.raises(TrainingFailed, match=r"iteration 2, samples from .*: an implementation; nothing was updated"):
        made.step()
    assert same(before, weights(made))
