"""--profile and its files, times of phases, slow ranks: what a run writes, on one rank and on two."""

import gzip
import json
import math
import pickle

import pytest

from hal import spans
from hal.model.apps.html_report.profile import read_profiles
from hal.model.apps.planning.memory import memory
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.schema import ConfigError
from hal.model.training.run import main, train
from hal.model.training.step_timers import StepTimers, straggler_line, timing_lines
from hal.model.training.trainer import Trainer, TrainingFailed
from hal.spans import Span

WINDOW = {"profile": True, "profile_step_start": 2, "profile_step_end": 4}


def test_a_profile_holds_the_steps_of_the_window_and_changes_no_result(tiny, cpu_ref, tmp_path, capsys):
    plain = train(tiny(run_dir=str(tmp_path / "plain")))
    # Evaluations between the steps are not recorded.
    evaluations = {"eval_interval": 1, "eval_iters": 1}
    config = tiny(**WINDOW, **evaluations, record_memory_history=True, run_dir=str(tmp_path / "run"))
    profiled = train(config)
    folder = tmp_path / "run" / "profile"
    assert f"profiled steps 3 to 4: {folder}" in capsys.readouterr().out
    losses = [json.loads((tmp_path / name / "run.json").read_text())["losses"] for name in ("plain", "run")]
    assert losses[0] == losses[1] and profiled.iteration == plain.iteration == 6
    record = json.loads((folder / "rank-0.json").read_text())
    assert [step[0] for step in record["steps"]] == [3, 4]
    # Two microbatches per step, two layers with one attention each; the last layer's norm and those of both layers.
    calls = {(row["op"], row["direction"]): row["calls"] for row in record["ops"]}
    assert calls["flash_attention", "forward"] == calls["flash_attention", "backward"] == 2 * 2 * 2
    assert calls["adamw", "forward"] == 2 * 2  # decayed parameters and others
    assert set(record["phases"]) == {
        *("data", "forward", "backward", "forward-backward", "gradient reduction", "optimizer"),
    }
    assert record["op_seconds"] < record["seconds"] and record["ceilings"]["products"].keys() == {"float32"}
    assert 0 < record["mfu"] < math.inf
    # An estimate of the planner, which tests hold to the trainer's bytes, is near the tensors that were seen.
    estimate = memory(config, make_parallel_layout(config, 1))
    assert sum(record["memory"]["peak"].values()) == pytest.approx(estimate.total, rel=0.15)
    weights = sum(p.nbytes for p in profiled.model.parameters())
    peak = record["memory"]["peak"]
    assert peak["weights"] == weights and peak["optimizer"] == 2 * weights and peak["gradients"] <= weights
    events = json.loads((folder / "rank-0.trace.json").read_text())["traceEvents"]
    assert sum(e.get("cat") == "step" for e in events) == 2 and any(e["name"].endswith(", backward") for e in events)
    assert pickle.loads((folder / "snapshot_0.pickle").read_bytes())["device_traces"][0]


def test_without_the_option_nothing_listens(tiny, cpu_ref, tmp_path, monkeypatch):
    monkeypatch.setattr(Span, "__init__", lambda *given: pytest.fail("a span was made"))
    train(tiny(train_iters=1))
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize("end", [{"exit_interval": 3}, {"train_iters": 3}])
def test_a_run_that_ends_within_the_window_writes_what_it_has(tiny, cpu_ref, tmp_path, end):
    train(tiny(**{**WINDOW, **end}))
    record = json.loads((tmp_path / "run" / "profile" / "rank-0.json").read_text())
    assert [step[0] for step in record["steps"]] == [3] and not spans.listeners


def test_a_step_that_fails_ends_the_recording(tiny, cpu_ref, tmp_path, monkeypatch):
    advance = Trainer.advance

    def fail_at_the_fourth(self):
        if self.iteration == 3:
            raise TrainingFailed("as planned")
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", fail_at_the_fourth)
    with pytest.raises(TrainingFailed, match="as planned"):
        train(tiny(**WINDOW))
    assert not spans.listeners


def test_torchs_profiler_writes_its_trace_with_hals_names(tiny, cpu_ref, tmp_path):
    train(tiny(**WINDOW, use_pytorch_profiler=True))
    with gzip.open(tmp_path / "run" / "profile" / "rank-0.torch.json.gz", "rt") as file:
        trace = file.read()
    assert "flash_attention (cpu_ref/" in trace and "forward" in trace


