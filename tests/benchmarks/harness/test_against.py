"""Comparison with another checkout: cases are matched by name, ratios are before / after, and a slower row fails.

The other checkout is planted in the layout of older commits, with a worker that implements just the protocol.
Candidates advance the clock of their process themselves, so that every time is known.
"""

import os
import sys

import pytest

from hal.bench.harness import against, runner

OLD_WORKER = """
import importlib, json, socket, sys

thunks = {}
with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rw") as stream:
    for line in stream:
        request = json.loads(line)
        name, value = request["candidate"], None
        if request["do"] == "make":
            case = importlib.import_module(request["suite"]).cases()[request["case"]]
            thunks[name] = case.candidates[name]
        elif request["do"] == "run":
            value = request["n"] * thunks[name]()
        elif request["do"] == "count":
            value = thunks[name]()
        stream.write(json.dumps({"value": value}) + "\\n")
        stream.flush()
"""

OLD_SUITE = """
from types import SimpleNamespace

def case(name, **figures):
    return SimpleNamespace(name=name, shape="x", candidates={n: lambda f=f: f for n, f in figures.items()})

def cases():
    return [
        case("removed", ours=1.0),
        case("refused", ours=1.0),
        case("slower", ours=0.5),
        case("faster", ours=1.0),
        case("overhead", ours=0.75, direct=0.25),
        case("counted", ours=300),
    ]
"""

NEW_SUITE = """
import time
from hal.bench.harness.case import Candidate, Case

now = 0.0

def takes(seconds):
    time.perf_counter = lambda: now
    def call():
        global now
        now += seconds
    return call

def refuse():
    raise NotImplementedError("not any more")

def cases():
    slower, faster = Candidate(lambda: takes(1.0)), Candidate(lambda: takes(0.5))
    direct = Candidate(lambda: takes(0.25))
    return [
        Case("slower", "x", {"ours": slower}),
        Case("faster", "x", {"ours": faster}),
        Case("overhead", "x", {"ours": faster, "direct": direct}, minus="direct"),
        Case("counted", "x", {"ours": Candidate(lambda: lambda: 100)}, quantity="counted bytes"),
        Case("refused", "x", {"ours": Candidate(refuse)}),
        Case("added", "x", {"ours": faster}),
    ]
"""


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """An older checkout, and a suite "planted" in it and in this tree."""
    files = {
        "before/hal/__init__.py": "",
        "before/hal/bench/__init__.py": "",
        "before/hal/bench/worker.py": OLD_WORKER,
        "before/planted/__init__.py": "",
        "before/planted/small.py": OLD_SUITE,
        "after/planted/__init__.py": "",
        "after/planted/suites/__init__.py": "",
        "after/planted/suites/small.py": NEW_SUITE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "after"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path / "after"))
    for module in ("planted", "planted.suites", "planted.suites.small"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(runner.SUITES, "planted", "planted.suites.small")
    return tmp_path / "before"


@pytest.mark.slow
def test_every_case_is_compared_and_a_slower_or_refused_one_fails(checkout, capsys):
    assert against.main([str(checkout), "planted"]) == 1
    out, err = capsys.readouterr()
    for name, ratio in (("slower", "0.500"), ("faster", "2.000"), ("overhead", "2.000"), ("counted", "3.000")):
        assert f"planted: {name} x, default malloc: {ratio} ({ratio}..{ratio})" in out
    assert "planted: added x: only in this tree\n" in out and f"planted: removed x: only in {checkout}\n" in out
    assert [line.split(": ")[2].split(",")[0] for line in err.splitlines()] == ["slower x", "refused x"]
    assert "0.500" in err and "NotImplementedError: not any more" in err
    assert "4 rows compared" in out and "2 below 0.97 or not run" in out


@pytest.mark.slow
def test_the_exit_code_depends_on_the_selected_rows_and_the_requirement(checkout):
    assert against.main([str(checkout), "planted", "--only", "faster", "slower", "--require", "0.5"]) == 0
    assert against.main([str(checkout), "planted", "--only", "added"]) == 2


def test_wrong_usage(checkout, tmp_path, capsys):
    for arguments, message in (
        ([str(tmp_path)], "is not a checkout of HAL"),
        ([str(checkout), "plantd"], "no suite is called plantd"),
    ):
        with pytest.raises(SystemExit, match="2"):
            against.main(arguments)
        assert message in capsys.readouterr().err
