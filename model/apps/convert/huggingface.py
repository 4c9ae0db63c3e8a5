"""Hugging Face's GPT-2 and Llama, both ways: the same logits, by the same matrices in another order.

GPT-2 keeps weights as [in, out] and q, k, v as three blocks; Llama keeps q, k, v, gate and up apart. What their models
cannot express (or ours) is refused with the option that is in the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import gpt2, llama
from .fields import Fields
from .safetensors_files import read_config, read_tensors
from .safetensors_files import write as write_files
from .weights import ConversionError, Weights, common_dtype, require

_MODELS = {"gpt2": gpt2, "llama": llama}


def read(folder: Path) -> Weights:
    """A GPT-2 or Llama folder. Raises ConversionError for other models, and variants that HAL's model has not."""
    config = read_config(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _MODELS:
        raise ConversionError(f"{folder} holds a model of type {kind!r}; gpt2 and llama can be converted")
    tensors = read_tensors(folder)
    try:
        weights = _MODELS[kind].read(Fields(config, folder / "config.json"), tensors)
    except KeyError as error:
        raise ConversionError(f"{folder}: the weights have no tensor {error}") from None
    except RuntimeError as error:
        raise ConversionError(
            f"{folder}: a tensor does not have the shape that config.json asks for: {error}"
        ) from None
    require(not tensors, f"{folder} has tensors that a {kind} has no place for: {', '.join(sorted(tensors)[:5])}")
    weights.tensors = common_dtype(weights.tensors)
    weights.tokenizer = _tokenizer_of(folder)
    weights.check()
    return weights


def write(weights: Weights, folder: Path) -> None:
    """A folder that transformers' from_pretrained reads. Raises ConversionError if it has no such model."""
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=1)
    reasons = {kind: model.reasons_against(config) for kind, model in _MODELS.items()}
    kind = next((kind for kind, why in reasons.items() if not why), None)
    if kind is None:
        told = "; ".join(f"no {kind}, because of {', '.join(why)}" for kind, why in reasons.items())
        raise ConversionError(f"Hugging Face's models cannot express this one: {told}")
    fields, tensors = _MODELS[kind].write(config, weights)
    fields["dtype"] = fields["torch_dtype"] = str(weights.dtype).removeprefix("torch.")
    write_files(folder, fields, tensors)


def _tokenizer_of(folder: Path) -> dict[str, Any]:
    """The tokenizer options that the folder's files answer, if any."""
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer.json")}
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
        return {"tokenizer_type": "GPT2BPETokenizer", **files}
    return {}
