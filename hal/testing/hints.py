"""What a wrong result resembles: where its wrong elements are, by which factor they are off, and known mistakes.

Hints are added to the message of a failure. They are observations about one call, not proofs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hal.core.dispatch import activated
from hal.core.op import Op, Sample

from .calls import build, run, to_double
from .comparison import Expected
from .reference import Reference

Arguments = dict[str, Any]


def as_text(observations: Iterable[str]) -> str:
    """The hints as the end of a message, "" if there are none."""
    text = "; ".join(observations)
    return f". Hint: {text}" if text else ""


def pattern(wrong: Tensor, y: Tensor, exact: Tensor) -> Iterator[str]:
    """Where elements are wrong, by dimension, and the factor if there is one. wrong: bool, of the result's shape."""
    if wrong.ndim == 0 or not wrong.any():
        return
    for dim in range(wrong.ndim):
        size = wrong.shape[dim]
        where = wrong.any(tuple(d for d in range(wrong.ndim) if d != dim)).nonzero().flatten().tolist()
        if len(where) == size or size < 4:
            continue
        first, last = where[0], where[-1]
        if where == list(range(first, size)):
            yield f"all wrong elements have an index of at least {first} in dimension {dim} (of size {size})"
        elif len(where) <= 4:
            yield f"all wrong elements have index {', '.join(map(str, where))} in dimension {dim} (of size {size})"
        elif where == list(range(first, last + 1)):
            yield f"all wrong elements have an index of {first} to {last} in dimension {dim} (of size {size})"
    got, right = y.detach().cpu().double()[wrong], exact.detach()[wrong]
    ratio = got / right
    middle = float(ratio.median())
    if len(ratio) >= 4 and bool(((ratio - middle).abs() <= 0.02 * abs(middle)).all()) and abs(middle - 1.0) > 0.02:
        yield f"wrong elements are {middle:.4g} times what they should be" if middle else "wrong elements are 0"


def mistakes(op: Op[Any, Any], sample: Sample, dtype: torch.dtype, name: str, y: Tensor) -> Iterator[str]:
    """The known mistakes after which the reference gives the wrong result y of the output `name`."""

    def result(arguments: Arguments) -> Tensor:
        with activated(Reference()):
            return run(op, op.reference, to_double(arguments), False).outputs[name]

    def equals(other: Tensor) -> bool:
        expected = Expected(other, other.to(y.dtype), op.tol[dtype], dtype)
        return other.shape == y.shape and expected.measure(y).tolerances <= 1.0

    for text, change in _MISTAKES.get(op.name, {}).items():
        changed = change(build(op, sample, dtype))
        if changed is not None and equals(result(changed)):
            yield f"the result is that of {text}"
    arguments = build(op, sample, dtype)
    p = arguments.get("p") or arguments.get("dropout_p")
    if p and equals(result(arguments) * (1.0 - p)):
        yield "the result is that of a call that does not divide by 1 - p"


Change = Callable[[Arguments], Arguments | None]
"""Changes a call as a mistake would; None if the mistake would make no difference."""


def _set(**values: Any) -> Change:
    """Other values of parameters, if the call has not these already."""

    def change(arguments: Arguments) -> Arguments | None:
        differs = any(
            arguments[n] is not v if isinstance(arguments[n], Tensor) else arguments[n] != v for n, v in values.items()
        )
        return {**arguments, **values} if differs else None

    return change


def _shift(name: str, by: int) -> Change:
    return lambda a: None if a[name] is None else {**a, name: a[name] + by}


