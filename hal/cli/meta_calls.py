"""Calls written on a command line: an op's arguments from shape options and `--arg name=value`, as meta tensors.

No memory is allocated and no device is touched, so shapes may be as large as in training.
"""

from __future__ import annotations

import ast
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.core.op import Op, Sample
from hal.errors import HalError
from hal.rng import Rng

from .arguments import Parser

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}


def add_call(parser: Parser) -> None:
    """Adds the options that describe a call."""
    group = parser.add_argument_group("the call (sizes that the op does not have are ignored)")
    group.add_argument(
        "--dtype", default="fp32", choices=[d for d, t in DTYPES.items() if t.is_floating_point and t.itemsize > 1]
    )
    group.add_argument("--layout", default=None, help="of attention and rotary: SBH, BSH, SBND, BSND, BNSD, TND")
    sizes = {
        "micro-batch-size": (1, "batch"),
        "seq-length": (1024, "queries, or tokens of a sequence"),
        "kv-length": (None, "keys; default seq-length"),
        "num-attention-heads": (16, "query heads"),
        "num-query-groups": (None, "key/value heads; default as many as query heads"),
        "head-dim": (64, "size of a head"),
        "v-head-dim": (None, "size of a head of the values; default head-dim"),
        "hidden-size": (None, "width; default heads x head size"),
        "ffn-hidden-size": (None, "width of the MLP; default 4 x hidden"),
        "vocab-size": (50304, "vocabulary"),
    }
    for name, (default, text) in sizes.items():
        shown = "" if default is None else f" (default {default})"
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text + shown)
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any parameter of the op: a Python value; a tensor as 2x16x64 or 4x4:bool, a list of them separated by "
        "commas; an Rng as SEED or SEED:OFFSET",
    )


def call(op: Op[Any, Any], given: Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the call that the options describe. Raises HalError for an argument that the op lacks."""
    dtype = DTYPES[given.dtype]
    arguments = _shaped(op, given, dtype)
    for text in given.arg:
        name, equals, value = text.partition("=")
        if not equals or name not in op.signature.parameters:
            raise HalError(f"--arg {text}: write NAME=VALUE with NAME among {', '.join(op.signature.parameters)}")
        arguments[name] = _value(op, name, value, dtype)
    missing = [n for n, p in op.signature.parameters.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise HalError(f"{op.name} needs {', '.join(missing)}; give --arg NAME=VALUE for each")
    args = []
    for name, p in op.signature.parameters.items():
        if p.kind is p.KEYWORD_ONLY or name not in arguments:
            break
        args.append(arguments.pop(name))
    return tuple(args), arguments


def _shaped(op: Op[Any, Any], given: Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that the shape options describe; for an op without a maker, those of its first edge case."""
    maker = _MAKERS.get(op.name)
    if maker is not None:
        return maker(_Sizes(given), lambda *shape, kind=dtype: _meta(shape, kind))
    sample = next(iter(op.edge_cases()), Sample(()))
    args, kwargs = sample.build(dtype)
    bound = op.signature.bind_partial(*args, **kwargs).arguments
    return {n: _to_meta(v) for n, v in bound.items()}


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError):
        raise HalError(
            f"there is no tensor of shape {tuple(shape)}: sizes must be at least 0, and the total below 2**63 bytes"
        ) from None


def _to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_meta(v) for v in value]
    return value.to("meta") if isinstance(value, Tensor) else value


class _Sizes:
    """The shape options with their derived defaults."""

    def __init__(self, g: Namespace) -> None:
        self.b, self.s, self.n, self.d, self.v = (
            g.micro_batch_size, g.seq_length, g.num_attention_heads, g.head_dim, g.vocab_size,
        )  # fmt: skip
        self.e = g.v_head_dim or self.d
        self.k = g.kv_length or self.s
        self.g = g.num_query_groups or self.n
        self.h = g.hidden_size or self.n * self.d
        self.f = g.ffn_hidden_size or 4 * self.h
        self.layout = g.layout

    def shape(self, layout: str, length: int, heads: int, head: int | None = None) -> tuple[int, ...]:
        d = head or self.d
        sizes = {"S": length, "B": self.b, "N": heads, "D": d, "H": heads * d, "T": self.b * length}
        unknown = [c for c in layout if c not in sizes]
        if unknown:
            raise HalError(f"--layout {layout}: use the letters of SBH, BSH, SBND, BSND, BNSD, TND")
        return tuple(sizes[c] for c in layout)


Make = Callable[..., Tensor]


