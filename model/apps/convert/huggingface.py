"""Converts Hugging Face models of the families in families.py. Logits are preserved: only the order of rows changes.

A model that the target format cannot express is refused; the error names the option that prevents the conversion.
Tensors are read and written one at a time, so that a conversion needs memory for about one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from . import family_weights, hf_tokenizer
from .families import FAMILIES
from .family import Family
from .hf_config import Fields, ends
from .safetensors_files import read_config, read_object, read_tensors
from .safetensors_files import write as write_files
from .weights import ConversionError, Weights, common_dtype, require


def read(folder: Path) -> Weights:
    """Reads a model's folder. Raises ConversionError for models of other families and for unsupported variants."""
    config = read_config(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConversionError(
            f"{folder} has a model of type {kind!r}; those that can be converted are {', '.join(FAMILIES)}"
        )
    family, fields = FAMILIES[kind], Fields(config, folder / "config.json")
    source = read_tensors(folder)
    # The model has no ids but its own; those that pad its vocabulary here must not change its loss.
    weights = Weights({**family_weights.options_of(family, fields), "mask_padded_vocab": True}, source)
    # The layers are counted before the model's names are listed, which would take long for a corrupt number.
    layers = weights.options["num_layers"]
    if layers > len(source):
        raise ConversionError(f"{folder} has no tensors for {layers} layers, only {len(source)} tensors")
    try:
        vocabulary = fields.count("vocab_size", 1)
        weights.tensors = family_weights.read(family, weights.model_config(vocabulary), source)
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from None
    weights.tensors = common_dtype(weights.tensors)
    weights.tokenizer = _tokenizer_of(folder)
    weights.folder = None if weights.tokenizer else folder
    weights.check()
    return weights


def write(
    weights: Weights, folder: Path, chat_template: Path | None = None, model_type: str | None = None
) -> list[str]:
    """Writes a folder for transformers' from_pretrained: model, tokenizer, generation settings, chat template.

    model_type: the family to write; default: the first that can express the model. Returns notes about what could not
    be expressed (hf_tokenizer). Raises ConversionError if no family fits.
    """
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=1)
    choices = FAMILIES if model_type is None else {model_type: FAMILIES[model_type]}
    reasons = {kind: family_weights.reasons_against(family, config) for kind, family in choices.items()}
    kind = next((kind for kind, why in reasons.items() if not why), None)
    if kind is None:
        closest = sorted(reasons, key=lambda kind: len(reasons[kind]))[:4]
        details = "; ".join(f"not {kind}, because of {', '.join(reasons[kind])}" for kind in closest)
        raise ConversionError(f"Hugging Face models cannot express this one: {details}")
    fields = {**family_weights.fields_of(FAMILIES[kind], config), "vocab_size": weights.vocabulary, **ends(weights)}
    fields["dtype"] = fields["torch_dtype"] = str(weights.dtype).removeprefix("torch.")
    notes: list[str] = []
    with write_files(folder, fields, groups(FAMILIES[kind], weights)) as new:
        notes += hf_tokenizer.write(weights, new, chat_template)
    return notes


def groups(family: Family, weights: Weights) -> Iterator[tuple[dict[str, Tensor], Any]]:
    """For each of our tensors: theirs without data, by name, and a function that returns them with data."""
    config = weights.config(make_vocab_size_divisible_by=1)
    for ours, layout, theirs in family_weights.correspondence(family, config):

        def load(ours: str = ours, layout: Any = layout) -> list[Tensor]:
            return list(layout.split(weights.tensors[ours], config))

        metas = layout.split(weights.meta(ours), config)
        yield dict(zip(theirs, metas, strict=True)), load


def _tokenizer_of(folder: Path) -> dict[str, Any]:
    """Tokenizer options for the tokenizer files in the folder, if there are any.

    Raises ConversionError for files that are read in different ways by different tokenizers of transformers, unless it
    is known which one is meant.
    """
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer.json")}
    path = folder / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {}
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if (folder / "tokenizer.model").is_file() and kind in ("", "LlamaTokenizer", "GemmaTokenizer"):
        begins = settings.get("add_bos_token") is not False
        name = "Llama2Tokenizer" if begins else "GPTSentencePieceTokenizer"
        return {"tokenizer_type": name, "tokenizer_model": str(folder / "tokenizer.model")}
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() and kind in ("", "GPT2Tokenizer"):
        files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
        return {"tokenizer_type": "GPT2BPETokenizer", **files}
    require(
        kind == "",
        f"{folder} has a {kind} and no tokenizer.json; transformers writes that file: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
    )
    return {}
