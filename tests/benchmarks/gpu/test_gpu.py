"""`make gpu` without a GPU: its calls are valid, parts survive crashes, and the report is correct."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import types

import pytest
import torch

import hal
from hal.backends.cuda import Cuda
from hal.bench.gpu import cases as gpu_cases
from hal.bench.gpu import gpu_report, preflight
from hal.bench.gpu import parts as gpu_parts
from hal.bench.gpu import run as gpu
from hal.bench.gpu.rehearsal import Gpu, Rehearsal


def test_without_a_gpu_the_reason_is_printed_and_the_exit_code_is_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu.main([]) == 2
    assert "built without CUDA" in capsys.readouterr().err


def row(**changes):
    base = {"name": "layer_norm fwd", "shape": "8x8", "peer": "eager", "ratio_median": 1.5, "ratio_min": 1.4}
    base |= {"ratio_max": 1.6, "seconds": 1e-5, "ceiling": "device copy", "share_of_ceiling": 0.9}
    base |= {"timed": "calls", "flops_per_second": None, "error_in_tolerances": 0.25}
    return {**base, **changes}


def test_a_missed_goal_is_marked():
    assert gpu_report.missed(row()) == ""
    assert "goal 85%" in gpu_report.missed(row(share_of_ceiling=0.5))
    assert gpu_report.missed(row(share_of_ceiling=0.5, shape="8x8, small")) == ""
    attention = {"name": "attention causal fwd", "share_of_ceiling": None}
    assert "faster" in gpu_report.missed(row(**attention, peer="SDPA cuDNN", ratio_median=0.9))
    assert gpu_report.missed(row(**attention, peer="SDPA cuDNN", ratio_median=1.0)) == ""


def test_the_order_of_attention_is_read_from_the_rows():
    name = "attention causal fwd"
    rows = [row(name=name, peer=p, ratio_median=r) for p, r in (("cuda/sdpa", 1.9), ("cuda/flash", 1.0))]
    rows.append({"name": name, "shape": "", "peer": "cuda/flex", "absent": "no Triton"})
    rows += [row(name=name, peer="SDPA cuDNN"), row(name="attention window 512 fwd", peer="cuda/flex")]
    assert gpu_report.attention_order(rows) == {"square": ["cuda/flash", "cuda/sdpa"], "window": ["cuda/flex"]}
    assert gpu_report.attention_order([row()]) == {}


RUN = {"sources": "s", "commit": "c", "date": "d"}


def complete(*rows):
    """The record of a part with one unit, "u"."""
    units = {"u": {"done": True, "rows": list(rows), **RUN}}
    return {"state": "complete", "why": "", "current": "", "seconds": 3.0, "units": units}


def report_of(**parts):
    return {"machine": {"device": "NVIDIA Test", **RUN}, "parts": parts}


def losses(cuda, cpu_ref):
    curves = {"cuda": cuda, "cpu_ref": cpu_ref}
    return complete(*({"backend": name, "options": "--o", "losses": curve} for name, curve in curves.items()))


def test_the_report_shows_every_row():
    parity = {"op": "rotary", "dtype": "float32", "implementation": "cuda/kernel", "status": "pass", "samples": 3}
    failed = {"name": "memory statistics", "problem": "64 MiB show as 0"}
    report = report_of(
        parity=complete({**parity, "worst_error_in_tolerances": 0.123456}),
        checks=complete({"name": "graph of rotary cuda/kernel", "problem": ""}, failed),
        kernels=complete(
            row(copy_bandwidth=3e12), {"name": "x", "shape": "y", "peer": "compile", "absent": "no Triton"}
        ),
        train_step=complete({"error": "killed by SIGSEGV"}),
        attention=complete(row(name="attention causal fwd", peer="cuda/flash")),
        training=losses([1.0, 0.5], [1.0, 0.499]),
    )
    text = gpu_report.markdown(report)
    assert "- graph of rotary cuda/kernel: passes" in text and "**memory statistics: 64 MiB show as 0**" in text
    assert "| rotary | float32 | cuda/kernel | pass | 3 | 0.123 |" in text
    assert (
        "| 1.50 | 1.40..1.60 | 10.0 us | 90% |  | 0.25 |" in text
        and "no Triton" in text
        and "0.0010 over 2 steps" in text
    )
    assert (
        "3000 GB/s" in text and '{"square": ["cuda/flash"]}' in text and "**train_step, u: killed by SIGSEGV**" in text
    )


def test_losses_that_differ_are_a_failure_and_nan_is_too():
    for other in (0.4, float("nan")):
        assert "differ from cpu_ref" in gpu_report.failures(report_of(training=losses([0.5], [other])), ["training"])[0]
    assert not gpu_report.failures(report_of(training=losses([0.5], [0.49])), ["training"])


def test_an_unfinished_report_says_what_is_missing():
    report = report_of(
        parity=complete(), checks=complete(), training={**complete(), "state": "stopped", "why": "OSError: no"}
    )
    report["parts"]["kernels"] = {**complete(), "state": "running"}
    failures = gpu_report.failures(report)
    assert [text.split(" (")[0] for text in failures] == [
        "kernels has not finished",
        "large has not run",
        "train_step has not run",
        "attention has not run",
        "training stopped: OSError: no",
        "multi has not run",
    ]
    text = gpu_report.markdown(report)
    assert "**training stopped: OSError: no**" in text and "nothing ran" in text
    assert gpu_report.failures(report, ["parity", "checks"]) == []


def test_a_module_of_a_missing_package_is_missing(monkeypatch):
    monkeypatch.setitem(preflight.NEEDS, "parity", {"no_such_package.core": "no-such-package"})
    assert preflight.lacking("parity") == "no-such-package is not installed: pip install no-such-package"


def test_an_unknown_part_is_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["parity", "speed"])
    assert "no part is called speed; parts: parity, checks" in capsys.readouterr().err


def test_the_reason_why_a_device_cannot_be_used_is_printed_and_the_exit_code_is_2(monkeypatch, capsys):
    monkeypatch.setattr(Cuda, "probe", lambda self: hal.Probe(True, 1, "one"))
    fails = "import sys; sys.exit('torch cannot start CUDA: too old')"
    monkeypatch.setattr(gpu, "command", lambda simulated, *arguments: [sys.executable, "-c", fails])
    assert gpu.main([]) == 2
    assert "make gpu: torch cannot start CUDA: too old" in capsys.readouterr().err


def test_the_digest_changes_with_the_sources_only(monkeypatch, tmp_path):
    assert gpu.sources() == gpu.sources() and gpu.commit()
    (tmp_path / "ops").mkdir()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    digests = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.cu", ""), ("notes.md", ""), ("attention_order.json", "{}")):
        (tmp_path / "ops" / name).write_text(text)
        digests.add(gpu.sources())
    assert len(digests) == 3  # notes.md and the order of attention, which follows a report, are no sources


FAKE_PYTHON = """#!/bin/sh
echo "$0 $@" >> "{log}"
case "$1" in
*preflight.py) exit {code} ;;
esac
"""


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("environment", [False, True])
def test_make_gpu_installs_nothing_and_runs_only_where_it_can(tmp_path, code, environment):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    log, python, venv = tmp_path / "log", tmp_path / "python", tmp_path / "venv"
    used = venv / "bin" / "python" if environment else python
    for path in (python, used):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE_PYTHON.format(log=log, code=code))
        path.chmod(0o755)
    command = ["make", "gpu", f"PYTHON={python}", f"GPU={venv}", "PARTS=parity checks"]
    done = subprocess.run(command, cwd=gpu.ROOT, check=False, capture_output=True)
    ran = [f"{used} benchmarks/gpu/preflight.py parity checks", f"{used} -m hal.bench.gpu.run parity checks"]
    assert log.read_text().splitlines() == (ran[:1] if code else ran)
    assert (done.returncode != 0) == bool(code)


@pytest.mark.parametrize(
    ("absent", "answer", "code", "text"),
    [
        ((), "13.0 True", 0, ""),
        (("hypothesis",), "13.0 True", 0, "the part parity will not run: hypothesis is not installed"),
        (("triton",), "13.0 True", 0, "without triton, these are absent: cuda/flex"),
        (("cupy",), "13.0 True", 1, "cupy-cuda13x is not installed"),
        ((), "none False", 1, "this torch is built without CUDA"),
        ((), "13.0 False", 1, "torch (for CUDA 13.0) finds no GPU"),
        ((), "", 1, "torch cannot be imported: no message"),
    ],
)
def test_the_preflight_names_what_is_missing(monkeypatch, capsys, absent, answer, code, text):
    monkeypatch.setattr(preflight, "_installed", lambda module: module not in absent)
    monkeypatch.setattr(preflight.ctypes.util, "find_library", lambda name: "libcuda.so.1")
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(preflight.subprocess, "run", lambda *args, **how: done)
    assert preflight.main([]) == code
    printed = capsys.readouterr().out
    assert text in printed and ("nothing can run" in printed) == bool(code) and bool(printed) == bool(text)


def test_the_preflight_knows_the_parts_and_needs_no_package():
    assert set(preflight.ALL) == set(gpu_report.PARTS)
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({preflight.__file__!r})"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


class Steady(Gpu):
    """A GPU on which every call takes `pace` seconds and a synchronisation fails once `broken`."""

    rounds, copy_bandwidth, pace = 3, 1.0, 1e-3

    def __init__(self):
        self.broken, self.counts = [], []

    def seconds_per_call(self, call, count):
        self.counts.append(count)
        call()
        return self.pace

    def synchronize(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access")

    def alive(self):
        return not self.broken


def case_of(check=lambda: 0.5, **calls):
    return gpu_cases.GpuCase("x", "s", {"ours": lambda: None, **calls}, check, bytes=10, flops=1e9)


def broken():
    raise ImportError("no module\nat all")


def test_a_peer_that_raises_is_absent_and_ours_a_failure():
    rows = list(gpu_parts.measure(case_of(a=lambda: None, b=broken), Steady()))
    assert [r["peer"] for r in rows] == ["a", "b"] and rows[1]["absent"] == "ImportError: no module"
    (only,) = gpu_parts.measure(case_of(ours=broken, a=lambda: None), Steady())
    assert "x s did not run: ImportError" in gpu_report.failures(report_of(kernels=complete(only)), ["kernels"])[0]


def test_a_row_has_the_error_of_its_values_and_a_large_one_is_a_failure():
    (row,) = gpu_parts.measure(case_of(a=lambda: None), Steady())
    assert (row["error_in_tolerances"], row["share_of_ceiling"], row["flops_per_second"]) == (
        0.5,
        10 / 1e-3,
        1e9 / 1e-3,
    )
    for wrong, shown in ((1.5, "1.5"), (float("inf"), "inf"), (float("nan"), "inf")):
        (row,) = gpu_parts.measure(case_of(lambda wrong=wrong: wrong, a=lambda: None), Steady())
        (failure,) = gpu_report.failures(report_of(large=complete(row)), ["large"])
        assert failure == f"x s: an error of {shown} tolerances at the measured size"


def test_small_calls_are_timed_by_replaying_a_graph(monkeypatch):
    steady, calls = Steady(), []
    steady.pace = 1e-6

    def capture(function):
        function()
        calls.append("captured")
        return lambda: calls.append("replayed")

    monkeypatch.setattr(hal, "backend", lambda: types.SimpleNamespace(capture=capture))
    rows = list(gpu_parts.measure(case_of(a=lambda: None, b=lambda: None), steady))
    assert calls.count("captured") == 3 and calls.count("replayed") == 3 * steady.rounds
    assert {r["timed"] for r in rows} == {"a graph of 20 calls"} and rows[0]["seconds"] == 1e-6 / 20
    assert next(iter(gpu_parts.measure(case_of(a=lambda: None), Steady())))["timed"] == "calls"


def test_a_peer_that_breaks_the_context_is_named_and_ours_is_not_blamed():
    steady = Steady()
    with pytest.raises(RuntimeError, match="a broke the CUDA context: RuntimeError: CUDA error"):
        list(gpu_parts.measure(case_of(a=lambda: steady.broken.append(1)), steady))


@pytest.mark.slow
def test_parity_runs_every_op_in_a_fixed_order_and_cudnn_afterwards(simulated, monkeypatch):
    deterministic = []
    monkeypatch.setattr(hal, "use", lambda name, **options: deterministic.append(options["deterministic"]) or simulated)
    units = list(gpu_parts.parity(Rehearsal()))
    names = [name for name, _ in units]
    assert names == [*(f"{op} in a fixed order" for op in hal.OPS), "golden_loss", "flash_attention, cudnn"]
    assert deterministic == [True, False]
    ran = {name: [r["implementation"] for r in make()] for name, make in units if name.startswith(("swi", "flash"))}
    assert "cuda/kernel" in ran["swiglu in a fixed order"]
    ids = [set(ran[f"flash_attention{mode}"]) - {"hal.lower"} for mode in (" in a fixed order", ", cudnn")]
    assert ids == [{i.id for i in simulated.impls["flash_attention"]} - {"cuda/cudnn"}, {"cuda/cudnn"}]


def test_training_runs_on_both_backends(monkeypatch):
    ran = []

    def run(command, *, check, cwd):
        ran.append(command[command.index("--backend") + 1])
        folder = pathlib.Path(command[command.index("--run-dir") + 1])
        assert check and pathlib.Path(command[command.index("--text-file") + 1]).stat().st_size and cwd == gpu.ROOT
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"losses": [[1, 2.5], [2, 2.25]]}))

    monkeypatch.setattr(subprocess, "run", run)
    rows = [row for _, make in gpu_parts.training(Gpu()) for row in make()]
    assert [(r["backend"], r["losses"]) for r in rows] == [("cuda", [2.5, 2.25]), ("cpu_ref", [2.5, 2.25])]
    assert ran == ["cuda", "cpu_ref"] and all(r["options"] == Gpu.train for r in rows)


class SmallCache(Gpu):
    def cache_bytes(self):
        return 1000


def test_inputs_have_left_the_l2_cache_before_they_are_used_again():
    x, w = torch.zeros(100), torch.ones(10)  # 480 bytes with w twice
    sets = gpu_cases._sets(SmallCache(), (x, w, w))
    assert len(sets) == 4 and len({s[0].data_ptr() for s in sets}) == 4
    assert all(s[1] is s[2] and torch.equal(s[1], w) for s in sets)
    assert len(gpu_cases._sets(SmallCache(), (torch.zeros(501),))) == 1  # as much as evicts itself
    inputs, check = [], types.SimpleNamespace(gradients=1, worst=lambda f, x: 0.0)
    functions = {"ours": lambda x: inputs.append(id(x)) or x * 2}
    (forward, both) = gpu_cases.both(SmallCache(), "n", "s", functions, (x,), check)
    for _ in range(4):
        forward.calls["ours"]()
    assert len(set(inputs)) == 4
    assert both.calls["ours"]()[0].shape == x.shape


def test_a_module_is_measured_with_the_gradients_of_its_own_parameters():
    x, w = torch.randn(8, 16), torch.ones(16)
    check = types.SimpleNamespace(gradients=2, worst=lambda f, x: 0.0)
    cases = gpu_cases.both(
        SmallCache(), "n", "s", {"ours": torch.mul}, (x, w), check, modules={"m": lambda: torch.nn.LayerNorm(16)}
    )
    forward, backward = (case.calls["m"] for case in cases)
    assert forward().shape == x.shape and [g.shape for g in backward()] == [x.shape, w.shape, w.shape]


@pytest.fixture
def simulated():
    backend = Cuda(simulate=True)
    if not backend.probe().ok:
        pytest.skip(backend.probe().reason)
    backend.build()
    with hal.activated(backend):
        yield backend


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu_parts.CASES)
def test_every_call_that_is_measured_is_valid_and_its_values_are_right(simulated, part):
    """On the simulator, with sizes divided by 64. Peers that need Triton or a GPU do not run here."""
    names: set[str] = set()  # a report stores cases by name
    for case in gpu_parts.CASES[part](Rehearsal()):
        assert f"{case.name} {case.shape}" not in names
        names.add(f"{case.name} {case.shape}")
        assert case.check() <= 1.0, case
        case.calls["ours"]()
        if "eager" in case.calls:
            case.calls["eager"]()
        bound = case.bytes or case.flops or part == "train_step"
        assert bound, case


def test_units_of_other_sources_are_counted_by_commit():
    report = report_of(checks=complete({"name": "a", "problem": ""}))
    assert gpu_report.other_commits(report) == []
    report["machine"]["sources"] = "later"
    assert gpu_report.other_commits(report) == ["checks: 1 of 1 units with the sources of c (d)"]
    assert "- checks: 1 of 1 units with the sources of c (d)" in gpu_report.markdown(report)
