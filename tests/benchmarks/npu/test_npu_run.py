"""`make npu`: the report of claims, its continuation, and the program end to end on the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import simulated_npu

import hal
from hal.backends.npu import Npu
from hal.bench.npu import claims, npu_run
from hal.bench.npu.claims import CONFIRMED, MEASURED, REFUTED, Claim, Finding

ABOUT = {"device": "Ascend910B3", "sources": "1", "torch": "2"}


def claim(name: str, verdict: str = CONFIRMED) -> Claim:
    return Claim("parity", name, f"{name} holds", lambda simulate: Finding(verdict, f"{name} | seen"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the claims that were checked, in this process and without a device."""
    names: list[str] = []

    def child(claim: Claim, simulate: bool) -> dict[str, str]:
        names.append(claim.name)
        return claim.check(simulate)._asdict()

    monkeypatch.setattr(npu_run, "child", child)
    monkeypatch.setattr(npu_run, "machine", lambda simulate: ABOUT)
    return names


def test_a_report_has_a_line_for_each_claim_and_goes_on_where_it_ended(checked: list[str], tmp_path: Path) -> None:
    three = [claim("a"), claim("b", REFUTED), claim("c", MEASURED)]
    assert npu_run.run(three[:2], 3, False, False, tmp_path) == 1
    assert npu_run.run(three, 3, False, False, tmp_path) == 1
    assert checked == ["a", "b", "b", "c"]
    page = (tmp_path / "npu-ascend910b3.md").read_text()
    assert "| a: a holds | confirmed | a \\| seen |" in page and "| b: b holds | refuted |" in page
    assert npu_run.run([claim("b")], 3, False, False, tmp_path) == 0
    assert npu_run.run([claim("a")], 3, False, True, tmp_path) == 0
    assert checked[4:] == ["b", "a"]


def test_a_report_of_other_sources_is_replaced(
    checked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_run.run([claim("a")], 1, False, False, tmp_path)
    monkeypatch.setattr(npu_run, "machine", lambda simulate: {**ABOUT, "sources": "2"})
    npu_run.run([claim("b")], 1, False, False, tmp_path)
    assert list(json.loads((tmp_path / "npu-ascend910b3.json").read_text())["claims"]) == ["b"]


def test_wrong_words_and_a_machine_without_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, message in ((["speed"], "no part or claim is called speed"), (["--simulate"], "needs --out")):
        with pytest.raises(SystemExit):
            npu_run.main(words)
        assert message in capsys.readouterr().err
    if not Npu(simulate=False).probe().ok:
        assert npu_run.main(["parity", "--out", str(tmp_path)]) == 2
        assert "make npu: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_check_that_raises_refutes_its_claim(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(simulate: bool) -> Finding:
        raise RuntimeError("the device\nis gone")

    assert npu_run.check(Claim("parity", "a", "", broken), True) == 0
    assert json.loads(capsys.readouterr().out) == {"verdict": REFUTED, "detail": "RuntimeError: the device is gone"}


def test_every_op_has_a_claim() -> None:
    names = [c.name for c in claims.claims()]
    assert {f"parity {op}" for op in hal.OPS} <= set(names) and len(set(names)) == len(names)


def end_to_end(folder: Path, *words: str) -> dict[str, Any]:
    if not Npu(simulate=True).probe().ok:
        pytest.skip("torch_npu is not installed (pip install 'torch-hal[npu]')")
    with simulated_npu.restored_environment():
        npu_run.main(["--simulate", "--out", str(folder), *words])
    (path,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())["claims"]
    return found


@pytest.mark.slow
def test_on_the_simulator(tmp_path: Path) -> None:
    found = end_to_end(tmp_path, "kernels", "copy")
    assert [row["verdict"] for row in found.values()] == [CONFIRMED, MEASURED], found


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["parity", "production"])
def test_an_op_that_the_device_cannot_have_refutes_nothing(scale: str, tmp_path: Path) -> None:
    """The 910B stores no float8."""
    (row,) = end_to_end(tmp_path, f"{scale} scaled_linear").values()
    assert row["verdict"] == MEASURED and "stores no torch.float8_e4m3fn" in row["detail"]


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["preflight", "layouts", "training", "timings"])
def test_every_part_on_the_simulator(tmp_path: Path, part: str) -> None:
    """The kit's parts, parity and production, are tests of their own (tests/backends/npu)."""
    found = end_to_end(tmp_path, part)
    assert found and REFUTED not in {row["verdict"] for row in found.values()}, found
    if part == "preflight":
        assert end_to_end(tmp_path, "parity adamw")["parity adamw"]["verdict"] == CONFIRMED
