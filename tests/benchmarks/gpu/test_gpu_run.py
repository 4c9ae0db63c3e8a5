"""The processes of `make gpu`: parts survive crashes, hangs and interruptions. On fake parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from hal.bench.gpu import gpu_report, preflight, store
from hal.bench.gpu import run as gpu

PARTS = """
import os, pathlib, signal, subprocess, sys
from hal.bench.gpu import parts as gpu_parts
from hal.bench.gpu import run as gpu
log = pathlib.Path(os.environ["LOG"])
dead = False

def unit(part, name, how):
    def make():
        global dead
        with log.open("a") as file:
            print(part, name, file=file)
        assert not dead
        yield {"name": name, "problem": ""}
        if how == "raises":
            raise RuntimeError("CUDA error: an illegal memory access\\nmore")
        if how == "breaks":
            dead = True
            raise RuntimeError("CUDA error: an illegal memory access\\nmore")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hangs":
            subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
    return name, make

def units(part):
    for name, how in UNITS[part]:
        if how == "between":
            raise MemoryError("no room for " + name)
        yield unit(part, name, how)

UNITS = dict.fromkeys(gpu.PARTS, [("a", ""), ("b", "")]) | eval(os.environ["UNITS"])
gpu_parts.UNITS = {part: lambda gpu, part=part: units(part) for part in UNITS}
gpu.Gpu.alive = lambda self: not dead
sys.exit(gpu.main())
"""


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Runs gpu.main on a fake GPU and fake parts; returns its exit code, the units that ran, and the report."""
    machine = {"device": "NVIDIA Test 1", "sources": "s", "torch": "t", "CUDA": "13", "date": "d", "commit": "c"}
    machine |= {"devices": 2}
    monkeypatch.setattr(gpu, "machine", lambda gpu: dict(machine))
    monkeypatch.setattr(gpu, "command", lambda simulated, *arguments: [sys.executable, "-c", PARTS, *arguments])
    monkeypatch.setattr(preflight, "lacking", lambda part: "")

    def run(*arguments, changed=None, **units):
        machine.update(changed or {})
        log = tmp_path / "log"
        log.write_text("")
        monkeypatch.setenv("LOG", str(log))
        monkeypatch.setenv("UNITS", repr(units))
        code = gpu.main([*arguments, "--out", str(tmp_path)])
        return code, log.read_text().split("\n")[:-1], json.loads((tmp_path / "cuda-nvidia-test-1.json").read_text())

    return run


@pytest.mark.slow
def test_parts_run_by_name_extend_the_report(parts, capsys):
    code, ran, report = parts("checks")
    assert (code, ran, list(report["parts"])) == (0, ["checks a", "checks b"], ["checks"])
    assert "not run yet: parity, kernels" in capsys.readouterr().out
    code, ran, report = parts("training", "kernels", changed={"date": "later"})
    assert (code, ran) == (0, ["kernels a", "kernels b", "training a", "training b"])
    assert list(report["parts"]) == ["checks", "kernels", "training"] and report["machine"]["date"] == "later"
    assert parts("checks")[1] == ["checks a", "checks b"]  # a complete part runs again when it is named


@pytest.mark.slow
def test_units_of_other_sources_are_replaced_one_by_one_or_kept(parts):
    units = [("a", ""), ("b", "between")]
    parts("checks", "kernels")
    code, ran, report = parts("checks", checks=units, changed={"sources": "s2", "commit": "c2"})
    assert (code, ran) == (1, ["checks a"])
    assert {name: unit["commit"] for name, unit in report["parts"]["checks"]["units"].items()} == {"a": "c2", "b": "c"}
    assert report["parts"]["kernels"]["units"]["a"]["sources"] == "s"
    code, ran, report = parts("checks", "--missing", checks=[("a", ""), ("c", "")], changed={"sources": "s3"})
    assert (code, ran) == (0, ["checks c"])
    assert {name: unit["sources"] for name, unit in report["parts"]["checks"]["units"].items()} == {
        "a": "s2",
        "c": "s3",
    }
    assert parts("checks")[1] == ["checks a", "checks b"]  # c is of these sources, a is not, and b is new
    assert list(parts("checks", changed={"torch": "other"})[2]["parts"]) == ["checks"]


@pytest.mark.nightly
def test_without_names_all_parts_run(parts):
    code, ran, report = parts()
    assert code == 0 and list(report["parts"]) == list(gpu.PARTS) and len(ran) == 2 * len(gpu.PARTS)


@pytest.mark.slow
def test_after_a_unit_that_kills_its_process_the_part_and_the_others_continue(parts, capsys):
    code, ran, report = parts("checks", "kernels", checks=[("a", ""), ("b", "dies"), ("c", "")])
    assert (code, ran) == (1, ["checks a", "checks b", "checks c", "kernels a", "kernels b"])
    units = report["parts"]["checks"]["units"]
    assert units["b"]["rows"] == [{"name": "b", "problem": ""}, {"error": "killed by SIGSEGV"}]
    assert "checks, b: killed by SIGSEGV" in capsys.readouterr().out
    assert [entry["state"] for entry in report["parts"].values()] == ["complete", "complete"]


