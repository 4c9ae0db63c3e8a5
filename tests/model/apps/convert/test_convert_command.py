"""`hal convert` between all formats preserves the model; nothing is overwritten or ignored silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_options import LATENT_OPTIONS
from models import GPT2, LLAMA, MIXTRAL, assert_equal_weights, hal_logits, random_weights

from hal import HalError
from hal.cli.convert import main
from hal.model.apps.convert import convert, hal_format
from hal.model.data.tokenizers.build import build_tokenizer

pytest.importorskip("safetensors", reason="needs safetensors (extra: convert)")
VIA = ["huggingface", "megatron", "megatron-core", "hal"]


@pytest.mark.parametrize("via", VIA)
@pytest.mark.parametrize("options", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_there_and_back_by_any_format(via: str, options: Any, tmp_path: Path, cpu_ref: Any, capsys: Any) -> None:
    here, there, back = (tmp_path / n for n in ("here", "there", "back"))
    hal_format.write(random_weights(options), here)
    layout = ["--target-tensor-parallel-size", "2"] if via == "megatron" else []
    assert main(["--load", str(here), "--save", str(there), "--saver", via, *layout]) == 0
    assert convert.detect(there) == via
    true_size = [] if via in ("huggingface", "hal") else ["--true-vocab-size", "101"]
    assert main(["--load", str(there), "--save", str(back), "--saver", "hal", *true_size]) == 0
    assert f"{via} -> hal: " in capsys.readouterr().out
    assert_equal_weights(hal_format.read(here), hal_format.read(back))
    assert torch.equal(hal_logits(here), hal_logits(back))
    # The files of a converted model are complete and private, like those of any other checkpoint.
    assert not list(tmp_path.rglob("*.tmp"))


def test_latent_attention_is_copied_and_not_written_as_what_it_is_not(tmp_path: Path, cpu_ref: Any) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    hal_format.write(random_weights({**LLAMA, **LATENT_OPTIONS, "num_query_groups": 4}), here)
    with pytest.raises(HalError, match="cannot express this one"):
        main(["--load", str(here), "--save", str(there), "--saver", "huggingface"])
    assert not there.exists()
    assert main(["--load", str(here), "--save", str(there), "--saver", "hal"]) == 0
    assert torch.equal(hal_logits(here), hal_logits(there))


def test_experts_are_divided_and_stored_side_by_side_on_request(tmp_path: Path) -> None:
    here, there, back = (tmp_path / name for name in ("here", "there", "back"))
    hal_format.write(random_weights(MIXTRAL), here)
    layout = ["--target-expert-parallel-size", "2", "--moe-grouped-gemm", "--saver-transformer-impl", "local"]
    assert main(["--load", str(here), "--save", str(there), "--saver", "megatron", *layout]) == 0
    state = torch.load(there / "release" / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False)
    assert state["model"]["decoder.layers.0.mlp.experts.weight1"].shape == (32, 2 * 48)
    assert main(["--load", str(there), "--save", str(back), "--saver", "hal", "--true-vocab-size", "101"]) == 0
    assert_equal_weights(hal_format.read(here), hal_format.read(back))


def test_precision_and_tokenizer_can_be_chosen(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    hal_format.write(random_weights(GPT2, vocabulary=257), here)
    chosen = ["--dtype", "bf16", "--tokenizer-type", "ByteTokenizer", "--make-vocab-size-divisible-by", "8"]
    assert main(["--load", str(here), "--save", str(there), "--saver", "hal", *chosen]) == 0
    weights = hal_format.read(there)
    assert weights.dtype == torch.bfloat16 and weights.vocabulary == 257
    assert weights.tokenizer == {"tokenizer_type": "ByteTokenizer"}


@pytest.mark.parametrize("via", VIA)
def test_the_default_tokenizer_is_kept(via: str, tmp_path: Path, capsys: Any) -> None:
    """Saved options leave out defaults; a model of bytes became one of ids, which takes no prompt."""
    here, there, back = (tmp_path / n for n in ("here", "there", "back"))
    bytes_model = random_weights(GPT2, vocabulary=257)
    bytes_model.tokenizer = {"tokenizer_type": "ByteTokenizer"}
    hal_format.write(bytes_model, here)
    assert main(["--load", str(here), "--save", str(there), "--saver", via]) == 0
    assert main(["--load", str(there), "--save", str(back), "--saver", "hal"]) == 0
    tokenizer = build_tokenizer(hal_format.read(back).config())
    assert tokenizer.decode(tokenizer.encode("a text")) == "a text"
    assert "names no tokenizer" not in capsys.readouterr().out


def test_a_model_without_a_tokenizer_is_noted(tmp_path: Path, capsys: Any) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    convert.write(random_weights(GPT2), convert.Target("huggingface", here))
    assert main(["--load", str(here), "--save", str(back), "--saver", "hal"]) == 0
    assert "note: the source names no tokenizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--saver", "hal", "--target-tensor-parallel-size", "2"], "is for --saver megatron"),
        (["--saver", "huggingface", "--tokenizer-type", "ByteTokenizer"], "is for --saver hal"),
        (["--saver", "huggingface", "--make-vocab-size-divisible-by", "8"], "have no padding"),
        (["--saver", "hal", "--vocab-size", "5"], "need --tokenizer-type"),
        (["--saver", "megatron", "--target-pipeline-parallel-size", "0"], "must be at least 1"),
    ],
)
def test_what_would_be_ignored_is_refused(argv: list[str], reason: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--load", str(tmp_path), "--save", str(tmp_path / "x"), *argv])
    assert end.value.code == 2 and reason in capsys.readouterr().err


def test_folders_that_hold_nothing_or_something_else(tmp_path: Path) -> None:
    import hal

    with pytest.raises(hal.HalError, match="contains no checkpoint"):
        main(["--load", str(tmp_path), "--save", str(tmp_path / "x"), "--saver", "hal"])
    with pytest.raises(hal.HalError, match="is not a folder"):
        main(["--load", str(tmp_path / "nothing"), "--save", str(tmp_path / "x"), "--saver", "hal"])
    hal_format.write(random_weights(GPT2), tmp_path / "here")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for saver in VIA:
        with pytest.raises(hal.HalError, match="is not empty"):
            main(["--load", str(tmp_path / "here"), "--save", str(full), "--saver", saver])
    assert [p.name for p in full.iterdir()] == ["file"]


def test_training_starts_from_a_converted_model(tmp_path: Path, cpu_ref: Any, text: Path, monkeypatch: Any) -> None:
    from hal.model.config.command_line import build as build_config
    from hal.model.training.run import build

    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    weights = random_weights(GPT2, vocabulary=257)
    hal_format.write(weights, tmp_path / "here")
    given = {"backend": "cpu_ref", "text_file": str(text), "load": str(tmp_path / "here"), "split": "8,1,1"}
    trainer, _ = build(build_config({**GPT2, **given, "train_iters": 2, "micro_batch_size": 2}))
    trainer.load(tmp_path / "here")
    assert trainer.iteration == 0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter[: weights.tensors[name].shape[0]], weights.tensors[name])
    before = trainer.step().loss
    assert trainer.step().loss < before
