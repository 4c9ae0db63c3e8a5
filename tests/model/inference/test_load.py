"""Opening a checkpoint: it defines the model, the command line the layout; mismatches are refused before
anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hal
from hal.model.checkpoint import reader
from hal.model.checkpoint.writer import save
from hal.model.config.schema import Config
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer
from hal.model.gpt.model import GPT
from hal.model.inference.load import open_pretrained
from hal.model.training.trainer_state import options

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}


def save_checkpoint(root: Path, iteration: Any = 3, **more: Any) -> Path:
    """A checkpoint of a random model; `more` are options and additional entries of its manifest."""
    config = Config(**SIZES, **more)
    config.set_vocabulary(257)
    tensors = {n: p.detach() for n, p in GPT(config, torch.device("cpu")).named_parameters()}
    save(root, iteration, tensors, {"iteration": 3, "config": options(config)})
    return root


def load_checkpoint(root: Path, dtype: str | None = None, **given: Any) -> Any:
    return open_pretrained({"backend": "cpu_ref", "load": str(root), **given}, dtype)


def edit_manifest(root: Path, **change: Any) -> None:
    """Changes the options in the manifest and updates its checksum, as a user who edits it could."""
    path = reader.folder_of(root, 3) / reader.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["state"]["config"].update(change)
    manifest["sha256"][reader.MANIFEST] = reader.state_checksum(manifest["state"])
    path.write_text(json.dumps(manifest))


def test_the_model_options_come_from_the_checkpoint(tmp_path: Path, cpu_ref: Any) -> None:
    model = load_checkpoint(
        save_checkpoint(tmp_path, swiglu=True, position_embedding_type="rope", rotary_base=500.0, seed=9)
    )
    c = model.config
    assert (c.swiglu, c.rotary_base, c.seed, model.iteration) == (True, 500.0, 9, 3)
    assert isinstance(model.tokenizer, ByteTokenizer) and model.engine.vocabulary == 257
    assert model.saved["hidden_size"] == 32


def test_precision_tokenizer_and_attention_can_be_chosen(tmp_path: Path, cpu_ref: Any) -> None:
    save_checkpoint(tmp_path)
    low = load_checkpoint(tmp_path, "bf16", use_flash_attn=False)
    assert low.engine.model.output_weight().dtype == torch.bfloat16 and not low.config.use_flash_attn
    other = load_checkpoint(tmp_path, tokenizer_type="NullTokenizer", vocab_size=300)
    assert isinstance(other.tokenizer, NullTokenizer) and other.engine.vocabulary == 301
    with pytest.raises(hal.HalError, match="has 5001 ids and the model 384: this is not the tokenizer"):
        load_checkpoint(tmp_path, tokenizer_type="NullTokenizer", vocab_size=5000)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"num_layers": 10**5}, "give 100000 layers; it holds"),
        ({"num_layers": 10**12}, "--num-layers must be in 1..100000"),
        ({"num_layers": 3}, "has no tensor for decoder.layers.2"),
        ({"hidden_size": 1 << 20}, "has shape .* the model of its options has"),
        (
            {"hidden_size": 1 << 40},
            "iter_0000003 are invalid: --hidden-size must be in 1..1048576; found 1099511627776",
        ),
        ({"padded_vocab_size": 1 << 30}, "has shape .* for embedding"),
        ({"padded_vocab_size": 1 << 40}, "padded_vocab_size should be a count of rows; found 1099511627776"),
        ({"padded_vocab_size": None, "hidden_size": 1 << 20}, "has shape .* the model of its options has"),
        ({"hidden_size": "wide"}, "--hidden-size: expected int, found 'wide'"),
        ({"hidden_size": -32}, "--hidden-size must be in 1..1048576; found -32"),
        ({"hidden_size": None}, "--hidden-size: expected int, found None"),
        ({"num_attention_heads": 5}, "not divisible"),
        ({"a_new_option": 1}, "another version of HAL, with the options \\['a_new_option'\\]"),
        ({"tokenizer_type": "PickleTokenizer"}, "--tokenizer-type: choose one of"),
    ],
)
def test_a_manifest_that_does_not_fit_its_tensors_is_refused(
    tmp_path: Path, cpu_ref: Any, change: Any, reason: str
) -> None:
    edit_manifest(save_checkpoint(tmp_path), **change)
    with pytest.raises(hal.HalError, match=reason):
        load_checkpoint(tmp_path)


def test_a_manifest_without_model_options_is_refused(tmp_path: Path, cpu_ref: Any) -> None:
    save(tmp_path, 3, {"a": torch.zeros(2)}, {"iteration": 3})
    with pytest.raises(hal.HalError, match="does not contain the options of its model"):
        load_checkpoint(tmp_path)


def test_a_release_opens(tmp_path: Path, cpu_ref: Any) -> None:
    assert load_checkpoint(save_checkpoint(tmp_path, reader.RELEASE)).iteration == 3