@pytest.mark.slow
def test_after_a_unit_that_breaks_the_context_another_process_continues(parts):
    code, ran, report = parts("checks", checks=[("a", "raises"), ("b", "breaks"), ("c", "")])
    assert (code, ran) == (1, ["checks a", "checks b", "checks c"])
    errors = {name: unit["rows"][1:] for name, unit in report["parts"]["checks"]["units"].items()}
    illegal = [{"error": "RuntimeError: CUDA error: an illegal memory access"}]
    assert errors == {"a": illegal, "b": illegal, "c": []}
    assert report["parts"]["checks"]["units"]["c"]["rows"] == [{"name": "c", "problem": ""}]


@pytest.mark.slow
def test_an_exception_between_units_stops_the_part_which_can_continue_later(parts, capsys):
    code, ran, report = parts("checks", "kernels", checks=[("a", ""), ("b", "between")])
    assert (code, ran) == (1, ["checks a", "kernels a", "kernels b"])
    assert report["parts"]["checks"]["why"] == "MemoryError: no room for b"
    assert "checks stopped: MemoryError" in capsys.readouterr().out
    assert parts("checks")[:2] == (0, ["checks b"])


@pytest.mark.slow
def test_a_part_ends_when_its_processes_finish_no_unit(parts, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "end_process", lambda *a: True)
    code, ran, _ = parts("checks")
    assert (code, ran) == (1, ["checks a", "checks b"])
    assert "checks stopped: its last process did not finish a unit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_ends_when_its_time_is_over_and_continues_in_the_next_run(parts, monkeypatch, tmp_path):
    hanging, run_child = [("a", ""), ("b", "hangs"), ("c", "")], gpu._run_child

    def until_b(arguments, seconds):
        """The limit is reached when unit b runs, if it hangs."""
        assert seconds <= gpu.LIMIT
        wait = subprocess.Popen.wait

        def over(child, timeout=None):
            while timeout == seconds and child.poll() is None:
                if "hangs" in os.environ["UNITS"] and "checks b" in (tmp_path / "log").read_text():
                    raise subprocess.TimeoutExpired(arguments, seconds)
                time.sleep(0.05)
            return wait(child, timeout)

        with monkeypatch.context() as m:
            m.setattr(subprocess.Popen, "wait", over)
            return run_child(arguments, seconds)

    monkeypatch.setattr(gpu, "_run_child", until_b)
    code, ran, report = parts("checks", checks=hanging)
    assert (code, ran) == (1, ["checks a", "checks b"])
    assert report["parts"]["checks"]["why"] == "its 480 seconds are over; run it again: it continues"
    assert not report["parts"]["checks"]["units"]["b"]["done"]
    # A unit that had all of the time is not tried again.
    code, ran, report = parts("checks", checks=hanging)
    assert ran == ["checks b"] and report["parts"]["checks"]["units"]["b"]["rows"][-1] == {
        "error": "not finished in 480 seconds"
    }
    assert parts("checks", checks=hanging)[1] == ["checks c"]


@pytest.mark.slow
def test_a_process_that_is_interrupted_has_ended():
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert gpu._run_child(asleep, 0.1) is None
    assert gpu._run_child([sys.executable, "-c", "raise SystemExit(3)"], 600) == 3


@pytest.mark.slow
def test_a_run_that_is_killed_loses_no_finished_unit(parts, monkeypatch, tmp_path):
    """Parent and child end together: the unit that was running runs again, and the finished ones are kept."""
    with monkeypatch.context() as m:
        m.setattr(gpu, "end_process", lambda *a: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            parts("checks", checks=[("a", ""), ("b", "dies")])
    saved_report = store.load(tmp_path / "cuda-nvidia-test-1.json")
    assert saved_report["parts"]["checks"]["current"] == "b"
    assert "has not finished" in gpu_report.failures(saved_report, ["checks"])[0]
    assert "- b: passes" in (tmp_path / "cuda-nvidia-test-1.md").read_text()
    code, ran, report = parts("checks", checks=[("a", ""), ("b", "")])
    assert (code, ran) == (0, ["checks b"]) and len(report["parts"]["checks"]["units"]["b"]["rows"]) == 1


def test_a_part_whose_packages_are_missing_is_recorded_with_what_to_install(parts, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "lacking", LACKING)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name in ("megatron.core", "cffi") else object())
    code, ran, report = parts("checks", "training")
    assert (code, ran) == (1, ["checks a", "checks b"])
    why = "megatron-core and cffi are not installed: pip install megatron-core==0.16.1 cffi"
    assert report["parts"]["training"]["state"] == "not run" and report["parts"]["training"]["why"] == why
    assert f"training did not run: {why}" in capsys.readouterr().out


LACKING = preflight.lacking
