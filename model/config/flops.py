"""The number of floating-point operations of the model per token, from which "model FLOP/s" is computed.

Multiplications and additions of matrix products count, forward and backward (3 x forward), including those for the
padding of the vocabulary. Of a mixture of experts, those that a token uses count. Noop layers, recomputation, and
attention to positions outside the window do not count.
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


def attention_weights(c: Config, tp: int = 1) -> int:
    """Elements of the matrices of a layer's softmax attention on one of `tp` tensor-parallel ranks."""
    h, (qk, v), heads = c.hidden_size, c.head_sizes, c.num_attention_heads // tp
    if not c.multi_latent_attention:
        return h * (heads * (qk * (1 + c.attention_output_gate) + v) + c.num_query_groups // tp * (qk + v))
    q, kv = c.q_lora_rank, c.kv_lora_rank
    queries = h * heads * qk if q is None else h * q + q * heads * qk
    keys_and_values = h * (kv + c.qk_pos_emb_head_dim) + kv * heads * (c.qk_head_dim + v)
    return queries + keys_and_values + heads * v * h


def linear_attention_products(c: Config) -> int:
    """Multiplications per token of a layer with linear attention: its matrices, its convolution and, as Megatron counts
    them, four products of a value's size for each head's state."""
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    matrices = c.hidden_size * (2 * keys + 3 * values + 2 * c.linear_num_value_heads)
    return matrices + c.linear_conv_kernel_dim * (2 * keys + values) + 4 * values * c.linear_value_head_dim


def idle_parameters(c: Config) -> int:
    """Parameters of a mixture of experts that a token does not use: the weights of the experts it is not sent to. All
    others are active, those of the router included. 0 for a dense model."""
    if c.num_experts is None:
        return 0
    present = sum(c.has_experts(n) for n in range(c.num_layers) if str(n) not in c.noop_layers)
    matrices = 3 if c.swiglu or c.geglu else 2
    return present * (c.num_experts - c.moe_router_topk) * matrices * c.hidden_size * c.moe_ffn_hidden_size


def flops_per_token(config: Config) -> float:
    """Training FLOPs per token: 6 per weight used in a product, and 6 per visible pair and channel of the heads of
    queries and of values."""
    c = config
    matrices = 3 if c.swiglu or c.geglu else 2
    dense = c.hidden_size * c.ffn_hidden_size * matrices
    used = c.moe_router_topk * c.moe_ffn_hidden_size + (c.moe_shared_expert_intermediate_size or 0)
    experts = c.hidden_size * (used * matrices + c.expert_count)  # those of a token, and the router
    present = [n for n in range(c.num_layers) if str(n) not in c.noop_layers]
    mlps = sum(experts if c.has_experts(n) else dense for n in present)
    attended = [n for n in present if not c.has_linear_attention(n)]
    recurrent = (len(present) - len(attended)) * linear_attention_products(c)
    weights = len(attended) * attention_weights(c) + recurrent + mlps + c.hidden_size * c.padded_vocab_size
    pairs = sum(visible_pairs(c.seq_length, *c.window_of(n)) for n in attended) / c.seq_length
    return 6.0 * (weights + c.num_attention_heads * sum(c.head_sizes) * pairs)