def test_a_rank_that_is_not_asked_for_writes_nothing(tiny, cpu_ref, tmp_path):
    train(tiny(**WINDOW, profile_ranks=("1",)))
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.nightly
def test_two_ranks_are_put_on_one_clock(text, tmp_path, cpu_ref, capfd):
    words = (
        f"--backend cpu_ref --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --text-file {text}"
    )
    words += (
        f" --global-batch-size 4 --micro-batch-size 2 --train-iters 4 --sample-tokens 0 --run-dir {tmp_path / 'run'}"
    )
    words += " --nproc-per-node 2 --profile --profile-ranks 0 1 --profile-step-start 2 --profile-step-end 4"
    words += " --timing-log-level 2 --log-straggler --log-interval 4"
    assert main(words.split()) == 0
    out = capfd.readouterr().out
    assert "(min, max) time across ranks (ms):" in out and "communication ....." in out
    assert "slowest ranks: " in out
    first, second = read_profiles(tmp_path / "run" / "profile")
    assert [c.name for c in first.collectives] == [c.name for c in second.collectives] != []
    for a, b in zip(first.collectives, second.collectives):
        # A blocking collective ends on both ranks when the last one has arrived: on one clock, no rank ends before.
        assert a.blocked[1] > b.arrived - 20_000_000 and b.blocked[1] > a.arrived - 20_000_000
    assert first.waited + second.waited > 0 and first.waited <= first.blocked_seconds + 1e-9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": True, "profile_step_start": 5, "profile_step_end": 5}, "must be above"),
        ({"profile": True}, "leaves nothing to profile of --train-iters 6"),
        ({**WINDOW, "verify_ops": 0.5}, "give one of them"),
        ({**WINDOW, "profile_ranks": ("0", "7"), "nproc_per_node": 1}, "--profile-ranks 7"),
    ],
)
def test_contradictions_are_refused(tiny, options, words):
    with pytest.raises(ConfigError, match=words):
        tiny(**options)


def test_times_are_shown_as_megatron_shows_them():
    table = {"forward": [0.001, 0.0025], "optimizer": [0.004, 0.003]}
    assert timing_lines(table, "minmax").splitlines() == [
        "(min, max) time across ranks (ms):",
        f"    {'forward '.ljust(48, '.')}: (1.00, 2.50)",
        f"    {'optimizer '.ljust(48, '.')}: (3.00, 4.00)",
    ]
    assert timing_lines(table, "max").splitlines()[1].endswith(": 2.50")
    assert timing_lines(table, "all").splitlines()[2:4] == ["     rank  0: 1.00", "     rank  1: 2.50"]


def test_a_slow_rank_is_named_with_its_ratio():
    line = straggler_line([0.1, 0.1, 0.15, 0.09], 1)
    assert "slowest ranks: 2 (150.0 ms, 1.50x)" in line and "fastest ranks: 3 (90.0 ms, 0.90x)" in line
    assert "slowest ranks: 2 (150.0 ms, 1.50x), 1 (100.0 ms, 1.00x)" in straggler_line([0.1, 0.1, 0.15, 0.09], 2)


class Pair:
    """A rank whose world has one more, which takes twice as long."""

    class world:
        device = "cpu"

        @staticmethod
        def all_gather(x):
            import torch

            return torch.cat([x, 2 * x])


class Report:
    def __init__(self):
        self.lines, self.values = [], {}

    def write_line(self, text):
        self.lines.append(text)

    def scalars(self, iteration, values):
        self.values |= values


def test_waiting_for_others_is_no_work_of_a_slow_rank(tiny, cpu_ref):
    config = tiny(timing_log_level=2, log_timers_to_tensorboard=True, log_straggler=True, log_interval=1)
    report = Report()
    timers = StepTimers(config, Pair, report)
    ms = 1_000_000
    with timers.measuring():
        facts = {"part": "blocking"}
        timers._heard(Span("communication", "all_reduce", 2 * ms, 5 * ms, 1, facts))
        timers._heard(Span("phase", "forward", 0, 10 * ms, 1))
        timers._heard(Span("phase", "forward-backward", 0, 11 * ms, 1))
        timers._heard(Span("phase", "optimizer", 11 * ms, 12 * ms, 1))
    timers.step(type("Result", (), {"iteration": 1}))
    assert report.values["communication-time"] == pytest.approx(0.006)
    assert report.values["forward-backward-time"] == pytest.approx(0.022)
    # 10 - 3 + 1 ms of this rank, twice that of the other
    assert "slowest ranks: 1 (16.0 ms, 1.33x) | fastest ranks: 0 (8.0 ms, 0.67x)" in report.lines[-1]


def test_memory_goes_to_the_log_and_to_the_trackers(tiny, cpu_ref, monkeypatch):
    monkeypatch.setattr(cpu_ref, "memory_stats", lambda: {"allocated": 3 << 20})
    config, report = tiny(log_memory_to_tensorboard=True, log_memory_interval=2, log_interval=2), Report()
    timers = StepTimers(config, Pair, report)
    for iteration in (1, 2):
        timers.step(type("Result", (), {"iteration": iteration}))
    assert report.values == {"mem-allocated-bytes": 3 << 20}
    assert report.lines == [" [Rank 0] memory (MiB) | allocated: 3.0"]
