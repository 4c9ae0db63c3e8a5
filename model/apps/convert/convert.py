"""Conversion between checkpoint formats: detecting the format of a folder, and reading and writing `Weights`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import reader
from ...config.schema import ConfigError
from . import hal_format, huggingface, megatron_distributed, megatron_ranks
from .families import FAMILIES
from .weights import ConversionError, Weights, require

FORMATS = {
    "hal": "HAL",
    "huggingface": f"Hugging Face, as safetensors ({', '.join(FAMILIES)})",
    "megatron": "Megatron-LM, one file per rank",
    "megatron-core": "megatron-core, distributed (torch_dist)",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Target:
    """What to write. folder: new or empty. tp, pp, ep: parallel sizes of the files (megatron only).
    transformer_engine, grouped: names of Transformer Engine's layers, and of --moe-grouped-gemm (megatron only).
    divisible_by: divisor of the padded vocabulary size (not for huggingface, which has no padding). dtype: None keeps
    the source's. tokenizer: options to store in the checkpoint (hal only) instead of the source's. chat_template: a
    Jinja file (huggingface only). model_type: the family to write (huggingface only; default: the first that fits)."""

    format: str
    folder: Path
    tp: int = 1
    pp: int = 1
    ep: int = 1
    transformer_engine: bool = False
    grouped: bool = False
    divisible_by: int = 128
    dtype: str | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    chat_template: Path | None = None
    model_type: str | None = None


def detect(folder: Path) -> str:
    """The format of the checkpoint in a folder. Raises ConversionError if there is none."""
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder")
    if (folder / "config.json").is_file():
        return "huggingface"
    if any((reader.folder_of(folder, i) / reader.MANIFEST).is_file() for i in reader.candidates(folder)):
        return "hal"
    if megatron_distributed.find(folder) is not None:
        return "megatron-core"
    if megatron_ranks.find(folder) is not None:
        return "megatron"
    raise ConversionError(
        f"{folder} contains no checkpoint: neither {reader.LATEST} (hal, megatron, megatron-core) nor config.json "
        "(huggingface), nor mp_rank_* folders"
    )


def read(folder: Path, format: str, *, vocabulary: int | None = None) -> Weights:
    """The model of a checkpoint. vocabulary: number of ids without padding, if the checkpoint does not contain it."""
    if format == "huggingface":
        require(vocabulary is None, "--true-vocab-size would be ignored: Hugging Face models have no padding")
        return huggingface.read(folder)
    source: Any = {"hal": hal_format, "megatron": megatron_ranks, "megatron-core": megatron_distributed}[format]
    weights: Weights = source.read(folder, vocabulary=vocabulary)
    return weights


def write(weights: Weights, target: Target) -> list[str]:
    """Writes the model; returns notes about what of the tokenizer the format could not hold.

    Raises ConversionError if the format cannot express the model, ConfigError if the folder has files.
    """
    folder = target.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--save {folder} is not empty; give a new folder")
    if target.dtype is not None:
        weights.to(DTYPES[target.dtype])
    if target.format == "huggingface":
        return huggingface.write(weights, folder, target.chat_template, target.model_type)
    if target.format == "megatron":
        megatron_ranks.write(
            weights,
            folder,
            tp=target.tp,
            pp=target.pp,
            ep=target.ep,
            divisible_by=target.divisible_by,
            transformer_engine=target.transformer_engine,
            grouped=target.grouped,
        )
    elif target.format == "megatron-core":
        megatron_distributed.write(weights, folder, divisible_by=target.divisible_by)
    else:
        weights.tokenizer = target.tokenizer or weights.tokenizer
        hal_format.write(weights, folder, divisible_by=target.divisible_by)
        if not weights.tokenizer:
            return ["the source names no tokenizer, so texts are ids separated by blanks; --tokenizer-type gives one"]
    return []
