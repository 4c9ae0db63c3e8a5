"""The blocks of calls that a model makes, with the layouts and optional arguments of that model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hal.core.op import Op

from ..calls import tensors
from . import blocks
from .blocks import RUN, Arguments, Block, Blocks, Part, Pick

COLUMNS = 64
"""Rows and columns of a tile of a matrix."""

LARGEST = 1 << 22
"""The most elements of a call's arguments for which the reference computes all of it."""

_ATTENTION = {"layout", "num_heads", "num_kv_heads", "pre_tokens", "next_tokens", "scale", "dropout_p", "rng"}
_PACKED = _ATTENTION | {"cu_seqlens_q", "cu_seqlens_k"}


def blocks_of(op: Op[Any, Any], arguments: Arguments, outputs: int) -> Blocks | None:
    """The blocks of a call of an op, on any device; None if the reference would have to compute a large call whole.

    arguments: all of the call's arguments by name. outputs: the number of its results.
    """
    choose = _BLOCKS.get(op.name) if op.__module__.startswith("hal.ops") else None
    chosen = choose(arguments) if choose is not None else None
    if chosen is not None:
        return chosen
    small = sum(x.numel() for _, _, x in tensors(arguments)) <= LARGEST
    return blocks.whole(*op.grads, outputs=outputs) if small and not op.mutates else None


def _always(blocks: Blocks) -> Callable[[Arguments], Blocks]:
    return lambda arguments: blocks


def _norm(*rows: str, weights: tuple[str, ...], outputs: int = 1) -> Callable[[Arguments], Blocks]:
    return _always(blocks.every(blocks.along(*rows, outputs=outputs), blocks.sums(*weights, over=rows)))


def _tile(x: Tensor, dim: int, draw: random.Random, length: int) -> Pick:
    """Up to `length` adjacent elements of dimension `dim`, the first, the last, or drawn ones."""
    count = x.shape[dim]
    last = max(0, count - length)
    start = draw.choice([0, last, draw.randint(0, last)])
    return lambda y: y.narrow(dim, start, min(length, count - start))


