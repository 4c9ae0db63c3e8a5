"""HAL's own checkpoints as a source and as a target of conversion (the weights; optimizer state does not travel)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import checkpoint
from ..config import ConfigError
from ..gpt import shapes
from ..pretrained import TOKENIZER, model_options, saved_options
from ..saving import save
from ..tokenizer import build_tokenizer
from ..trainer import options
from ..unpickle import empty_tensors, stored_tensors
from .weights import Weights


def read(root: Path, *, vocabulary: int | None = None) -> Weights:
    """The latest checkpoint of `root`. vocabulary: how many ids are no padding (default: as many as its tokenizer
    has). Raises HalError for a damaged checkpoint."""
    folder, state = checkpoint.read_state(root)
    saved = saved_options(state, folder)
    weights = Weights(
        {n: v for n, v in saved.items() if n in model_options() and n not in ("bf16", "fp16")},
        {},
        {n: v for n, v in saved.items() if n in TOKENIZER},
        state["iteration"],
    )
    stored = {n: info for n, info in stored_tensors(folder).items() if not n.startswith("optimizer.")}
    weights.tensors = empty_tensors(folder, stored)
    checkpoint.load_tensors(folder, weights.tensors)
    weights.check()
    weights.cut(_vocabulary(weights, folder) if vocabulary is None else vocabulary)
    return weights


def _vocabulary(weights: Weights, folder: Path) -> int:
    config = weights.config()
    try:
        return build_tokenizer(config).vocab_size
    except ConfigError as error:
        raise ConfigError(
            f"how many ids of the checkpoint {folder} are no padding is known to its tokenizer only, and {error}; give "
            "the number with --true-vocab-size"
        ) from None


def write(weights: Weights, root: Path, *, divisible_by: int = 128) -> Path:
    """A release (weights without a training state) in `root`, with the vocabulary padded to a multiple."""
    tokenizer = weights.tokenizer or {"tokenizer_type": "NullTokenizer", "vocab_size": weights.vocabulary - 1}
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=divisible_by, **tokenizer)
    state: dict[str, Any] = {"iteration": weights.iteration, "config": options(config)}
    tensors = weights.padded(config.padded_vocab_size)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == shapes(config)
    return save(root, checkpoint.RELEASE, tensors, state)
