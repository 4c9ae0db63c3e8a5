"""Reads and writes the weights of HAL's checkpoints for conversion. The optimizer state is not converted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import reader
from ...checkpoint.safe_unpickle import SafeReader, check_stored, read_tensors
from ...checkpoint.saved_config import TOKENIZER, model_options, require_consistent, saved_options, saved_vocabulary
from ...checkpoint.sharded_tensor import DeferredTensor
from ...checkpoint.writer import save
from ...config.schema import Config, ConfigError
from ...data.tokenizers.build import build_tokenizer
from ...gpt.model import shapes
from ...training.trainer_state import options
from .weights import LazyTensors, Weights, meta_of


def read(root: Path, *, vocabulary: int | None = None) -> Weights:
    """The latest checkpoint of `root`. vocabulary: number of ids without padding (default: the model's, which may have
    more than its tokenizer; of checkpoints that do not say, the tokenizer's). Raises HalError for a damaged
    checkpoint."""
    folder, state = reader.read_state(root)
    saved = saved_options(state, folder)
    weights = Weights(
        # The padding is removed below, so an option that gives its size no longer describes the weights.
        {n: v for n, v in saved.items() if n in model_options() and n not in ("bf16", "fp16", "pad_vocab_size_to")},
        {},
        # Saved options leave out those at their defaults; without its type, a result would have no tokenizer.
        {"tokenizer_type": Config.tokenizer_type, **{n: v for n, v in saved.items() if n in TOKENIZER}},
        state["iteration"],
    )
    source = SafeReader(folder)
    # Histories of float8's scales (--fp8-recipe delayed) belong to the training, too.
    stored = {
        n: info
        for n, info in source.tensors().items()
        if not (n.startswith("optimizer.") or n.endswith(".amax_history"))
    }
    weights.tensors = tensors = LazyTensors()
    check_stored(folder, stored)
    require_consistent(saved, state, folder, stored)
    for name, info in stored.items():
        meta = torch.empty(info.size, dtype=info.properties.dtype, device="meta")
        tensors.add(name, partial(_load, source, name, meta), meta)
    weights.check()
    if vocabulary is None:
        vocabulary = saved_vocabulary(state, folder) or _vocabulary(weights, folder)
    weights.cut(vocabulary)
    return weights


def _load(source: SafeReader, name: str, meta: Tensor) -> Tensor:
    tensor = torch.empty(meta.shape, dtype=meta.dtype)
    read_tensors(source, {name: tensor})
    return tensor


def _vocabulary(weights: Weights, folder: Path) -> int:
    config = weights.config()
    try:
        return build_tokenizer(config).vocab_size
    except ConfigError as error:
        raise ConfigError(
            f"the checkpoint {folder} has no vocabulary size without padding, and its tokenizer cannot be built: "
            f"{error}; give the size with --true-vocab-size"
        ) from None


def write(weights: Weights, root: Path, *, divisible_by: int = 128) -> Path:
    """Writes a release (weights without training state) to `root`, with the vocabulary padded to a multiple."""
    tokenizer = weights.tokenizer or {
        "tokenizer_type": "NullTokenizer",
        "vocab_size": weights.vocabulary - 1,
        "tokenizer_model": None if weights.folder is None else str(weights.folder),
    }
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=divisible_by, **tokenizer)
    state: dict[str, Any] = {"iteration": weights.iteration, "config": options(config)}
    padded = weights.padded(config.padded_vocab_size)
    metas = {name: meta_of(padded, name) for name in padded}
    assert {n: tuple(t.shape) for n, t in metas.items()} == shapes(config)
    tensors = {n: DeferredTensor.of(meta, partial(padded.__getitem__, n)) for n, meta in metas.items()}
    return save(root, reader.RELEASE, tensors, state)
