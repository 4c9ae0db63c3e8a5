"""Results that stay on the device: when they are read, what a failed step leaves, and how ranks agree to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_runs import stored_values

import hal
from hal.comm.threads import run_threads
from hal.model.training import run as command
from hal.model.training.step_result import PendingSteps, StepResult, TrainingFailed
from hal.model.training.stop_vote import StopVote
from hal.model.training.trainer import Trainer

BALANCED = {
    "num_experts": 4,
    "disable_bias_linear": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
"""Experts with biases, which follow their load in every step that succeeds."""


@pytest.fixture
def asynchronous(cpu_ref: hal.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend as one that computes while the host goes on."""
    capabilities = replace(cpu_ref.capabilities(), asynchronous=True)
    monkeypatch.setattr(type(cpu_ref), "capabilities", lambda self: capabilities)


def start(config: Any) -> Trainer:
    return command.build(config)[0]


def run(trainer: Trainer, stop: Callable[[], bool] = lambda: False) -> list[StepResult]:
    results: list[StepResult] = []
    trainer.run(
        stop=stop,
        on_step=results.append,
        on_evaluation=lambda iteration, loss: None,
        on_save=lambda path: None,
    )
    return results


def test_results_are_read_once_per_log_interval(tiny: Any, asynchronous: None, monkeypatch: Any, tmp_path: Any) -> None:
    trainer, reads = start(tiny(log_interval=3, train_iters=10, save=str(tmp_path), save_interval=7)), []
    original = PendingSteps.read

    def read(self: PendingSteps, undo: Any) -> Any:
        reads.append(trainer.iteration)
        return original(self, undo)

    monkeypatch.setattr(PendingSteps, "read", read)
    results = run(trainer)
    # After the first step, at each interval, before the checkpoint, and at the end.
    assert reads == [1, 3, 6, 7, 9, 10]
    assert [r.iteration for r in results] == list(range(1, 11)) and [r.consumed for r in results] == list(
        range(4, 44, 4)
    )
    assert results[3].seconds == results[4].seconds == results[5].seconds > 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"num_experts": 4, "disable_bias_linear": True}], ids=["fp32", "bf16", "experts"]
)
def test_deferred_results_are_those_of_single_steps(tiny: Any, asynchronous: None, options: dict[str, Any]) -> None:
    single, deferred = start(tiny(**options)), start(tiny(log_interval=4, **options))
    expected, results = [single.step() for _ in range(6)], run(deferred)
    assert [replace(r, seconds=0.0) for r in results] == [replace(r, seconds=0.0) for r in expected]
    assert all(torch.equal(t, stored_values(deferred)[n]) for n, t in stored_values(single).items())


def test_a_step_that_fails_is_named_and_no_later_one_changes_the_model(tiny: Any, asynchronous: None) -> None:
    trainer = start(tiny(log_interval=6, **BALANCED))
    good = [trainer.step() for _ in range(2)]
    before, weight = stored_values(trainer), trainer.model.embedding.word_embeddings.weight
    trainer.advance()
    after_one = stored_values(trainer)
    lost = weight.detach().clone()
    weight.data[:] = float("nan")  # the fourth step's loss
    trainer.advance()
    weight.data[:] = lost
    trainer.advance()  # its loss is finite
    assert trainer.iteration == 5
    results = trainer.results()
    assert next(results).iteration == 3
    with pytest.raises(TrainingFailed, match=r"^iteration 4: the loss is nan .* around sample 12\b"):
        next(results)
    assert (trainer.iteration, trainer.consumed, trainer.scheduled, trainer.optimizer.steps) == (3, 12, 12, 3)
    assert not all(torch.equal(t, after_one[n]) for n, t in before.items())
    assert all(torch.equal(t, after_one[n]) for n, t in stored_values(trainer).items())
    assert trainer.step().iteration == 4 and good[0].iteration == 1


def test_numbers_that_decide_how_to_go_on_are_read_in_every_step(tiny: Any, asynchronous: None) -> None:
    assert not start(tiny())._reads_every_step
    for options in ({"fp16": True}, {"rerun_mode": "validate_results"}, {"verify_ops": 0.01}):
        assert start(tiny(**options))._reads_every_step


def test_a_single_rank_stops_at_once(tiny: Any, cpu_ref: Any) -> None:
    trainer = start(tiny())
    assert len(run(trainer, lambda: trainer.iteration == 2)) == 2


def test_ranks_stop_together_one_step_after_one_has_asked() -> None:
    def rank(comm: hal.Comm) -> list[bool]:
        vote = StopVote(comm)
        answers = [vote(comm.rank == 1 and step == 2) for step in range(5)]
        vote.close()
        return answers

    assert run_threads(3, rank) == [[False, False, False, True, False]] * 3
