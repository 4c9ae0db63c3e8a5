"""`hal eval` reports the validation loss of the training run, on any layout; options without effect are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import hal
from hal.cli.eval import main
from hal.model.training.run import train
from hal.testing.processes import run_processes

RESET = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@pytest.fixture
def run(tiny: Any, cpu_ref: Any, tmp_path: Path) -> Any:
    """Trains two layers for four steps. Returns (folder of checkpoints, final validation loss)."""

    def make(**more: Any) -> tuple[str, float]:
        save = str(tmp_path / "checkpoints")
        options = {"train_iters": 4, "eval_interval": 4, "eval_iters": 3, "sample_tokens": 0, "save": save, **more}
        train(tiny(backend="cpu_ref", **options))
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        return save, record["evaluations"][-1][1]

    return make


def _evaluate(argv: list[str], file: str) -> Any:
    code = main([*argv, "--backend", "cpu_ref", "--output-file", file])
    # Only the first rank writes the file, after all other ranks have finished.
    lead = os.environ.get("RANK", "0") == "0"
    return code, json.loads(Path(file).read_text()) if lead else None


@pytest.mark.parametrize("more", [{}, RESET], ids=["plain", "documents"])
def test_the_validation_loss_is_the_runs(run: Any, more: Any, tmp_path: Path, capsys: Any) -> None:
    save, loss = run(**more)
    code, record = _evaluate(["--task", "valid", "--load", save, "--micro-batch-size", "5"], str(tmp_path / "r.json"))
    assert code == 0 and record["samples"] == 12 and record["iteration"] == 4
    assert record["lm loss value"] == pytest.approx(loss, rel=2e-6)
    assert 0 < record["lm loss value_stderr"] < 0.2
    assert "validation results on valid | lm loss value: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["--tensor-model-parallel-size", "2"], id="tp2", marks=pytest.mark.slow),
        pytest.param(["--pipeline-model-parallel-size", "2"], id="pp2", marks=pytest.mark.nightly),
        pytest.param([], id="dp2", marks=pytest.mark.nightly),
        pytest.param(["--context-parallel-size", "2"], id="cp2", marks=pytest.mark.slow),
    ],
)
def test_the_validation_loss_is_the_runs_on_two_ranks(run: Any, layout: Any, tmp_path: Path) -> None:
    save, loss = run(**RESET if layout != ["--context-parallel-size", "2"] else {})
    argv = ["--task", "valid", "--load", save, *layout]
    (code, record), (other, _) = run_processes(2, _evaluate, argv, str(tmp_path / "r.json"), timeout=180.0)
    assert code == other == 0 and record["lm loss value"] == pytest.approx(loss, rel=1e-5)


def test_lambada_from_the_command_line(run: Any, tmp_path: Path, capsys: Any) -> None:
    save, _ = run()
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "abc abc abc"}\n{"text": "bcd efg"}\n')
    argv = ["--task", "LAMBADA", "--strict-lambada", "--valid-data", str(data), "--load", save]
    code, record = _evaluate(argv, str(tmp_path / "r.json"))
    assert code == 0 and record["total examples"] == 2 and record["strict"] is True
    assert "number correct: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--task", "LAMBADA"], "--task LAMBADA needs --valid-data"),
        (["--task", "lm-eval"], "needs --lm-eval-tasks"),
        (["--task", "valid", "--strict-lambada"], "is for --task LAMBADA"),
        (["--task", "LAMBADA", "--overlapping-eval", "3"], "is for --task WIKITEXT103"),
        (["--task", "LAMBADA", "--split", "1,1,1", "--valid-data", "x"], "is for --task valid or test"),
        (["--task", "nothing"], "invalid choice"),
    ],
)
def test_wrong_usage(argv: list[str], reason: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main([*argv, "--load", "x", "--backend", "cpu_ref"])
    assert end.value.code == 2 and reason in capsys.readouterr().err


def test_what_cannot_be_opened(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.delenv("HAL_BACKEND", raising=False)
    with pytest.raises(hal.HalError, match="no backend was chosen"):
        main(["--task", "valid", "--load", "x"])
    with pytest.raises(hal.HalError, match="no model was chosen"):
        main(["--task", "valid", "--backend", "cpu_ref"])
    assert main(["--task", "valid", "--backend", "cpu_ref", "--load", str(tmp_path)]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