def _attention(z: _Sizes, t: Make) -> dict[str, Any]:
    layout = z.layout or "SBH"
    q, k = t(*z.shape(layout, z.s, z.n)), t(*z.shape(layout, z.k, z.g))
    v = t(*z.shape(layout, z.k, z.g, z.e))
    extra: dict[str, Any] = {}
    if layout in ("SBH", "BSH"):
        extra = {"num_heads": z.n, "num_kv_heads": z.g}
    if layout == "TND":
        extra = {f"cu_seqlens_{x}": t(z.b + 1, kind=torch.int32) for x in "qk"}
    return {"q": q, "k": k, "v": v, "layout": layout, **extra}


def _rotary(z: _Sizes, t: Make) -> dict[str, Any]:
    layout = z.layout or "SBND"
    length = z.b * z.s if layout == "TND" else z.s
    angle = t(length, z.d // 2, kind=torch.float32)
    return {"x": t(*z.shape(layout, z.s, z.n)), "cos": angle, "sin": angle, "layout": layout}


def _qk_norm_rotary(z: _Sizes, t: Make) -> dict[str, Any]:
    layout, arguments = z.layout or "SBND", _rotary(z, t)
    q, k = arguments.pop("x"), t(*z.shape(layout, z.s, z.g))
    return {"q": q, "k": k, "q_weight": t(z.d), "k_weight": t(z.d), **arguments}


def _merge_attention(z: _Sizes, t: Make) -> dict[str, Any]:
    single, result, lse = torch.float32, (z.s, z.b, z.n, z.d), (z.b, z.n, z.s)
    return {
        "out": t(*result, kind=single),
        "lse": t(*lse, kind=single),
        "part": t(*result),
        "part_lse": t(*lse, kind=single),
    }


def _adamw(z: _Sizes, t: Make) -> dict[str, Any]:
    lists = {n: [t(z.f, z.h, kind=torch.float32)] for n in ("params", "exp_avgs", "exp_avg_sqs")}
    return {**lists, "grads": [t(z.f, z.h)], "step": 1, "lr": 1e-3}


_EXPERTS, _TOPK = 8, 2
"""Mixtral's experts, and how many of them process a token."""


def _assignments(z: _Sizes, t: Make) -> Tensor:
    return t(z.s * z.b, _TOPK, kind=torch.int64)


_MAKERS: dict[str, Callable[[_Sizes, Make], dict[str, Any]]] = {
    "flash_attention": _attention,
    "rotary": _rotary,
    "adamw": _adamw,
    "scale_mask_softmax": lambda z, t: {"x": t(z.b, z.n, z.s, z.k)},
    "layer_norm": lambda z, t: {"x": t(z.s, z.b, z.h), "weight": t(z.h), "bias": t(z.h)},
    "rms_norm": lambda z, t: {"x": t(z.s, z.b, z.h), "weight": t(z.h)},
    "swiglu": lambda z, t: {"x": t(z.s, z.b, 2 * z.f)},
    "geglu": lambda z, t: {"x": t(z.s, z.b, 2 * z.f)},
    "bias_gelu": lambda z, t: {"x": t(z.s, z.b, z.f), "bias": t(z.f)},
    "bias_dropout_add": lambda z, t: {"x": t(z.s, z.b, z.h), "bias": t(z.h), "residual": t(z.s, z.b, z.h)},
    "linear": lambda z, t: {"x": t(z.s, z.b, z.h), "weight": t(z.h, z.h)},
    "linear_wgrad": lambda z, t: {
        "x": t(z.s, z.b, z.h),
        "dy": t(z.s, z.b, z.h),
        "main_grad": t(z.h, z.h, kind=torch.float32),
    },
    "scaled_linear": lambda z, t: {
        "x": t(z.s, z.b, z.h, kind=torch.float8_e4m3fn),
        "weight": t(z.h, z.h, kind=torch.float8_e4m3fn),
        "x_scale": t(kind=torch.float32),
        "weight_scale": t(kind=torch.float32),
        "dtype": t().dtype,
    },
    "moe_router": lambda z, t: {"logits": t(z.s * z.b, _EXPERTS), "topk": _TOPK},
    "moe_balance_sums": lambda z, t: {"logits": t(z.s * z.b, _EXPERTS), "indices": _assignments(z, t)},
    "moe_drop": lambda z, t: {
        "probs": t(z.s * z.b, _TOPK),
        "indices": _assignments(z, t),
        "num_experts": _EXPERTS,
        "capacity": z.s * z.b * _TOPK // _EXPERTS,
    },
    "permute": lambda z, t: {"x": t(z.s * z.b, z.h), "indices": _assignments(z, t), "num_experts": _EXPERTS},
    "unpermute": lambda z, t: {"rows": t(z.s * z.b * _TOPK, z.h), "row_map": _assignments(z, t)},
    "grouped_linear": lambda z, t: {
        "x": t(z.s * z.b * _TOPK, z.h),
        "weight": t(_EXPERTS, z.f, z.h),
        "group_sizes": t(_EXPERTS, kind=torch.int64),
    },
    "grouped_linear_wgrad": lambda z, t: {
        "x": t(z.s * z.b * _TOPK, z.h),
        "dy": t(z.s * z.b * _TOPK, z.f),
        "group_sizes": t(_EXPERTS, kind=torch.int64),
        "main_grad": t(_EXPERTS, z.f, z.h, kind=torch.float32),
    },
    "grouped_swiglu": lambda z, t: {"x": t(z.s * z.b * _TOPK, 2 * z.f), "probs": t(z.s * z.b * _TOPK)},
    "cross_entropy": lambda z, t: {"logits": t(z.s, z.b, z.v), "target": t(z.s, z.b, kind=torch.int64)},
    "merge_attention": _merge_attention,
    "add_rms_norm": lambda z, t: {"x": t(z.s, z.b, z.h), "residual": t(z.s, z.b, z.h), "weight": t(z.h)},
    "add_layer_norm": lambda z, t: {
        "x": t(z.s, z.b, z.h),
        "residual": t(z.s, z.b, z.h),
        "weight": t(z.h),
        "bias": t(z.h),
    },
    "linear_cross_entropy": lambda z, t: {
        "x": t(z.s, z.b, z.h),
        "weight": t(z.v, z.h),
        "target": t(z.s, z.b, kind=torch.int64),
    },
    "linear_bias_activation": lambda z, t: {
        "x": t(z.s, z.b, z.h),
        "weight": t(2 * z.f, z.h),
        "activation": "swiglu",
    },
    "qk_norm_rotary": _qk_norm_rotary,
    "embedding": lambda z, t: {"weight": t(z.v, z.h), "ids": t(z.s, z.b, kind=torch.int64)},
    "l2norm": lambda z, t: {"tensors": [t(z.f, z.h)]},
    "unscale_and_check": lambda z, t: {"grads": [t(z.f, z.h)], "inv_scale": 2.0**-16},
    "philox_uniform": lambda z, t: {"shape": (z.s, z.b, z.h), "rng": Rng(0)},
    "dropout": lambda z, t: {"x": t(z.s, z.b, z.h), "p": 0.1, "rng": Rng(0)},
}


def _value(op: Op[Any, Any], name: str, text: str, dtype: torch.dtype) -> Any:
    if text == "None":
        return None
    kind = op.schema.parameters[name].kind
    if kind == "tensors":
        return [_tensor(name, part, dtype) for part in text.split(",") if part]
    if kind == "tensor":
        return _tensor(name, text, dtype)
    if kind == "rng":
        numbers = text.split(":")
        if len(numbers) > 2 or not all(n.isdigit() for n in numbers):
            raise HalError(f"--arg {name}={text}: an Rng is SEED or SEED:OFFSET")
        return Rng(int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0)
    if torch.dtype in op.schema.parameters[name].types:
        if text not in DTYPES:
            raise HalError(f"--arg {name}={text}: a dtype is one of {', '.join(DTYPES)}")
        return DTYPES[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _tensor(name: str, text: str, dtype: torch.dtype) -> Tensor:
    match = re.fullmatch(r"((?:\d+x)*\d+)?(?::(\w+))?", text)
    if match is None or (match[2] and match[2] not in DTYPES):
        raise HalError(f"--arg {name}={text}: a tensor is 2x16x64 or 4x4:bool; dtypes: {', '.join(DTYPES)}")
    shape = [int(n) for n in match[1].split("x")] if match[1] else []
    return _meta(shape, DTYPES[match[2]] if match[2] else dtype)


def shown(args: tuple[Any, ...], kwargs: dict[str, Any], op: Op[Any, Any]) -> str:
    """The call in one line, tensors as dtype[shape]."""

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return "[" + ", ".join(map(text, value)) + "]" if isinstance(value, list) else repr(value)

    return f"{op.name}({', '.join([*map(text, args), *(f'{n}={text(v)}' for n, v in kwargs.items())])})"