def _linear(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """Tiles of the output and of each gradient, because rows of them would need all of the weight or of x.

    Each is a call with fewer rows, outputs or inputs; of a call with fewer inputs only the gradients are compared.
    """
    x, weight, bias = (arguments[name] for name in ("x", "weight", "bias"))
    rows, inputs = _tile(x, 0, draw, RUN), _tile(weight, 1, draw, COLUMNS)
    outputs = _tile(weight, 0, draw, COLUMNS)
    of_outputs = {} if bias is None else {"bias": outputs}

    def of_inputs(y: Tensor) -> Tensor:
        return inputs(y.reshape(-1, y.shape[-1])).reshape(*y.shape[:-1], -1)

    def last(pick: Pick) -> Pick:
        return lambda y: pick(y.reshape(-1, y.shape[-1]).t()).t().reshape(*y.shape[:-1], -1)

    def block(name: str, picks: Mapping[str, Pick], upstream: Pick, compared: Sequence[str], output: bool) -> Block:
        def parts() -> Iterator[Part]:
            yield Part(blocks.cut_out(arguments, picks), upstream)

        outputs = {"the output": ("the output", upstream)} if output else {}
        return Block(name, parts, outputs, {name: picks[name] for name in compared})

    yield block("a tile", {"x": rows, "weight": outputs, **of_outputs}, lambda y: last(outputs)(rows(y)), (), True)
    yield block(
        "a tile of rows and inputs", {"x": lambda y: of_inputs(rows(y)), "weight": of_inputs}, rows, ("x",), False
    )
    yield block(
        "a tile of outputs and inputs",
        {"x": of_inputs, "weight": lambda y: of_inputs(outputs(y)), **of_outputs},
        last(outputs),
        ("weight", *of_outputs),
        False,
    )


def _linear_wgrad(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """A tile of the sum."""
    main, bias = arguments["main_grad"], arguments["main_bias_grad"]
    outputs, inputs = _tile(main, 0, draw, COLUMNS), _tile(main, 1, draw, COLUMNS)

    def columns_of(pick: Pick) -> Pick:
        return lambda y: pick(y.reshape(-1, y.shape[-1]).t()).t()

    def inputs_of(y: Tensor) -> Tensor:
        return inputs(y.reshape(-1, y.shape[-1]))

    picks: dict[str, Pick] = {"x": inputs_of, "dy": columns_of(outputs)}
    written: dict[str, Pick] = {"main_grad": lambda y: inputs(outputs(y))}
    if bias is not None:
        written["main_bias_grad"] = outputs
    part = Part(blocks.cut_out(arguments, {**picks, **written}), outputs)
    labels = {name: f"{name}, written in place" for name in written}
    yield Block("a tile", lambda: iter([part]), {label: (label, written[name]) for name, label in labels.items()}, {})


def _activated_product(arguments: Arguments) -> Blocks:
    return blocks.every(blocks.along("x"), blocks.columns(gated=arguments["activation"] != "gelu", weight=0, bias=0))


def _attention(arguments: Arguments) -> Blocks | None:
    used = {name for name, value in arguments.items() if value is not None and value is not False}
    packed = arguments["layout"] == "TND"
    return (
        (blocks.packed_attention if packed else blocks.attention)
        if used <= (_PACKED if packed else _ATTENTION) | {*"qkv"}
        else None
    )


def _tokens_first(blocks: Blocks) -> Callable[[Arguments], Blocks | None]:
    """For an op with angles per token, whose blocks need tokens in dimension 0."""
    return lambda arguments: blocks if arguments["layout"][0] in "ST" else None


def _softmax(arguments: Arguments) -> Blocks | None:
    mask = arguments["mask"]
    return blocks.along("x", dim=1, run=1, drawn=1) if mask is None or mask.shape[1] == 1 else None


_BLOCKS: Mapping[str, Callable[[Arguments], Blocks | None]] = {
    "swiglu": _always(blocks.every(blocks.along("x"), blocks.columns(gated=True, x=-1, bias=-1))),
    "geglu": _always(blocks.every(blocks.along("x"), blocks.columns(gated=True, x=-1, bias=-1))),
    "bias_gelu": _always(blocks.every(blocks.along("x"), blocks.columns(x=-1, bias=-1))),
    "dropout": _always(blocks.along("x")),
    "bias_dropout_add": _always(
        blocks.every(blocks.along("x", "residual"), blocks.columns(x=-1, bias=-1, residual=-1))
    ),
    "philox_uniform": _always(blocks.draws),
    "linear": _always(_linear),
    "linear_bias_activation": _activated_product,
    "linear_wgrad": _always(_linear_wgrad),
    "layer_norm": _norm("x", weights=("weight", "bias")),
    "rms_norm": _norm("x", weights=("weight",)),
    "add_layer_norm": _norm("x", "residual", weights=("weight", "bias"), outputs=2),
    "add_rms_norm": _norm("x", "residual", weights=("weight",), outputs=2),
    "rotary": _tokens_first(blocks.along("x", "cos", "sin")),
    "qk_norm_rotary": _tokens_first(
        blocks.every(
            blocks.along("q", "k", "cos", "sin", outputs=2),
            blocks.sums("q_weight", "k_weight", over=["q", "k", "cos", "sin"]),
        )
    ),
    "embedding": _always(blocks.table_rows),
    "cross_entropy": _always(blocks.along("logits", "target")),
    "linear_cross_entropy": _always(blocks.along("x", "target")),
    "flash_attention": _attention,
    "merge_attention": _always(blocks.queries),
    "scale_mask_softmax": _softmax,
    "moe_router": _always(blocks.along("logits", outputs=2)),
    "unpermute": _always(blocks.tokens_of_rows),
    "grouped_linear": _always(blocks.groups),
    "grouped_linear_wgrad": _always(blocks.groups),
    "grouped_swiglu": _always(blocks.along("x", "probs")),
    "adamw": _always(blocks.in_place("params", "exp_avgs", "exp_avg_sqs", "model_params", reads=["grads"])),
    "unscale_and_check": _always(blocks.every(blocks.in_place("grads"), blocks.overflow)),
}
