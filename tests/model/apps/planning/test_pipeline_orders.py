"""The planner's pipeline orders: microbatches in flight, and bubbles compared with the published formulas."""

from __future__ import annotations

from collections import Counter

import pytest

from hal.bench.parallel import tensor_bytes
from hal.bench.parallel.layout import config_of
from hal.bench.suites import scaling
from hal.model.apps.planning.schedules import Action, bubble, bubble_formula, in_flight, order
from hal.model.config.parallel_layout import make_parallel_layout
from hal.testing.processes import run_processes

CASES = [
    (schedule, pp, chunks, m)
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved", 5), ("zbv", 2))
    for pp in (2, 3, 4, 8)
    for m in (2 * pp, 5 * pp)
]


def orders(schedule: str, pp: int, chunks: int, m: int) -> list[tuple[Action, ...]]:
    return [order(schedule, pp, chunks, m, rank) for rank in range(pp)]


@pytest.mark.parametrize("schedule, pp, chunks, m", CASES)
def test_every_stage_does_every_microbatch_once(schedule, pp, chunks, m) -> None:
    done = Counter(a for actions in orders(schedule, pp, chunks, m) for a in actions)
    kinds = "FIW" if schedule == "zbv" else "FB"
    assert set(done.values()) == {1}
    assert set(done) == {Action(k, s, b) for k in kinds for s in range(pp * chunks) for b in range(m)}


@pytest.mark.parametrize("schedule, pp, chunks, m", CASES)
def test_the_bubble_is_the_formulas(schedule, pp, chunks, m) -> None:
    assert bubble(orders(schedule, pp, chunks, m)) == pytest.approx(bubble_formula(schedule, pp, chunks, m))


def test_more_microbatches_and_more_stages_per_rank_shrink_the_bubble() -> None:
    # Narayanan et al., section 2.2.2: v stages per rank divide it by v.
    assert bubble_formula("1f1b", 4, 1, 8) == 3 / 8
    assert bubble_formula("interleaved", 4, 3, 8) == 1 / 8
    assert bubble_formula("none", 1, 1, 8) == 0.0


def test_a_rank_holds_no_more_microbatches_than_stages_follow() -> None:
    # Narayanan et al., section 2.2.1: at most p microbatches in flight for any m; the last rank has one.
    assert [in_flight(a) for a in orders("1f1b", 4, 1, 32)] == [[{r: 4 - r}] for r in range(4)]
    # Zero bubble in V shape has p microbatches of its two half-sized stages on every rank, in any combination.
    for actions in orders("zbv", 4, 2, 32):
        assert {sum(per_stage.values()) for per_stage in in_flight(actions)} == {8}


def test_orders_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="deadlock"):
        bubble([[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]])


RECORDED = {
    "1f1b": {"num_layers": 2},
    "interleaved": {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1},
    "zbv": {"num_layers": 4, **scaling.ZBV},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", RECORDED)
def test_the_trainer_works_in_this_order(schedule) -> None:
    options = {**scaling.GPT, **scaling.PP2, "hidden_size": 16, "seq_length": 16, **RECORDED[schedule]}
    plan = make_parallel_layout(config_of(options), 2)
    recorded = run_processes(2, _recorded, options)
    assert plan.schedule == schedule
    assert recorded == [list(order(schedule, 2, plan.stages // 2, plan.microbatches, rank)) for rank in range(2)]


def _recorded(options: dict) -> list[Action]:
    import hal

    hal.use("cpu_ref")
    return tensor_bytes.recorded_order(options)
