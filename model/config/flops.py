"""The number of floating-point operations of the model per token, from which "model FLOP/s" is computed.

Multiplications and additions of matrix products count, forward and backward (3 x forward), including those for the
padding of the vocabulary. Noop layers, recomputation, and attention to positions outside the window do not count.
"""

from __future__ import annotations

from functools import lru_cache

from .schema import Config


@lru_cache
def visible_pairs(length: int, pre: int | None, next_: int) -> int:
    """Number of (query, key) pairs of a sequence that are inside a window."""
    total = 0
    for i in range(length):
        first = 0 if pre is None else max(0, i - pre)
        total += max(0, min(length - 1, i + next_) - first + 1)
    return total


def flops_per_token(config: Config) -> float:
    """Training FLOPs per token: 6 per weight used in a product, plus 12 per visible pair and attention channel."""
    c = config
    attention = c.num_attention_heads * c.kv_channels
    qkv = c.hidden_size * (attention + 2 * c.num_query_groups * c.kv_channels)
    mlp = c.hidden_size * c.ffn_hidden_size * (3 if c.swiglu or c.geglu else 2)
    layers = c.num_layers - len(set(c.noop_layers))
    weights = layers * (qkv + attention * c.hidden_size + mlp) + c.hidden_size * c.padded_vocab_size
    pairs = visible_pairs(c.seq_length, *c.window) / c.seq_length
    return 6.0 * weights + 12.0 * layers * attention * pairs
