"""`hal train --load`: the checkpoint, or a Hugging Face folder, says what the model and its tokenizer are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hal import HalError
from hal.cli.config import main as show
from hal.cli.generate import main as generate
from hal.cli.train import main
from hal.model.apps.convert import hal_format
from hal.model.checkpoint import reader
from hal.model.checkpoint.saved_config import adopt
from hal.model.config.command_line import build, read

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --hidden-dropout 0 --swiglu"
RUN = ["--backend", "cpu_ref", "--sample-tokens", "0", "--log-interval", "1"]


@pytest.fixture
def checkpoint(tmp_path: Path, text: Path) -> Path:
    """Two steps of a small model."""
    more = ["--save", str(tmp_path / "run"), "--run-dir", str(tmp_path / "first"), "--text-file", str(text)]
    assert main([*RUN, *SIZES.split(), "--norm-epsilon", "1e-6", "--train-iters", "2", *more]) == 0
    return tmp_path / "run"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six seven eight nine ten\n" * 40)
    return path


def edit_manifest(root: Path, **change: Any) -> None:
    """Changes options in the manifest of the checkpoint and updates its checksum."""
    path = reader.folder_of(root, 2) / reader.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["state"]["config"].update(change)
    manifest["sha256"][reader.MANIFEST] = reader.state_checksum(manifest["state"])
    path.write_text(json.dumps(manifest))


def options_of(root: Path) -> dict[str, Any]:
    return reader.read_state(root)[1]["config"]


def losses(run: Path) -> dict[int, float]:
    return dict(json.loads((run / "run.json").read_text())["losses"])


def test_a_run_goes_on_with_the_checkpoint_and_a_number_of_steps(
    checkpoint: Path, tmp_path: Path, text: Path, capsys: Any
) -> None:
    before = options_of(checkpoint)
    to = ["--text-file", str(text), "--save", str(tmp_path / "more"), "--run-dir", str(tmp_path / "second")]
    assert main([*RUN, "--load", str(checkpoint), "--train-iters", "3", *to]) == 0
    after = options_of(tmp_path / "more")
    for name in ("num_layers", "hidden_size", "swiglu", "norm_epsilon", "ffn_hidden_size", "tokenizer_type"):
        assert before[name] == after[name], name
    assert before["padded_vocab_size"] == after["padded_vocab_size"]
    assert reader.newest(tmp_path / "more") == 3
    # The result is converted without the padding of the vocabulary, whose size the second run took over.
    weights = hal_format.read(tmp_path / "more")
    weights.check()
    assert weights.vocabulary == 257 < after["pad_vocab_size_to"]


def test_what_is_given_beside_a_checkpoint_is_compared(
    checkpoint: Path, tmp_path: Path, text: Path, capsys: Any
) -> None:
    to = ["--text-file", str(text), "--run-dir", str(tmp_path / "x"), "--load", str(checkpoint), "--train-iters", "3"]
    assert main([*RUN, *to, "--hidden-dropout", "0.1"]) == 0
    assert "--hidden-dropout 0.1 is given; the checkpoint" in capsys.readouterr().out
    assert main([*RUN, *to, "--num-attention-heads", "2"]) == 2
    assert "--num-attention-heads 2 contradicts the checkpoint" in capsys.readouterr().err
    assert main([*RUN, *to, "--normalization", "RMSNorm"]) == 2
    assert "normalization LayerNorm, this run has RMSNorm" in capsys.readouterr().err


def test_options_of_a_checkpoint_do_not_count_as_given(checkpoint: Path) -> None:
    values = read(["--backend", "cpu_ref", "--load", str(checkpoint), "--train-iters", "3"])
    adopt(values)
    config = build(values)
    assert config.swiglu and config.given == {"backend", "load", "train_iters"}
    assert str(checkpoint) in config.origins["swiglu"]


EXPERIMENT = "--lr 0.01 --lr-decay-iters 9 --seed 7 --micro-batch-size 2 --global-batch-size 4 --attention-dropout 0.2"


def test_a_run_that_resumes_needs_no_option_but_its_length(
    tmp_path: Path, text: Path, capsys: Any, monkeypatch: Any
) -> None:
    """It is the run that was never interrupted: backend, data, seed, batch and schedule come from the checkpoint."""
    given = [*RUN, *SIZES.split(), *EXPERIMENT.split(), "--text-file", str(text), "--lr-warmup-fraction", "0.2"]
    to = ["--save", str(tmp_path / "run"), "--run-dir", str(tmp_path / "half")]
    assert main([*given, *to, "--train-iters", "2"]) == 0
    assert main([*given, "--train-iters", "4", "--run-dir", str(tmp_path / "whole")]) == 0
    monkeypatch.delenv("HAL_BACKEND")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    resumed = ["--load", "run", "--train-iters", "4"]
    assert main([*resumed, "--run-dir", "rest", "--sample-tokens", "0"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "from the checkpoint" in line]
    for option in ("--backend cpu_ref", f"--text-file {text}", "--seed 7", "--global-batch-size 4", "--lr 0.01"):
        assert option in line
    rest, whole = losses(tmp_path / "rest"), losses(tmp_path / "whole")
    assert rest == {n: whole[n] for n in (3, 4)}
    monkeypatch.delenv("HAL_BACKEND")
    assert main(resumed) == 0


TAKEN_OVER: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    ([], {"lr": 0.01, "lr_decay_iters": 9, "seed": 7, "global_batch_size": 4, "deterministic_mode": True}, {}),
    (["--mock-data"], {"lr": 0.01}, {"text_file": None}),
    (["--finetune"], {"backend": "cpu_ref"}, {"text_file": None, "lr": 6e-4, "seed": 1234, "global_batch_size": 4}),
    (["--lr-warmup-iters", "1"], {"lr": 0.01}, {"lr_warmup_fraction": None}),
    (["--train-samples", "400"], {"lr": 0.01}, {"lr_decay_iters": 100, "train_iters": 100}),
    (["--no-load-rng"], {"lr": 0.01}, {"seed": 1234}),
    (["--backend", "npu"], {"lr": 0.01}, {"pin": (), "deterministic_mode": False}),
]


def test_what_a_run_takes_over(tmp_path: Path, text: Path) -> None:
    more = [*EXPERIMENT.split(), "--text-file", str(text), "--lr-warmup-fraction", "0.2", "--train-iters", "1"]
    how = ["--deterministic-mode", "--pin", "linear=cpu_ref/onednn"]
    to = ["--save", str(tmp_path / "run"), "--run-dir", str(tmp_path / "log")]
    assert main([*RUN, *how, *SIZES.split(), *more, *to]) == 0
    for given, taken, own in TAKEN_OVER:
        values = read(["--load", str(tmp_path / "run"), *given], {})
        adopt(values)
        config = build(values)
        for name, value in {**taken, **own}.items():
            assert getattr(config, name) == value, (given, name)
        assert set(taken) <= values.adopted and not set(own) & values.adopted, given


def test_a_backend_of_a_checkpoint_that_is_not_here(checkpoint: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("HAL_BACKEND")
    edit_manifest(checkpoint, backend="warp")
    assert main(["--load", str(checkpoint), "--train-iters", "3"]) == 2
    error = capsys.readouterr().err
    assert "no backend is called 'warp'" in error and error.count("\n") == 1
    assert (
        f"It is the backend of the checkpoint {checkpoint}" in error and "--backend gives another one (cpu_ref" in error
    )
    # One that the user gave is not blamed on the checkpoint.
    assert main(["--load", str(checkpoint), "--train-iters", "3", "--backend", "weft"]) == 2
    assert "It is the backend of" not in capsys.readouterr().err


def test_what_a_run_takes_over_is_shown(checkpoint: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert show(["show", "--load", str(checkpoint), "--train-iters", "9"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# norm-epsilon: 1e-06")]
    assert f"the checkpoint {checkpoint}" in line


def test_a_folder_without_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    values = read(["--backend", "cpu_ref", "--load", str(tmp_path)])
    before = dict(values)
    adopt(values)
    assert dict(values) == before and not values.adopted


@pytest.mark.parametrize("count", [1, 20])
def test_the_starter_configuration_runs_for_any_number_of_steps(count: int) -> None:
    config = build(read(["--backend", "cpu_ref", "--config", "tiny", "--train-iters", str(count)]))
    assert config.lr_warmup_iters == count // 20
    whole = build(read(["--backend", "cpu_ref", "--config", "tiny"]))
    assert whole.lr_warmup_iters == whole.train_iters // 20 > 1


def test_a_hugging_face_folder_is_trained(tmp_path: Path, text: Path, monkeypatch: Any, capsys: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra: convert)")
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    theirs = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(vocab_size=257, max_position_embeddings=16, num_key_value_heads=2, **sizes)
    )
    theirs.save_pretrained(tmp_path / "theirs")
    to = ["--tokenizer-type", "ByteTokenizer", "--text-file", str(text), "--train-iters", "1"]
    to += ["--save", str(tmp_path / "run"), "--run-dir", str(tmp_path / "log"), "--lr", "0"]
    assert main([*RUN, "--load", str(tmp_path / "theirs"), *to]) == 0
    assert options_of(tmp_path / "run")["add_qkv_bias"]
    # The weights are the folder's: with a learning rate of 0 they are also those of the result.
    folder, _ = reader.read_state(tmp_path / "run")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    stored = torch.empty(32, 48)
    reader.load_tensors(folder, {name: stored})
    assert torch.equal(stored, theirs.model.layers[1].mlp.down_proj.weight.detach())
    # `hal generate` reads the folder too.
    capsys.readouterr()
    prompt = ["--prompt", "ab", "--greedy", "--num-tokens-to-generate", "3", "--tokenizer-type", "ByteTokenizer"]
    assert generate(["--backend", "cpu_ref", "--load", str(tmp_path / "theirs"), *prompt]) == 0
    assert capsys.readouterr().out.startswith("ab")
    # A second run does not convert again; a damaged folder is refused.
    (converted,) = (tmp_path / "cache" / "converted").iterdir()
    time = converted.stat().st_mtime_ns
    assert main([*RUN, "--load", str(tmp_path / "theirs"), *to[:-2], "--run-dir", str(tmp_path / "log2")]) == 2
    assert converted.stat().st_mtime_ns == time
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "bert"}')
    capsys.readouterr()
    assert main([*RUN, "--load", str(tmp_path / "theirs"), *to]) == 2
    assert "a model of type 'bert'" in capsys.readouterr().err


def test_a_checkpoint_of_another_version_is_refused(checkpoint: Path) -> None:
    edit_manifest(checkpoint, warp_factor=9)
    values = read(["--backend", "cpu_ref", "--load", str(checkpoint)])
    with pytest.raises(HalError, match=r"another version of HAL, with the options.*warp_factor"):
        adopt(values)


def test_a_checkpoint_that_asks_for_more_than_it_holds_is_refused(checkpoint: Path, capsys: Any) -> None:
    """Before a model of these sizes is allocated."""
    before = options_of(checkpoint)
    for change, reason in (
        (
            {"hidden_size": 1 << 40},
            "iter_0000002 are invalid: --hidden-size must be in 1..1048576; found 1099511627776",
        ),
        ({"ffn_hidden_size": 1 << 22}, "iter_0000002 has shape (128, 32) for decoder.layers.0.mlp.linear_fc1.weight"),
        ({"kv_channels": 1 << 16}, "iter_0000002 has shape (96, 32) for"),
        ({"padded_vocab_size": 1 << 40}, "iter_0000002: padded_vocab_size should be a count of rows; found 1099511627"),
        ({"padded_vocab_size": None, "hidden_size": 1 << 20}, "iter_0000002 has shape (384, 32) for embedding"),
        ({"global_batch_size": 1 << 40}, "--global-batch-size must be in 1..1048576; found 1099511627776"),
    ):
        edit_manifest(checkpoint, **{**before, **change})
        assert main([*RUN, "--load", str(checkpoint), "--train-iters", "3"]) == 2, change
        assert reason in capsys.readouterr().err
