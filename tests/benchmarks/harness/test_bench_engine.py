"""The engine on a clock that the test controls, so that every time is known."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.bench.harness import runner
from hal.bench.harness.case import Candidate, Case
from hal.bench.harness.engine import CEILING, Effort, Samples, growth, interleave, rows, slope
from hal.bench.harness.runner import CaseRun, Results
from hal.bench.harness.workers import Unavailable


class FakeMeter:
    """Candidates take `seconds[name]` per call; in round r (from 0), other processes use `loads[r]` of a processor."""

    def __init__(self, seconds, loads=()):
        self.seconds, self.loads, self.calls, self.round = seconds, list(loads), [], -1

    def run(self, name, n):
        self.calls.append((self.round, name, n))
        seconds = self.seconds[name]
        return n * (seconds(self.round) if callable(seconds) else seconds)

    def start_round(self):
        self.round += 1

    def other_load(self):
        return self.loads[self.round] if self.round < len(self.loads) else 0.0


def case(**kw):
    names = kw.pop("names", ("ours", "peer"))
    return Case("thing", "4x4", {n: Candidate(lambda: lambda: None) for n in names}, **kw)


def measured(seconds, loads=(), effort=None, **kw):
    samples = interleave(list(seconds), FakeMeter(seconds, loads), effort or Effort())
    names = [n for n in seconds if n != CEILING]
    return rows("suite", case(names=names, **kw), "default", samples, ceiling_work=100.0)


def test_a_ratio_is_the_peers_time_divided_by_ours():
    (row,) = measured({"ours": 0.002, "peer": 0.005})
    assert row.ratio_median == row.ratio_min == row.ratio_max == pytest.approx(2.5)
    assert row.ours == pytest.approx(0.002)


def test_ratios_are_taken_within_rounds():
    """Both take three times as long in some rounds, as when the processor is shared; no ratio may be affected."""
    both = {"ours": lambda r: 1.0 + 2.0 * (r % 2), "peer": lambda r: 4.0 * (1.0 + 2.0 * (r % 2))}
    (row,) = measured(both)
    assert row.ratio_min == row.ratio_max == pytest.approx(4.0)


def test_every_candidate_runs_once_per_round_in_an_order_that_rotates():
    meter = FakeMeter({"a": 0.01, "b": 0.02, "c": 0.04})
    interleave(["a", "b", "c"], meter, Effort(rounds=3, least=3, warm=0.0))
    rounds = [[name for r, name, _ in meter.calls if r == i] for i in range(3)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_short_calls_are_repeated_and_long_ones_are_not():
    meter = FakeMeter({"short": 1e-5, "long": 3.0})
    interleave(["short", "long"], meter, Effort(seconds=0.06))
    counts = {name: n for r, name, n in meter.calls if r == 0}
    assert counts == {"short": 6000, "long": 1}


@pytest.mark.parametrize(
    ("loads", "taken", "counted"),
    [
        ([0.0] * 9, 9, 9),  # an idle machine
        ([0.9, 0.0, 0.9, 0.0, 0.9, 0.0, 0.9, 0.9, 0.9], 9, 3),  # three clean rounds are enough, and only they count
        ([0.9] * 8 + [0.0] * 4, 11, 3),  # goes on until there are three
        ([0.9] * 40, 18, 18),  # a busy machine: gives up at twice the rounds and counts them all
    ],
)
def test_only_clean_rounds_count_if_there_are_three(loads, taken, counted):
    meter = FakeMeter({"ours": 0.1, "peer": lambda r: 0.1 * (r + 2)}, loads)
    samples = interleave(["ours", "peer"], meter, Effort(rounds=9, budget=1e9))
    assert (samples.taken, len(samples.rounds)) == (taken, counted)
    if counted < taken:
        clean = [0.1 * (r + 2) for r in range(taken) if loads[r] == 0.0]
        assert [t["peer"] for t in samples.rounds] == pytest.approx(clean)


def test_slow_cases_take_fewer_rounds():
    samples = interleave(["ours"], FakeMeter({"ours": 4.0}), Effort(rounds=9, least=5, budget=8.0))
    assert samples.taken == 5


@pytest.mark.parametrize(
    ("goal", "share_goal", "taken"),
    [(None, None, 5), (1.8, None, 5), (1.9, None, 9), (3.0, None, 9), (1.8, 0.48, 5), (1.9, 0.4, 5), (1.9, 0.48, 9)],
)
def test_a_case_far_above_its_goals_takes_fewer_rounds(goal, share_goal, taken):
    """Ratio 2.0 and half of the ceiling's rate in every round; 1.9 and 0.48 are less than a tenth below that.

    One figure is enough.
    """
    meter = FakeMeter({"ours": 1.0, "peer": 2.0, CEILING: 5.0})

    def compare(samples):
        bound = case(work=10.0, ceiling="copy")
        return rows("s", bound, "default", samples, ceiling_work=100.0, goal=lambda p: goal, share_goal=share_goal)

    effort = Effort(rounds=9, least=5, budget=1e9)
    samples = interleave(list(meter.seconds), meter, effort, lambda s: all(r.settled for r in compare(s)))
    assert (samples.taken, len(samples.rounds)) == (taken, taken)


def test_one_round_near_the_goal_keeps_a_case_going():
    meter = FakeMeter({"ours": 1.0, "peer": lambda r: 1.05 if r == 3 else 2.0})

    def settled(samples):
        return all(r.settled for r in rows("s", case(), "default", samples, goal=lambda peer: 1.0))

    assert interleave(["ours", "peer"], meter, Effort(rounds=9, budget=1e9), settled).taken == 9


def test_only_clean_rounds_settle_a_case():
    meter = FakeMeter({"ours": 1.0, "peer": 2.0}, [0.9, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0])
    samples = interleave(["ours", "peer"], meter, Effort(rounds=9, least=5, budget=1e9), lambda samples: True)
    assert (samples.taken, samples.clean, len(samples.rounds)) == (7, 5, 5)


def test_a_candidate_is_subtracted_from_ours_and_from_peers_but_not_from_a_budget():
    times = {"ours": 3e-6, "direct": 1e-6, "peer": 7e-6}
    result = measured(times, minus="direct", budgets={"budget of 1 us": 1e-6})
    assert [(r.peer, r.ours, r.ratio_median) for r in result] == [
        ("peer", pytest.approx(2e-6), pytest.approx(3.0)),
        ("budget of 1 us", pytest.approx(2e-6), pytest.approx(0.5)),
    ]


def test_an_overhead_below_zero_fits_any_budget_and_json():
    (row,) = measured({"ours": 1e-6, "direct": 2e-6}, minus="direct", budgets={"b": 1e-6})
    assert row.ratio_median > 1e3
    assert math.isfinite(json.loads(json.dumps(row.as_dict(), allow_nan=False))["ratio_median"])


def test_the_share_of_the_ceiling_compares_rates():
    """10 units of work in 1 s against a ceiling of 100 units in 5 s: 10/s of 20/s."""
    (row,) = measured({"ours": 1.0, "peer": 2.0, CEILING: 5.0}, work=10.0, ceiling="copy")
    assert row.share_of_ceiling == pytest.approx(0.5)
    assert row.ceiling == "copy"


def test_rows_have_the_documented_keys():
    (row,) = measured({"ours": 1.0, "peer": 2.0})
    documented = {"name", "shape", "peer", "ratio_median", "ratio_min", "ratio_max", "ceiling", "share_of_ceiling"}
    assert documented <= row.as_dict().keys()


@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0))
def test_a_goal_is_missed_exactly_below_it(ratio, goal):
    samples = Samples([{"ours": 1.0, "peer": ratio}], 1, 1)
    (row,) = rows("suite", case(), "default", samples, goal=lambda peer: goal)
    assert row.met is (ratio >= goal) and bool(row.miss) is not row.met


def test_a_ratio_of_nan_misses_its_goal():
    samples = Samples([{"ours": 1.0, "peer": math.nan}], 1, 1)
    (row,) = rows("suite", case(), "default", samples, goal=lambda peer: 1.0)
    assert not row.met


@pytest.mark.parametrize(
    ("ratio", "share", "met", "close"),
    [
        (2.5, 0.9, True, False),
        (2.5, 0.1, True, False),
        (1.0, 0.9, True, False),
        (1.0, 0.6, False, False),
        (1.0, 0.79, False, True),
        (2.5, 0.79, True, False),  # the share is near its goal, and does not matter
        (2.01, 0.1, True, True),
    ],
)
def test_a_goal_is_met_by_the_ratio_or_by_the_share(ratio, share, met, close):
    samples = Samples([{"ours": 1.0, "p": ratio, "q": 9.0, CEILING: 1.0}], 1, 1)
    bound = case(names=("ours", "p", "q"), work=share, ceiling="copy")
    wanted = {"p": 2.0, "q": None}.get
    first, second = rows("suite", bound, "default", samples, ceiling_work=1.0, goal=wanted, share_goal=0.8)
    assert (first.met, first.close, first.settled) == (met, close, ratio > 2.2 or share > 0.88)
    assert second.share_goal is None and second.met
    if not met:
        figures = f"1.00x p, goal 2x; and {share:.0%} of copy, goal 80%"
        assert first.miss == f"{first.name} {first.shape}, default malloc: {figures}"
    assert Results([first, second]).goals == 1


def test_a_share_that_could_not_be_measured_does_not_meet_a_goal():
    samples = Samples([{"ours": 1.0, "p": 1.0}], 1, 1)
    (row,) = rows("suite", case(names=("ours", "p"), work=1.0, ceiling="copy"), "default", samples, share_goal=0.8)
    assert not row.met and "no share of copy" in row.miss


def test_a_share_goal_counts_once_per_case():
    samples = Samples([{"ours": 1.0, "p": 2.0, "q": 2.0, CEILING: 1.0}], 1, 1)
    results = Results(
        rows(
            "suite",
            case(names=("ours", "p", "q"), work=1.0, ceiling="copy"),
            "default",
            samples,
            ceiling_work=2.0,
            share_goal=0.8,
        )
    )
    assert (results.goals, len(results.misses)) == (1, 1)
    assert "50% of copy" in results.misses[0]


@given(st.floats(-2.0, 3.0), st.floats(1e-6, 10.0))
def test_slope_is_the_exponent(exponent, factor):
    assert slope([(x, factor * x**exponent) for x in (64, 256, 512, 4096)]) == pytest.approx(exponent, abs=1e-6)


def test_growth_of_a_series():
    def point(s, seconds):
        samples = Samples([{"ours": seconds, "peer": 1.0}], 1, 1)
        return rows("suite", case(series="window: S", x=s), "default", samples)

    points = [r for s, t in ((1, 1.0), (2, 4.0), (4, 16.0)) for r in point(s, t)]
    (row,) = growth("suite", points, lambda name, shape: 0.9)
    assert row.ratio_median == pytest.approx(0.5)
    assert "x^2.00" in row.shape
    assert not row.met
    assert growth("suite", points, lambda name, shape: None) == []


def test_repeated_samples_add_up_and_clean_rounds_take_precedence():
    busy, clean = Samples([{"ours": 9.0}] * 2, 0, 2), Samples([{"ours": 1.0}] * 3, 3, 4)
    assert (clean + clean).rounds == [{"ours": 1.0}] * 6 and (clean + clean).taken == 8
    assert (busy + clean).rounds == clean.rounds and (busy + clean).taken == 6
    assert (busy + busy).rounds == [{"ours": 9.0}] * 4


@pytest.mark.parametrize(("ratio", "close"), [(2.0, True), (1.61, True), (2.09, True), (1.55, False), (2.15, False)])
def test_a_figure_near_its_goal_is_close_on_either_side(ratio, close):
    samples = Samples([{"ours": 1.0, "peer": ratio}], 1, 1)
    (row,) = rows("suite", case(), "default", samples, goal=lambda peer: 2.0)
    assert row.close is close
    (row,) = rows("suite", case(), "default", samples)
    assert row.close is False


class FakeWorkers(FakeMeter):
    """Workers whose candidates have known times and bytes."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def prepare(self, index, case, name, allocator):
        pass

    def release(self):
        pass

    def peak(self, name):
        return self.seconds[name]