def _tensor(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    return lambda a: None if a[name] is None else {**a, name: function(a[name])}


def _halves_exchanged(a: Arguments) -> Arguments:
    """The gated half of x, and of the bias, in the place of the other."""
    exchanged = {n: torch.cat(a[n].chunk(2, dim=-1)[::-1], dim=-1) for n in ("x", "bias") if a[n] is not None}
    return {**a, **exchanged}


def _kv_heads_interleaved(a: Arguments) -> Arguments | None:
    """Query head h with key/value head h modulo their number, instead of h // group."""
    if a["layout"] not in ("BNSD", "BSND", "SBND"):
        return None
    dim = a["layout"].index("N")
    heads, kv_heads = a["q"].shape[dim], a["k"].shape[dim]
    if kv_heads in (1, heads):
        return None
    order = torch.arange(heads) % kv_heads
    return {**a, "k": a["k"].index_select(dim, order), "v": a["v"].index_select(dim, order), "num_kv_heads": None}


def _from_the_first_key(a: Arguments) -> Arguments | None:
    """A window that is aligned with the first query and key instead of the last ones."""
    if a["layout"] == "TND" or (a["pre_tokens"] is None and a["next_tokens"] is None):
        return None
    dim = a["layout"].index("S")
    offset = a["k"].shape[dim] - a["q"].shape[dim]
    moved = {"pre_tokens": 1, "next_tokens": -1}
    shifted = {n: None if a[n] is None else a[n] + sign * offset for n, sign in moved.items()}
    return {**a, **shifted} if offset else None


_MISTAKES: Mapping[str, Mapping[str, Change]] = {
    "flash_attention": {
        "a window that is one key too wide to the right": _shift("next_tokens", 1),
        "a window that is one key too narrow to the right": _shift("next_tokens", -1),
        "a window that is one key too wide to the left": _shift("pre_tokens", 1),
        "a window that is one key too narrow to the left": _shift("pre_tokens", -1),
        "a window that is aligned with the first query and key": _from_the_first_key,
        "pre_tokens and next_tokens exchanged": lambda a: (
            None
            if a["pre_tokens"] == a["next_tokens"]
            else {**a, "pre_tokens": a["next_tokens"], "next_tokens": a["pre_tokens"]}
        ),
        "query head h with key/value head h modulo their number": _kv_heads_interleaved,
        "scale=1": _set(scale=1.0),
        "an inverted mask": _tensor("mask", torch.logical_not),
        "a call without the mask": _set(mask=None),
        "a call without dropout": _set(dropout_p=0.0, rng=None),
        "a call without the softcap": _set(softcap=None),
        "ALiBi with the signs of the slopes changed": _tensor("alibi_slopes", torch.neg),
        "a call without ALiBi": _set(alibi_slopes=None),
        "a call without the bias": _set(bias=None),
        "a call without the sinks": _set(sinks=None),
        "a window that is aligned with the last query and key": _set(top_left=False),
    },
    "merge_attention": {
        "the shares of the other result": lambda a: {**a, "lse": a["part_lse"], "part_lse": a["lse"]},
        "equal shares": lambda a: {**a, "lse": a["part_lse"]},
    },
    "scale_mask_softmax": {
        "scale=1": _set(scale=1.0),
        "an inverted mask": _tensor("mask", torch.logical_not),
        "a call without the mask": _set(mask=None),
        "a call that is not causal": _set(causal=False),
    },
    "swiglu": {
        "exchanged halves": _halves_exchanged,
        "a call without the bias": _set(bias=None),
    },
    "geglu": {
        "exchanged halves": _halves_exchanged,
        "a call without the bias": _set(bias=None),
        "approximate='none'": _set(approximate="none"),
        "approximate='tanh'": _set(approximate="tanh"),
    },
    "bias_gelu": {
        "a call without the bias": _set(bias=None),
        "approximate='none'": _set(approximate="none"),
        "approximate='tanh'": _set(approximate="tanh"),
    },
    "rotary": {
        "a rotation in the other direction": _tensor("sin", torch.neg),
        "the other pairing of channels": lambda a: {**a, "interleaved": not a["interleaved"]},
    },
    "rms_norm": {"eps=0": _set(eps=0.0)},
    "layer_norm": {
        "eps=0": _set(eps=0.0),
        "a call without the bias": _tensor("bias", torch.zeros_like),
    },
    "linear": {"a call without the bias": _set(bias=None)},
    "dropout": {"a call without dropout": _set(p=0.0, rng=None)},
    "bias_dropout_add": {
        "a call without dropout": _set(p=0.0, rng=None),
        "a call without the bias": _set(bias=None),
        "a call without the residual": _tensor("residual", torch.zeros_like),
    },
    "cross_entropy": {"label_smoothing=0": _set(label_smoothing=0.0)},
    "add_rms_norm": {"a call without the residual": _tensor("residual", torch.zeros_like)},
    "add_layer_norm": {"a call without the residual": _tensor("residual", torch.zeros_like)},
    "linear_cross_entropy": {"label_smoothing=0": _set(label_smoothing=0.0)},
    "linear_bias_activation": {"a call without the bias": _set(bias=None)},
    "qk_norm_rotary": {
        "q_weight in the place of k_weight": lambda a: {**a, "k_weight": a["q_weight"]},
        "a rotation in the other direction": _tensor("sin", torch.neg),
        "the other pairing of channels": lambda a: {**a, "interleaved": not a["interleaved"]},
    },
    "adamw": {
        "step - 1": lambda a: {**a, "step": a["step"] - 1} if a["step"] > 1 else None,
        "weight_decay=0": _set(weight_decay=0.0),
        "grad_scale=1": _set(grad_scale=1.0),
    },
}
