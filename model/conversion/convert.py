"""From one format of checkpoints to another: which a folder holds, and the way through `Weights`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint
from ..config import ConfigError
from . import distributed, huggingface, legacy, own
from .weights import ConversionError, Weights, require

FORMATS = {
    "hal": "HAL's own",
    "huggingface": "Hugging Face's GPT-2 or Llama, in safetensors",
    "megatron": "Megatron-LM's, one file per rank",
    "megatron-core": "megatron-core's distributed one (torch_dist)",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Target:
    """What to write, and where: a folder that is new or empty. tp, pp: ranks the files are for (megatron only).
    divisible_by: the padded vocabulary (not huggingface, which has no padding). dtype: None keeps the source's.
    tokenizer: options that the checkpoint is to name (hal only), else those the source names."""

    format: str
    folder: Path
    tp: int = 1
    pp: int = 1
    divisible_by: int = 128
    dtype: str | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)


def detect(folder: Path) -> str:
    """The format of the checkpoint in a folder. Raises ConversionError if there is none."""
    if not folder.is_dir():
        raise ConversionError(f"{folder} is no folder")
    if (folder / "config.json").is_file():
        return "huggingface"
    at = checkpoint.tracked(folder)
    if at is not None and (checkpoint.folder_of(folder, at) / checkpoint.MANIFEST).is_file():
        return "hal"
    if distributed.find(folder) is not None:
        return "megatron-core"
    if legacy.find(folder) is not None:
        return "megatron"
    raise ConversionError(
        f"{folder} holds no checkpoint: neither {checkpoint.LATEST} (hal, megatron, megatron-core) nor config.json "
        "(huggingface), nor mp_rank_* folders"
    )


def read(folder: Path, format: str, *, vocabulary: int | None = None) -> Weights:
    """The model of a checkpoint. vocabulary: ids that are no padding, where the checkpoint does not say."""
    if format == "huggingface":
        require(vocabulary is None, "--true-vocab-size would be ignored: huggingface's models have no padding")
        return huggingface.read(folder)
    reader: Any = {"hal": own, "megatron": legacy, "megatron-core": distributed}[format]
    weights: Weights = reader.read(folder, vocabulary=vocabulary)
    return weights


def write(weights: Weights, target: Target) -> None:
    """Writes the model. Raises ConversionError for what the format cannot express, and a folder that is not empty."""
    folder = target.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--save {folder} is not empty; give a new folder")
    if target.dtype is not None:
        weights.tensors = {n: t.to(DTYPES[target.dtype]) for n, t in weights.tensors.items()}
    if target.format == "huggingface":
        huggingface.write(weights, folder)
    elif target.format == "megatron":
        legacy.write(weights, folder, tp=target.tp, pp=target.pp, divisible_by=target.divisible_by)
    elif target.format == "megatron-core":
        distributed.write(weights, folder, divisible_by=target.divisible_by)
    else:
        weights.tokenizer = target.tokenizer or weights.tokenizer
        own.write(weights, folder, divisible_by=target.divisible_by)
