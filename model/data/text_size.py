"""How many bytes of text a token stands for: what makes the losses of runs with different tokenizers comparable."""

from __future__ import annotations

from typing import Any

from ..config.schema import Config
from .gpt_dataset import Split
from .tokenizers.tokenizer import Tokenizer

_TOKENS = 1 << 16
"""Tokens that are decoded to measure it."""


def text_size(config: Config, tokenizer: Tokenizer, split: Split) -> dict[str, Any]:
    """The tokenizer's type and fingerprint, and the mean bytes of UTF-8 per token of the split's first samples (None
    for data that are no text). An end of a document counts as a token without bytes, as in the loss."""
    record = {"type": config.tokenizer_type, "fingerprint": tokenizer.fingerprint, "bytes_per_token": None}
    if config.mock_data or config.tokenizer_type == "NullTokenizer":
        return record
    samples = max(1, min(_TOKENS // config.seq_length, 64))
    size = count = 0
    for sample in range(samples):
        _, labels = split.fetch(sample, 1)
        ids = [i for i in labels.flatten().tolist() if i >= 0]
        count += len(ids)
        size += len(tokenizer.decode([i for i in ids if i != tokenizer.eod]).encode("utf-8", "replace"))
    return {**record, "bytes_per_token": size / count if count else None}
