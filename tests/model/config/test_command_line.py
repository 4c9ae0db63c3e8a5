"""`hal train` as a process: exit codes, Ctrl-C and SIGTERM, and the example that `make train` runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hal
from hal.model.config.command_line import parse
from hal.model.config.schema import ConfigError
from hal.model.training.run import main

ROOT = Path(__file__).parents[3]


def arguments(text, folder):
    options = {
        "backend": "cpu_ref",
        "num-layers": 1,
        "hidden-size": 32,
        "seq-length": 32,
        "train-iters": 100000,
        "log-interval": 1,
        "run-dir": folder / "run",
        "text-file": text,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_a_stopped_run_saves_reports_and_can_continue(text, tmp_path, number):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hal", "train", *arguments(text, tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    for line in process.stdout:
        if "iteration        5/" in line:
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert f"stopped by {number.name}" in out and err == ""
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    last = record["losses"][-1][0]
    saved = tmp_path / "run" / "checkpoints"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == f"{last}\n" and last >= 5
    more = [*command, "--load", str(saved), "--exit-interval", "1"]
    done = subprocess.run(more, capture_output=True, text=True, env=environ, timeout=180)
    assert done.returncode == 0, done.stderr
    assert f"iteration {last + 1:8d}/" in done.stdout


@pytest.mark.parametrize(
    "argv, code, words",
    [
        (["--backend", "cpu_ref", "--seq-length", "0"], 2, "--seq-length must be in 1..2147483647"),
        (["--backend", "cpu_reff"], 2, "Did you mean 'cpu_ref'?"),
        ([], 2, "no backend was chosen"),
        (["--backend", "cpu_ref", "--text-file", "absent.txt"], 2, "absent.txt cannot be read"),
        (["--backend", "cpu_ref", "--text-file", "/dev/zero"], 2, "/dev/zero is a device"),
        (["--backend", "cpu_ref", "--data-path", "absent"], 2, "absent.idx does not exist"),
        (["--backend", "cpu_ref", "--pin", "linear=nobody"], 2, "cpu_ref/"),
        (["--backend", "cpu_ref", "--seed", str(2**32)], 2, "--seed must be in 0..4294967295"),
        (["--backend", "cpu_ref", "--num-layers", "1" + 400 * "0", "--lr", "inf"], 2, "--num-layers: expected int"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(cpu_ref, argv, code, words, capsys, monkeypatch):
    monkeypatch.delenv("HAL_BACKEND", raising=False)
    assert main(argv) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and "Traceback" not in captured.err


def test_a_backend_without_a_deterministic_mode_is_refused(cpu_ref, capsys, monkeypatch):
    monkeypatch.setenv("HAL_BACKEND", "cpu_ref")
    monkeypatch.setattr(type(cpu_ref), "capabilities", lambda self: hal.Capabilities(deterministic=False))
    assert main(["--backend", "cpu_ref", "--text-file", "absent.txt", "--deterministic-mode"]) == 2
    assert "backend 'cpu_ref' has no deterministic mode" in capsys.readouterr().err


def test_a_loss_that_explodes_is_exit_code_1(cpu_ref, text, tmp_path, cache, capsys, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(cache))
    monkeypatch.setattr("hal.use", lambda *a, **k: cpu_ref)
    code = main([*arguments(text, tmp_path), "--lr", "1e30", "--clip-grad", "0", "--sample-tokens", "0"])
    assert code == 1 and "nothing was updated" in capsys.readouterr().err
    losses = json.loads((tmp_path / "run" / "run.json").read_text())["losses"]
    assert [n for n, _ in losses] == list(range(1, len(losses) + 1)) and losses, "all steps are recorded"
    (tmp_path / "file").touch()
    for folder in ("file", "file/run"):
        assert main([*arguments(text, tmp_path), "--run-dir", str(tmp_path / folder)]) == 2
        assert f"--run-dir {tmp_path / folder} cannot be written" in capsys.readouterr().err


def test_the_example_is_a_valid_config():
    config = parse(["--backend", "cpu_ref", "--config", str(ROOT / "examples" / "tiny.yaml")], {})
    assert config.swiglu and config.train_iters == 400


@pytest.mark.slow
def test_importing_the_command_line_does_not_import_megatron():
    heavy = "[m for m in sys.modules if m.startswith(('megatron', 'matplotlib'))]"
    code = f"import sys, hal.model.training.run; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_data_and_length_of_the_command_line_replace_other_kinds_of_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "data-path: corpus\ntokenizer-type: Llama2Tokenizer\ntokenizer-model: a.model\n"
        "train-samples: 4096\nlr-warmup-samples: 512\n"
    )
    given = "--mock-data --tokenizer-type NullTokenizer --vocab-size 96 --train-iters 3"
    config = parse(["--backend", "cpu_ref", "--config", str(file), *given.split()], {})
    assert config.tokenizer_model is None
    assert config.data_path == () and config.mock_data
    assert (config.train_samples, config.train_iters, config.lr_warmup_samples) == (None, 3, 0)
    notes = "\n".join(config.notes)
    assert "data-path: --data-path ('corpus',) is replaced by --mock-data" in notes
    assert "--lr-warmup-samples 512 is replaced by --train-iters" in notes
    with pytest.raises(ConfigError, match="--data-path and --mock-data contradict"):
        parse(["--backend", "cpu_ref", "--vocab-size", "96", "--data-path", "corpus", "--mock-data"], {})


@pytest.mark.parametrize(
    ("of_file", "given", "expected"),
    [
        ("fp16: true", "--bf16", {"fp16": False, "bf16": True}),
        ("bf16: true", "--fp16", {"fp16": True, "bf16": False}),
        ("swiglu: true", "--squared-relu", {"swiglu": False, "squared_relu": True}),
        ("lr-warmup-fraction: 0.1", "--lr-warmup-iters 3", {"lr_warmup_fraction": None, "lr_warmup_iters": 3}),
        ("train-iters: 9", "--num-train-epochs 2 --sft", {"num_train_epochs": 2}),
    ],
)
def test_a_choice_of_the_command_line_replaces_the_one_of_a_file(tmp_path, of_file, given, expected):
    file = tmp_path / "run.yaml"
    file.write_text(f"{of_file}\nmock-data: true\ntokenizer-type: NullTokenizer\nvocab-size: 96\n")
    data = ["--data-path", "corpus"] if "epochs" in given else []
    config = parse(["--backend", "cpu_ref", "--config", str(file), *given.split(), *data], {})
    assert {name: getattr(config, name) for name in expected} == expected
    assert f"is replaced by {given.split()[0]}" in "\n".join(config.notes)
