"""What a backend's devices must be able to store to train a config; shared by the trainer and `hal plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hal import Capabilities

from .parallel_layout import ParallelLayout
from .schema import Config

_TP, _CP = "--tensor-model-parallel-size", "--context-parallel-size"
_EP = "--expert-model-parallel-size"


def device_problems(c: Config, plan: ParallelLayout, capabilities: Capabilities) -> Iterator[str]:
    """Why devices with these capabilities cannot train the config in this layout, each with what to change.

    Covers tensors of the model and of its activations, not the buffers in which torch's engines join several of them.
    """
    if c.params_dtype not in capabilities.dtypes:
        known = ", ".join(sorted(_name(d) for d in capabilities.dtypes if d.is_floating_point))
        yield (
            f"parameters of dtype {_name(c.params_dtype)} cannot be stored on the device, which has {known}; choose "
            "--bf16, --fp16 or neither (float32) accordingly"
        )
    float8 = {torch.float8_e4m3fn, torch.float8_e5m2}
    if c.fp8_format is not None and not float8 <= capabilities.dtypes:
        yield f"--fp8-format {c.fp8_format}: the device has no float8_e4m3fn and float8_e5m2; remove it"
    if c.cuda_graphs and not capabilities.graphs:
        yield "--cuda-graphs: this backend cannot record graphs (Backend.capabilities().graphs is False); remove it"
    limit = capabilities.max_elements
    for name, shape, remedy in _largest_tensors(c, plan):
        count = math.prod(shape)
        if limit is not None and count > limit:
            size = f"{list(shape)} have {count:,} elements"
            yield f"{name} {size}; a tensor on the device has at most {limit:,}; {remedy}"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _largest_tensors(c: Config, plan: ParallelLayout) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape on one rank, what to change if it is too large) of the tensors that can be a step's largest."""
    tp, cp, b, s = plan.layout.tp, plan.layout.cp, c.micro_batch_size, c.seq_length
    vocabulary, heads = c.padded_vocab_size // tp, c.num_attention_heads // tp
    parts = 2 if c.swiglu or c.geglu else 1
    inner = c.ffn_hidden_size // tp * parts
    qk, v = c.head_sizes
    qkv = heads * qk + c.num_query_groups // tp * (qk + v)
    smaller = f"lower --micro-batch-size, or raise {_TP} or {_CP}"
    if c.num_experts is not None:
        expert, ep = c.moe_ffn_hidden_size // plan.layout.etp * parts, plan.layout.ep
        # With an even load; all-gather shows the tokens of all expert ranks to each of them.
        tokens = s // cp // (tp if c.sequence_parallel else 1) * b * c.moe_router_topk * plan.layout.etp
        if c.moe_token_dispatcher_type == "allgather":
            tokens *= ep
        yield "the experts' activations", (tokens, max(expert, c.hidden_size)), smaller
        yield "the weights of the experts", (c.num_experts // ep, expert, c.hidden_size), f"raise {_EP}"
    yield "the logits", (s // cp, b, vocabulary), smaller
    yield "the MLP's activations", (s // cp, b, inner), smaller
    yield "queries, keys and values", (s // cp, b, qkv), smaller
    yield "the hidden states", (s // cp, b, c.hidden_size), f"lower --micro-batch-size, or raise {_CP}"
    yield "the rows of the embedding table", (vocabulary, c.hidden_size), f"raise {_TP}"
    yield "the weights of the MLP", (inner, c.hidden_size), f"raise {_TP}"
    if not c.use_flash_attn:
        yield "the attention scores", (b, heads, s // cp, s), f"use --use-flash-attn, or {smaller}"
    if c.separates_documents and (c.attention_dropout or not c.use_flash_attn or c.ring_degree > 1):
        block = s // (2 * c.ring_degree) if c.ring_degree > 1 else s
        yield "the masks of the documents", (b, 1, block, block), "give --attention-dropout 0, or lower --seq-length"
