"""Activation memory: bytes that one microbatch keeps on a rank between its forward and its backward pass.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4, count
s b h (34 + 5 a s / h) per layer for Megatron. The terms here are those of HAL's layers: no dropout masks, which are
recomputed from the seed, and no matrix of scores with flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from .shape import Shape

STATISTIC = 4
"""Bytes of a statistic of a norm or a softmax, which is float32 in any model."""


def layer_bytes(shape: Shape, layer: int) -> int:
    """Bytes kept by one layer without recomputation."""
    c, hidden = shape.config, shape.hidden_bytes
    norm = hidden + _statistics(shape)
    experts = shape.experts_of(layer)
    extra: float = 2 * norm if c.use_sandwich_norm else 0
    if c.qk_layernorm and shape.latent is None:  # contiguous copies of queries and keys, and their norms' statistics
        per_row = shape.rows * c.micro_batch_size
        extra += per_row * (shape.heads + shape.groups) * (shape.element + STATISTIC / c.kv_channels)
    if experts is None:
        mlp: float = hidden + _mlp(shape)
    else:
        mlp = hidden * experts.keeps_input() + experts.activations()
    # With parallel residuals both norms have the same input.
    inputs = norm + _statistics(shape) if c.use_parallel_residual else 2 * norm
    return int(inputs + hidden + _queries(shape) + _core(shape) + _context(shape) + mlp + extra)


def _mlp(shape: Shape) -> int:
    """Activations inside a dense MLP."""
    c = shape.config
    mlp = shape.rows * c.micro_batch_size * (shape.gate + 1) * shape.ffn * shape.element
    if c.squared_relu:  # the sum with the bias, and its relu
        mlp += shape.rows * c.micro_batch_size * shape.ffn * shape.element
    return mlp


def _statistics(shape: Shape) -> int:
    per_row = 2 if shape.config.normalization == "LayerNorm" else 1
    return per_row * STATISTIC * shape.hidden_rows * shape.config.micro_batch_size


def _mixed(shape: Shape) -> int:
    """The output of the QKV layer."""
    return shape.rows * shape.config.micro_batch_size * (shape.heads + shape.groups + shape.values) * shape.element


def _queries(shape: Shape) -> int:
    """Queries, keys and values as attention keeps them for its backward pass, and the latents they are made of."""
    if shape.latent is not None:
        return shape.latent.latents() + shape.latent.heads_kept()
    c, rope = shape.config, shape.config.position_embedding_type == "rope"
    per_row = shape.config.micro_batch_size * shape.element * shape.rows
    whole = c.context_parallel_size == 1
    copied = c.use_flash_attn and (c.shape_order in ("SBH", "BSH") if whole else c.context_parallel_algo == "ulysses")
    selective = c.recompute_granularity == "selective"
    if copied and not selective:
        return _mixed(shape)
    # Views keep the entire QKV output in memory, in addition to the copies that rotation or grouping make.
    grouped = c.num_query_groups != c.num_attention_heads
    return _mixed(shape) + per_row * ((shape.heads + shape.groups) if rope else shape.heads if grouped else 0)


def _core(shape: Shape) -> int:
    """Activations inside attention, which selective recomputation drops: log-sum-exps, or the probabilities."""
    return 0 if shape.config.recompute_granularity == "selective" else _scores(shape)


def _scores(shape: Shape) -> int:
    """With flash attention one log-sum-exp per row. Otherwise the probabilities, a copy after dropout if there is any,
    the scores if they are capped, and in 16 bits one more copy and the statistics of the softmax."""
    c, b = shape.config, shape.config.micro_batch_size
    rows = shape.rows * b * (c.num_attention_heads // shape.tp)
    if c.use_flash_attn:
        return rows * STATISTIC
    dropped, capped = c.attention_dropout > 0.0, c.attn_logit_softcapping is not None
    narrow = shape.element < 4
    full = shape.rows * c.context_parallel_size if c.context_parallel_size > 1 else shape.rows
    return rows * full * shape.element * (1 + dropped + capped + narrow) + rows * STATISTIC * narrow


def _context(shape: Shape) -> int:
    """The output of attention, kept as the input of the projection, and a second copy if its layout is changed."""
    c, b = shape.config, shape.config.micro_batch_size
    one = shape.rows * b * shape.context * shape.element
    twice = c.context_parallel_size > 1 and c.context_parallel_algo == "ulysses"
    twice = twice or (c.use_flash_attn and c.shape_order == "BNSD" and c.context_parallel_size == 1)
    return (2 if twice and c.recompute_granularity != "selective" else 1) * one


def stage_bytes(shape: Shape, stage: int) -> int:
    """Bytes kept by a stage: its layers with the config's recomputation, and the embedding or the head if it has them.

    The input of a stage is counted as a pipeline buffer (memory.py); its output stays until the backward pass.
    """
    stored, chunks = _recomputed(shape, stage)
    # The first layer of a later stage reads the pipeline's buffer, so its input is not counted here.
    received = 0 if shape.first(stage) else min(1, len(stored) + chunks) * shape.hidden_bytes
    kept = _of_layers(shape, stored) + chunks * shape.hidden_bytes - received
    if shape.first(stage):
        kept += token_bytes(shape)
    return kept + (head_bytes(shape) if shape.last(stage) else shape.hidden_bytes)


def _of_layers(shape: Shape, layers: Sequence[int]) -> int:
    """Bytes kept by several layers."""
    return sum(count * layer_bytes(shape, layer) for layer, count in shape.kinds(layers))


def _recomputed(shape: Shape, stage: int) -> tuple[tuple[int, ...], int]:
    """(layers that keep all their activations, the number of chunks of layers that keep only their input)."""
    c, layers = shape.config, shape.plan.layers[stage]
    if c.recompute_granularity != "full":
        return layers, 0
    count = c.recompute_num_layers or 1
    if c.recompute_method == "uniform":
        return (), -(-len(layers) // count)
    return layers[count:], min(len(layers), count)


def recomputed_at_once(shape: Shape, stage: int) -> int:
    """Bytes of activations that a backward pass adds to those that are kept, by recomputing one chunk of layers, or one
    attention, at a time. With "block" the first layers are recomputed, when the others have freed their activations."""
    c, layers = shape.config, shape.plan.layers[stage]
    if c.recompute_granularity is None or not layers:
        return 0
    if c.recompute_granularity == "selective":
        arguments = _mixed(shape) if shape.latent is None else shape.latent.recomputed()
        return arguments + _context(shape) + _scores(shape)
    count = c.recompute_num_layers or 1
    if c.recompute_method == "uniform":
        chunks = [layers[start : start + count] for start in range(0, len(layers), count)]
        return max(_of_layers(shape, chunk) for chunk in chunks)
    largest = max(layer_bytes(shape, layer) for layer, _ in shape.kinds(layers[:count]))
    return max(0, largest - _of_layers(shape, layers[count:]))


def token_bytes(shape: Shape) -> int:
    """Bytes kept by the embedding: the int64 token ids."""
    return shape.rows * shape.config.micro_batch_size * 8


def head_bytes(shape: Shape) -> int:
    """Bytes kept by the final norm, the output layer and the loss; a cap of the logits keeps them twice."""
    tokens = shape.rows * shape.config.micro_batch_size
    logits, labels = tokens * shape.vocabulary * shape.element, tokens * (8 + STATISTIC)
    logits *= 1 if shape.config.output_logit_softcapping is None else 2
    return 2 * shape.hidden_bytes + _statistics(shape) + logits + labels