def run_case(monkeypatch, seconds, goal, growth_goal=None, **kw):
    monkeypatch.setattr(runner, "ratio_goal", lambda backend, name, *others: growth_goal if name == "growth" else goal)
    effort = Effort(rounds=7, least=5, budget=1e9)
    run = CaseRun("suite", 0, case(**kw), "default", "cpu_ref", (), effort)
    runner.measure([run], lambda suite: FakeWorkers(seconds), lambda line: None)
    return Results(run.rows(), run.absent)


@pytest.mark.parametrize(
    ("goal", "rounds"), [(2.0, 21), (1.95, 21), (2.05, 21), (2.4, 21), (1.5, 5), (1.85, 7), (3.0, 7), (None, 5)]
)
def test_a_figure_near_its_goal_is_measured_again_and_one_far_above_in_fewer_rounds(monkeypatch, goal, rounds):
    (row,) = run_case(monkeypatch, {"ours": 1.0, "peer": 2.0}, goal).rows
    assert row.rounds == rounds


def test_close_cases_are_measured_again_after_all_others_and_all_rounds_count(monkeypatch):
    """A disturbance during the first measurement of a case does not decide its verdict."""
    monkeypatch.setattr(runner, "ratio_goal", lambda backend, name, *others: None if name == "growth" else 2.0)
    effort = Effort(rounds=5, least=5, budget=1e9)
    suites = ("one", "one", "two", "two")
    runs = [CaseRun(suite, i, case(), "default", "cpu_ref", (), effort) for i, suite in enumerate(suites)]
    opened, lines = [], []

    def workers_of(suite):
        opened.append(suite)
        return FakeWorkers({"ours": 1.0, "peer": lambda r: 1.8 if r < 5 and len(opened) <= 2 else 2.5})

    runner.measure(runs, workers_of, lines.append)
    shown = [line.rpartition("malloc: ")[2] for line in lines]
    assert shown == ["1.80x peer", "2.50x peer"] * 2 + ["2.15x peer, measured 2 times"] * 2
    assert opened == ["one", "two"] * 2
    first, second = (run.rows()[0] for run in runs[:2])
    assert (first.rounds, second.rounds) == (10, 5)
    assert (first.ratio_median, first.ratio_min, first.met) == (2.15, 1.8, True)


