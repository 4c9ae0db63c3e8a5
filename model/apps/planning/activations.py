"""Activation memory: bytes that one microbatch keeps on a rank between its forward and its backward pass.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 4, count
s b h (34 + 5 a s / h) per layer for Megatron. The terms here are those of HAL's layers: no dropout masks, which are
recomputed from the seed, and no matrix of scores with flash attention.
"""

from __future__ import annotations

from ...config.recomputation import chunks, counts
from .shape import Shape

STATISTIC = 4
"""Bytes of a statistic of a norm or a softmax, which is float32 in any model."""


def layer_bytes(shape: Shape, layer: int, selective: bool = False) -> int:
    """Bytes kept by one layer without recomputation, or with that of its attention only (selective)."""
    c, hidden = shape.config, shape.hidden_bytes
    norm = shape.residual_bytes + _statistics(shape)
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
    scores = 0 if selective else _scores(shape)  # log-sum-exps, or the probabilities
    return int(inputs + hidden + _queries(shape, selective) + scores + _context(shape, selective) + mlp + extra)


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


def _key_copies(shape: Shape) -> int:
    """What ranks that read the same keys and values add to them."""
    c = shape.config
    return shape.rows * c.micro_batch_size * (c.key_copies - 1) * (shape.groups + shape.values) * shape.element


def _queries(shape: Shape, selective: bool) -> int:
    """Queries, keys and values as attention keeps them for its backward pass, and the latents they are made of."""
    if shape.latent is not None:
        return shape.latent.latents() + shape.latent.heads_kept(selective)
    c, rope = shape.config, shape.config.rotates
    per_row = shape.config.micro_batch_size * shape.element * shape.rows
    whole = c.context_parallel_size == 1
    copied = c.use_flash_attn and (c.shape_order in ("SBH", "BSH") if whole else c.ulysses_degree > 1)
    if copied and not selective:
        return _mixed(shape) + _key_copies(shape)
    # Views keep the entire QKV output in memory, in addition to the copies that rotation or grouping make.
    grouped = c.num_query_groups != c.num_attention_heads
    return _mixed(shape) + per_row * ((shape.heads + shape.groups) if rope else shape.heads if grouped else 0)


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


def _context(shape: Shape, selective: bool = True) -> int:
    """The output of attention, kept as the input of the projection, and a second copy if its layout is changed."""
    c, b = shape.config, shape.config.micro_batch_size
    one = shape.rows * b * shape.context * shape.element
    twice = c.ulysses_degree > 1 or (c.use_flash_attn and c.shape_order == "BNSD" and c.context_parallel_size == 1)
    return (2 if twice and not selective else 1) * one


def stage_bytes(shape: Shape, stage: int) -> int:
    """Bytes kept by a stage: its layers with the config's recomputation, and the embedding or the head if it has them.

    The input of a stage is counted as a pipeline buffer (memory.py); its output stays until the backward pass.
    """
    c, layers = shape.config, shape.plan.layers[stage]
    full, _ = counts(c, stage, len(layers))
    # The first layer of a later stage reads the pipeline's buffer, so its input is not counted here.
    received = 0 if shape.first(stage) or not layers else shape.residual_bytes
    received = _on_device(shape, received) if full else received
    inputs = sum(recomputed for _, recomputed in chunks(c, layers)) * shape.residual_bytes
    kept = _of_layers(shape, stage, full, len(layers)) + _on_device(shape, inputs) - received
    if shape.first(stage):
        kept += token_bytes(shape)
    return kept + (head_bytes(shape) if shape.last(stage) else shape.residual_bytes)


def _on_device(shape: Shape, inputs: int) -> int:
    """Of the inputs of recomputed layers, the bytes that stay on the device (parallel/kept_inputs.py)."""
    c = shape.config
    divided = c.partition_activations and not c.sequence_parallel
    return 0 if c.checkpoint_in_cpu else inputs // (shape.tp if divided else 1)


def _of_layers(shape: Shape, stage: int, start: int, end: int) -> int:
    """Bytes kept by layers `start` to `end` of a stage, which are not recomputed as a whole."""
    layers = shape.plan.layers[stage]
    full, attention = counts(shape.config, stage, len(layers))
    bound = min(max(start, full + attention), end)
    parts = ((layers[start:bound], True), (layers[bound:end], False))
    return sum(n * layer_bytes(shape, layer, again) for part, again in parts for layer, n in shape.kinds(part))


def recomputed_at_once(shape: Shape, stage: int) -> int:
    """Bytes of activations that a backward pass adds to those that are kept, by recomputing one chunk of layers, or one
    attention, at a time. With "block" the first layers are recomputed, when the others have freed their activations."""
    c, layers = shape.config, shape.plan.layers[stage]
    full, attention = counts(c, stage, len(layers))
    again = 0
    if attention:
        arguments = _mixed(shape) + _key_copies(shape) if shape.latent is None else shape.latent.recomputed()
        again = arguments + _context(shape) + _scores(shape)
    if full:
        groups = [shape.kinds(group) for group, recomputed in chunks(c, layers) if recomputed]
        largest = max(sum(count * layer_bytes(shape, layer) for layer, count in group) for group in groups)
        again = max(again, largest - _of_layers(shape, stage, full, len(layers)))
    return again


def token_bytes(shape: Shape) -> int:
    """Bytes kept by the embedding: the int64 token ids."""
    return shape.rows * shape.config.micro_batch_size * 8


def head_bytes(shape: Shape) -> int:
    """Bytes kept by the final norm, the output layer and the loss; a cap of the logits keeps them twice."""
    tokens = shape.rows * shape.config.micro_batch_size
    logits, labels = tokens * shape.vocabulary * shape.element, tokens * (8 + STATISTIC)
    logits *= 1 if shape.config.output_logit_softcapping is None else 2
    return shape.residual_bytes + shape.hidden_bytes + _statistics(shape) + logits + labels
