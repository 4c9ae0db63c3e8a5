"""`hal generate`: sources of prompts, destinations of texts, and contradictory options, which are refused."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_load import edit_manifest, save_checkpoint

from hal.cli import main as hal_command
from hal.cli.generate import main
from hal.errors import HalError
from hal.model.common.atomic_files import write_text
from hal.model.inference.text_generation import read_prompts


@pytest.fixture
def run(tmp_path: Path, cpu_ref: Any, capsys: Any) -> Any:
    """Runs the command on a random model; returns its exit code and output."""
    save_checkpoint(tmp_path / "model", init_method_std=0.3)

    def command(*argv: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["--backend", "cpu_ref", "--load", str(tmp_path / "model"), "--num-tokens-to-generate", "9", *argv])
        return code, "".join(capsys.readouterr())

    return command


def test_prompts_from_the_command_line_a_file_and_the_pipe_say_the_same(
    run: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    code, text = run("--prompt", "ab", "--greedy")
    assert code == 0 and text.startswith("ab") and len(text) > 3
    (tmp_path / "p.txt").write_text("ab\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n')
    for file in ("p.txt", "p.jsonl"):
        assert run("--prompt-file", str(tmp_path / file), "--greedy") == (0, text)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab"))
    assert run("--greedy") == (0, text)


def test_the_backend_is_that_of_the_checkpoint(tmp_path: Path, cpu_ref: Any, capsys: Any, monkeypatch: Any) -> None:
    save_checkpoint(tmp_path / "model", backend="cpu_ref", pin=("linear=cpu_ref/onednn",))
    monkeypatch.delenv("HAL_BACKEND")
    load = ["--load", str(tmp_path / "model"), "--prompt", "ab", "--greedy", "--num-tokens-to-generate", "3"]
    assert main(load) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("ab")
    assert "from the checkpoint" in captured.err and "--backend cpu_ref, --pin linear=cpu_ref/onednn" in captured.err
    edit_manifest(tmp_path / "model", backend="warp", pin=())
    monkeypatch.delenv("HAL_BACKEND")
    assert main(load) == 2
    assert "It is the backend of the checkpoint" in capsys.readouterr().err
    assert main([*load, "--backend", "cpu_ref"]) == 0
    assert "from the checkpoint" not in capsys.readouterr().err


def test_a_release_names_no_backend(tmp_path: Path, monkeypatch: Any) -> None:
    save_checkpoint(tmp_path / "model")
    monkeypatch.delenv("HAL_BACKEND", raising=False)
    with pytest.raises(HalError, match=r"no backend was chosen, and --load .* has no checkpoint of a run that had one"):
        main(["--load", str(tmp_path / "model"), "--prompt", "ab"])


def test_only_a_newline_ends_a_prompt_of_a_file(tmp_path: Path) -> None:
    prompts = ["a\u2028b\x0cc\x85d", "", " e\rf\x1c"]
    (tmp_path / "p.txt").write_bytes("\n".join(prompts).encode())
    (tmp_path / "dos.txt").write_bytes("\r\n".join([*prompts, ""]).encode())
    rows = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts]
    (tmp_path / "p.jsonl").write_bytes(("\n".join(rows) + "\n").encode())
    for file in ("p.txt", "dos.txt", "p.jsonl"):
        assert read_prompts(tmp_path / file) == prompts
    (tmp_path / "empty.txt").touch()
    assert read_prompts(tmp_path / "empty.txt") == []


def test_a_conversation_on_a_terminal(run: Any, monkeypatch: Any) -> None:
    _, text = run("--prompt", "ab", "--greedy")
    lines = iter(["ab", ""])

    def line(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", line)
    code, output = run("--greedy")
    assert code == 0 and text.removeprefix("ab").rstrip("\n") in output


def test_texts_to_a_file_with_samples_and_a_seed(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    argv = ["--prompt", "ab", "--prompt", "c", "--num-samples", "2", "--top-k", "50", "--seed", "3"]
    code, output = run(*argv, "--output-file", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 0 and "4 texts are in" in output and [r["prompt"] for r in rows] == ["ab", "ab", "c", "c"]
    assert all(r["finish_reason"] in ("stop", "length") and r["tokens"] <= 9 for r in rows)
    again = tmp_path / "again.jsonl"
    run(*argv, "--micro-batch-size", "1", "--no-kv-cache", "--output-file", str(again))
    assert again.read_text() == out.read_text()
    run(*argv[:-1], "4", "--output-file", str(again))
    assert again.read_text() != out.read_text()


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--greedy", "--top-p", "0.5"], "--greedy takes the most likely token"),
        (["--greedy", "--temperature", "0.5"], "--greedy takes the most likely token"),
        (["--num-samples", "0"], "must be at least 1"),
        (["--prompt", "a", "--prompt-file", "b"], "contradict"),
        (["--data-path", "x"], "unrecognized arguments: --data-path"),
    ],
)
def test_wrong_usage(run: Any, argv: list[str], reason: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        run(*argv)
    assert end.value.code == 2 and reason in capsys.readouterr().err


def test_numbers_that_no_sampling_has_are_refused(run: Any) -> None:
    for argv, reason in (
        (["--top-p", "1.5"], "top-p must be in (0, 1]"),
        (["--temperature", "-1"], "temperature must"),
    ):
        code, output = run("--prompt", "a", *argv)
        assert code == 2 and reason in output
    code, output = run("--prompt-file", "/nothing/there")
    assert code == 2 and "/nothing/there" in output


def test_what_would_be_lost_is_refused_before_the_work(run: Any, tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "absent" / "out.jsonl"):
        with pytest.raises(HalError, match=f"--output-file {out} cannot be written"):
            run("--prompt", "ab", "--output-file", str(out))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    with pytest.raises(SystemExit, match="2"):
        run("--prompt", "ab", "--stop", "")


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(IsADirectoryError, match="there"):
        write_text(tmp_path / "there", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "--backend", "cpu_ref", "--load", "absent", "--task", "valid", "--output-file"],
        ["report", "absent", "--output"],
        ["plan", "--backend", "cpu_ref", "--devices", "1", "--json"],
        ["parity", "--backend", "cpu_ref", "--json"],
        ["parity", "--backends", "cpu_ref,npu", "--html"],
        ["bench", "dispatch", "--html"],
    ],
)
def test_every_command_looks_at_its_output_first(argv: list[str], tmp_path: Path, capsys: Any) -> None:
    assert hal_command([*argv, str(tmp_path / "absent" / "file")]) == 2
    captured = capsys.readouterr()
    assert f"{argv[-1]} {tmp_path / 'absent' / 'file'} cannot be written" in captured.err and captured.out == ""
