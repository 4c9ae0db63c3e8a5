"""Converts Hugging Face GPT-2 and Llama models. Logits are preserved, because only the order of the rows changes.

A model that the target format cannot express is refused; the error names the option that prevents the conversion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import gpt2, hf_tokenizer, llama
from .hf_config import Fields
from .safetensors_files import read_config, read_tensors
from .safetensors_files import write as write_files
from .weights import ConversionError, Weights, common_dtype, require

_MODELS = {"gpt2": gpt2, "llama": llama}


def read(folder: Path) -> Weights:
    """Reads a GPT-2 or Llama folder. Raises ConversionError for other models and for unsupported variants."""
    config = read_config(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _MODELS:
        raise ConversionError(f"{folder} has a model of type {kind!r}; only gpt2 and llama can be converted")
    tensors = read_tensors(folder)
    try:
        weights: Weights = _MODELS[kind].read(Fields(config, folder / "config.json"), tensors)
    except KeyError as error:
        raise ConversionError(f"{folder}: the weights have no tensor {error}") from None
    except RuntimeError as error:
        raise ConversionError(
            f"{folder}: a tensor does not have the shape that config.json requires: {error}"
        ) from None
    require(not tensors, f"{folder} has tensors that do not belong to a {kind} model: {', '.join(sorted(tensors)[:5])}")
    weights.tensors = common_dtype(weights.tensors)
    weights.tokenizer = _tokenizer_of(folder)
    weights.check()
    return weights


def write(weights: Weights, folder: Path, chat_template: Path | None = None) -> list[str]:
    """Writes a folder for transformers' from_pretrained: model, tokenizer, generation settings, chat template.

    Returns notes about what could not be expressed (hf_tokenizer). Raises ConversionError if no supported model fits.
    """
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=1)
    reasons = {kind: model.reasons_against(config) for kind, model in _MODELS.items()}
    kind = next((kind for kind, why in reasons.items() if not why), None)
    if kind is None:
        details = "; ".join(f"not {kind}, because of {', '.join(why)}" for kind, why in reasons.items())
        raise ConversionError(f"Hugging Face models cannot express this one: {details}")
    fields, tensors = _MODELS[kind].write(config, weights)
    fields["dtype"] = fields["torch_dtype"] = str(weights.dtype).removeprefix("torch.")
    notes: list[str] = []
    with write_files(folder, fields, tensors) as new:
        notes += hf_tokenizer.write(weights, new, chat_template)
    return notes


def _tokenizer_of(folder: Path) -> dict[str, Any]:
    """Tokenizer options for the tokenizer files in the folder, if there are any."""
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer.json")}
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
        return {"tokenizer_type": "GPT2BPETokenizer", **files}
    return {}