def test_a_case_whose_peers_all_cannot_run_is_absent():
    class WithoutPeers(FakeWorkers):
        def prepare(self, index, case, name, allocator):
            if name == "peer":
                raise Unavailable("not installed")

    run = CaseRun("suite", 0, case(), "default", "cpu_ref", (), Effort(budget=1e9))
    runner.measure([run], lambda suite: WithoutPeers({"ours": 1.0}), lambda line: None)
    assert run.rows() == [] and [(a.peer, a.reason) for a in run.absent] == [("peer", "not installed")]


def test_threads_that_slept_are_woken_by_calls_that_are_not_timed():
    meter = FakeMeter({"short": 0.001, "long": 3.0})
    interleave(["short", "long"], meter, Effort(rounds=1, least=1, seconds=0.02, warm=0.012))
    assert [(name, n) for r, name, n in meter.calls if r == 0] == [("short", 12), ("short", 20), ("long", 1)]


def test_a_point_of_a_series_with_a_goal_gets_all_its_rounds(monkeypatch):
    seconds = {"ours": 1.0, "peer": 2.0}
    (row,) = run_case(monkeypatch, seconds, None, growth_goal=0.9, series="window: S", x=1.0).rows
    assert row.rounds == 7
    (row,) = run_case(monkeypatch, seconds, None, series="heads", x=1.0).rows
    assert row.rounds == 5


def test_a_memory_goal_is_not_met_if_no_use_was_seen(monkeypatch):
    results = run_case(monkeypatch, {"ours": 0, "peer": 100}, 50.0, quantity="bytes")
    assert results.rows == [] and len(results.misses) == 1 and "not measured" in results.misses[0]
    (row,) = run_case(monkeypatch, {"ours": 1, "peer": 100}, 50.0, quantity="bytes").rows
    assert row.ratio_median == 100.0
