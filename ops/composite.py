"""Composite ops: sequences of other ops that a backend may fuse. Where it does not, the other ops run.

The references compute in float32 throughout, whereas a composition rounds what its ops pass to each other to the dtype
of the arguments. Tolerances allow for that. They are given in units of u, half the distance between 1 and the next
number: 2^-8 in bfloat16, 2^-11 in float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hal
from hal import Call, Comm, Op, Sample, TensorSpec, Tol, require

from .activation import GELUS, bias_gelu, geglu, require_bias, require_even, require_gelu, swiglu
from .linear import linear
from .norm import layer_norm, require_weight, rms_norm
from .residual import bias_dropout_add
from .rotary import LAYOUTS, require_angles, rotary
from .vocab import cross_entropy, require_ids

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


# Residual addition and norm.


def _require_sum(op: str, x: Tensor, residual: Tensor) -> None:
    """x and residual [..., h]."""
    require(x.ndim >= 1 and x.shape == residual.shape, op, "x and residual of one shape", (x.shape, residual.shape))
    require(residual.dtype == x.dtype, op, f"residual of x's dtype {x.dtype}", residual.dtype)


def _check_add_rms_norm(call: Call) -> None:
    _require_sum("add_rms_norm", call.x, call.residual)
    require_weight("add_rms_norm", call.x, "weight", call.weight, call.eps)


def _check_add_layer_norm(call: Call) -> None:
    _require_sum("add_layer_norm", call.x, call.residual)
    require_weight("add_layer_norm", call.x, "weight", call.weight, call.eps)
    require_weight("add_layer_norm", call.x, "bias", call.bias, call.eps)


_TOL_ADD_NORM = {
    torch.float32: Tol(1e-5, 1e-5),  # as the norms: mean and square root, relative to values up to ~5
    # 2u relative: the sum and the result are rounded. A layer norm's bias may cancel a normalised value of up to ~8,
    # whose error is then u * 8 absolute. Both parts of dx are rounded before they are added.
    torch.bfloat16: Tol(3.2e-2, 1.6e-2),
    torch.float16: Tol(4e-3, 2e-3),
}


def _edge_cases_add_norm(weights: int) -> list[Sample]:
    def call(*shape: int, grad: bool = True, weight_dtype: torch.dtype | None = None, **kw: Any) -> Sample:
        x = TensorSpec(shape, **kw)
        return Sample((x, x, *[TensorSpec(shape[-1:], dtype=weight_dtype)] * weights), grad=grad)

    last, rows = TensorSpec((5, 33), strided="last"), TensorSpec((5, 33), strided="rows")
    return [
        call(4, 8),
        call(8),
        call(0, 8),
        call(2, 3, 129),
        Sample((last, rows, *[TensorSpec((33,))] * weights)),
        call(3, 64, weight_dtype=torch.float32),
        call(3, 40, scale=1e3),
        call(2, 8, scale=0.0),  # constant rows: the variance is 0 and eps decides
        Sample((TensorSpec((4, 16)), TensorSpec((4, 16)), *[TensorSpec((16,))] * weights), {"eps": 1e-3}),
        call(300, 12),  # many rows: the weight gradient is a long sum
        call(1, 4, dist="values", values=(1.0, float("nan"), 2.0, 3.0), grad=False),
        call(1, 4, dist="values", values=(1.0, float("inf"), 2.0, 3.0), grad=False),
    ]


def _samples_add_norm(weights: int) -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    strided = st.sampled_from(["", "rows", "last"])
    return st.builds(
        lambda lead, width, how, other, eps: Sample(
            (
                TensorSpec((*lead, width), strided=how),
                TensorSpec((*lead, width), strided=other),
                *[TensorSpec((width,))] * weights,
            ),
            {"eps": eps},
        ),
        st.lists(st.integers(1, 12), max_size=2),
        st.integers(4, 150),  # with fewer columns the gradient is often rounding error only
        strided,
        strided,
        st.sampled_from([1e-5, 1e-6, 1e-3]),
    )


def _compose_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """x and residual [..., h], weight [h]."""
    total = bias_dropout_add(x, None, residual)
    return rms_norm(total, weight, eps), total


@hal.op(
    check=_check_add_rms_norm,
    tol=_TOL_ADD_NORM,
    samples=lambda: _samples_add_norm(1),
    edge_cases=lambda: _edge_cases_add_norm(1),
    grads=("x", "residual", "weight"),
    decompose=_compose_add_rms_norm,
    parts=(bias_dropout_add, rms_norm),
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum, weight, eps), sum) of sum = x + residual. x, residual [..., h] of one dtype, weight [h].

    Both results are like x and have gradients. The norm may be of the sum before or after it is rounded to x's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    total = x.to(acc) + residual.to(acc)
    return rms_norm.reference(total, weight, eps).to(x.dtype), total.to(x.dtype)


def _compose_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """x and residual [..., h], weight and bias [h]."""
    total = bias_dropout_add(x, None, residual)
    return layer_norm(total, weight, bias, eps), total


@hal.op(
    check=_check_add_layer_norm,
    tol=_TOL_ADD_NORM,
    samples=lambda: _samples_add_norm(2),
    edge_cases=lambda: _edge_cases_add_norm(2),
    grads=("x", "residual", "weight", "bias"),
    decompose=_compose_add_layer_norm,
    parts=(bias_dropout_add, layer_norm),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(sum, weight, bias, eps), sum) of sum = x + residual. x, residual [..., h] of one dtype; weight, bias
    [h].

    Both results are like x and have gradients. The norm may be of the sum before or after it is rounded to x's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    total = x.to(acc) + residual.to(acc)
    return layer_norm.reference(total, weight, bias, eps).to(x.dtype), total.to(x.dtype)


# The output layer and its loss.


def _require_product(op: str, x: Tensor, weight: Tensor) -> None:
    """x [..., in], weight [out, in]."""
    require(weight.ndim == 2, op, "weight of shape [out, in]", tuple(weight.shape))
    require(x.ndim >= 1 and x.shape[-1] == weight.shape[1], op, f"x of shape [..., {weight.shape[1]}]", tuple(x.shape))
    require(x.dtype == weight.dtype, op, f"x of weight's dtype {weight.dtype}", x.dtype)


def _check_linear_cross_entropy(call: Call) -> None:
    op, x, weight, target = "linear_cross_entropy", call.x, call.weight, call.target
    _require_product(op, x, weight)
    require(x.is_floating_point(), op, "a floating-point x", x.dtype)
    require(weight.shape[0] > 0, op, "weight of shape [v, h], v > 0", tuple(weight.shape))
    require(target.shape == x.shape[:-1], op, f"target of shape {tuple(x.shape[:-1])}", tuple(target.shape))
    require(0.0 <= call.label_smoothing < 1.0, op, "label_smoothing in [0, 1)", call.label_smoothing)
    smooth = call.label_smoothing == 0.0 or weight.shape[0] > 1
    require(smooth, op, "at least two classes to smooth over", weight.shape[0])
    require_ids(op, "target", target, call.vocab_start, call.comm)


def _loss_call(
    lead: tuple[int, ...], h: int, v: int, smoothing: float = 0.0, *, grad: bool = True, **how: Any
) -> Sample:
    """Logits of order 1, which weights with a standard deviation of h^-0.5 give."""
    x, weight = TensorSpec((*lead, h), **how), TensorSpec((v, h), scale=max(1, h) ** -0.5)
    target = TensorSpec(lead, "int", high=v, dtype=torch.int64)
    return Sample((x, weight, target), {"label_smoothing": smoothing}, grad)


def _edge_cases_linear_cross_entropy() -> list[Sample]:
    target = TensorSpec((6,), "int", high=13, dtype=torch.int64)
    rows, last = (TensorSpec((6, 8), strided=how) for how in ("rows", "last"))
    float32: dict[str, Any] = {"dtype": torch.float32}
    return [
        _loss_call((4,), 6, 11),
        _loss_call((2, 3), 8, 17, 0.1),
        _loss_call((1,), 4, 1),
        _loss_call((0,), 6, 7),
        _loss_call((), 9, 8),
        _loss_call((3,), 0, 5),
        _loss_call((300,), 8, 37, 0.1),  # more rows than a tile of a product or a block of a grid takes
        _loss_call((3,), 4, 8209),  # more classes than a tile of the logits takes, a prime number
        _loss_call((3,), 4, 8209, 0.3),
        Sample((rows, TensorSpec((13, 8), scale=0.3, strided="rows"), target)),
        Sample((last, TensorSpec((13, 8), scale=0.3, strided="last"), target), {"label_smoothing": 0.3}),
        # exp of these logits overflows. In float32 only, because rounding them to 16 bits would change them by 1.
        Sample((TensorSpec((6, 8), scale=300.0, **float32), TensorSpec((13, 8), **float32), target)),
        _loss_call((1,), 4, 3, dist="values", values=(float("nan"), 1.0, 2.0, 0.5), grad=False),
    ]


def _samples_linear_cross_entropy() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda lead, h, v, smoothing, strided: _loss_call(tuple(lead), h, v, smoothing, strided=strided),
        st.lists(st.integers(1, 6), max_size=2),
        st.integers(1, 40),
        st.integers(2, 200),
        st.sampled_from([0.0, 0.1]),
        st.sampled_from(["", "rows", "last"]),
    )


def _compose_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    vocab_start: int = 0,
    comm: Comm | None = None,
) -> Tensor:
    """x [..., h], weight [v_local, h], target [...] -> the loss [...]."""
    return cross_entropy(
        linear(x, weight),
        target,
        label_smoothing=label_smoothing,
        vocab_start=vocab_start,
        comm=comm,
        inplace_backward=True,
    )


@hal.op(
    check=_check_linear_cross_entropy,
    tol={
        torch.float32: Tol(2e-5, 1e-5),  # the product's sums of up to 40 terms, then log-sum-exp
        # Logits of up to ~5 are rounded: u * 5 for the target's and as much for log-sum-exp. Probabilities, and with
        # them the gradients, change by the same relative amount.
        torch.bfloat16: Tol(4e-2, 1.6e-2),
        torch.float16: Tol(5e-3, 2e-3),
    },
    samples=_samples_linear_cross_entropy,
    edge_cases=_edge_cases_linear_cross_entropy,
    grads=("x", "weight"),
    decompose=_compose_linear_cross_entropy,
    parts=(linear, cross_entropy),
)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    vocab_start: int = 0,
    comm: Comm | None = None,
) -> Tensor:
    """cross_entropy of the logits x weight^T per token, float32 [...], without keeping the logits where a backend can.

    x [..., h], weight [v_local, h], target [...] int64 (global ids). With `comm`, the weight's rows (the vocabulary)
    are sharded over its ranks; every rank passes the same x and gets the full loss. As with `linear` and a shard of the
    weight's rows, the gradient of x is then this rank's partial sum, which `mappings.copy_to_region` adds to the other
    ranks'. label_smoothing is that of `cross_entropy`. A second backward pass through one call may be refused, because
    a composition writes the gradient of the logits over them (`inplace_backward`).
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    logits = linear.reference(x.to(acc), weight.to(acc))
    return cross_entropy.reference(logits, target, label_smoothing=label_smoothing, vocab_start=vocab_start, comm=comm)


# A linear layer and its activation.

_ACTIVATIONS: dict[str, Op[Any, Tensor]] = {"gelu": bias_gelu, "swiglu": swiglu, "geglu": geglu}


def _check_linear_bias_activation(call: Call) -> None:
    op, weight = "linear_bias_activation", call.weight
    _require_product(op, call.x, weight)
    names = ", ".join(_ACTIVATIONS)
    require(call.activation in _ACTIVATIONS, op, f"activation among {names}", repr(call.activation))
    require_gelu(op, call.approximate)
    rows = weight[:, 0] if weight.shape[1] else weight.new_empty(weight.shape[0])
    require_bias(op, rows, call.bias)
    if call.activation != "gelu":
        require_even(op, rows)


def _activation_call(
    lead: tuple[int, ...], n_in: int, n_out: int, bias: bool, activation: str, approximate: str = "tanh", how: str = ""
) -> Sample:
    """Pre-activations of order 1, which weights with a standard deviation of n_in^-0.5 give."""
    weight = TensorSpec((n_out, n_in), scale=max(1, n_in) ** -0.5, strided=how)
    args = (TensorSpec((*lead, n_in), strided=how), weight, TensorSpec((n_out,), scale=0.5) if bias else None)
    return Sample(args, {"activation": activation, "approximate": approximate})


def _edge_cases_linear_bias_activation() -> list[Sample]:
    return [
        *(_activation_call((3,), 4, 6, True, activation) for activation in _ACTIVATIONS),
        *(_activation_call((2, 3), 17, 10, False, activation) for activation in _ACTIVATIONS),
        *(_activation_call((5,), 6, 8, True, "gelu", approximate) for approximate in GELUS),
        *(_activation_call((5,), 6, 8, True, "geglu", approximate) for approximate in GELUS),
        _activation_call((), 4, 6, True, "swiglu"),
        _activation_call((0,), 4, 6, True, "swiglu"),
        _activation_call((3,), 0, 6, True, "gelu"),
        _activation_call((6,), 8, 4, True, "geglu", how="rows"),
        _activation_call((6,), 8, 4, True, "swiglu", how="last"),
        _activation_call((5,), 16, 24, True, "gelu"),  # rows of 16 bytes
        _activation_call((130,), 65, 34, True, "swiglu"),
    ]


def _samples_linear_bias_activation() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda lead, n_in, half, bias, activation, approximate: _activation_call(
            tuple(lead), n_in, 2 * half, bias, activation, approximate
        ),
        st.lists(st.integers(1, 12), max_size=2),
        st.integers(1, 40) | st.sampled_from((16, 32)),  # rows of a multiple of 16 bytes, too
        st.integers(1, 20) | st.sampled_from((4, 12)),
        st.booleans(),
        st.sampled_from(list(_ACTIVATIONS)),
        st.sampled_from(GELUS),
    )


def _activate(
    activation: str, x: Tensor, bias: Tensor | None, approximate: str
) -> tuple[Op[Any, Tensor], tuple[Any, ...]]:
    """The op of an activation and its arguments."""
    return _ACTIVATIONS[activation], (x, bias) if activation == "swiglu" else (x, bias, approximate)


def _compose_linear_bias_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str, approximate: str = "tanh"
) -> Tensor:
    """x [..., in], weight [out, in], bias [out]."""
    op, arguments = _activate(activation, linear(x, weight), bias, approximate)
    return op(*arguments)


def _parts_of_linear_bias_activation(call: Call) -> Sequence[Op[Any, Any]]:
    return linear, _ACTIVATIONS[call.activation]


@hal.op(
    check=_check_linear_bias_activation,
    tol={
        torch.float32: Tol(1e-5, 1e-5),  # the product's sums of up to 65 terms, through a slope of about 1
        # The product is rounded, then the result: 3u relative where both halves of a gated activation are, and
        # u * 8 absolute where the bias cancels a product of up to ~4, times the other half of up to ~2, which occurs
        # among the millions of elements of production sizes. The bias gradient sums rounded rows.
        torch.bfloat16: Tol(3.2e-2, 1.6e-2),
        torch.float16: Tol(4e-3, 2e-3),
    },
    samples=_samples_linear_bias_activation,
    edge_cases=_edge_cases_linear_bias_activation,
    grads=("x", "weight", "bias"),
    decompose=_compose_linear_bias_activation,
    parts=(linear, *_ACTIVATIONS.values()),
    parts_of=_parts_of_linear_bias_activation,
)
def linear_bias_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str, approximate: str = "tanh"
) -> Tensor:
    """The first layer of an MLP: activation(x weight^T + bias) in x's dtype. x [..., in], weight [out, in], bias [out].

    activation: "gelu" (the result is [..., out]), or "swiglu" or "geglu", which gate the second half of the out
    channels by the first (the result is [..., out / 2]). approximate: the form of gelu, as in `bias_gelu`.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    product = linear.reference(x.to(acc), weight.to(acc))
    op, arguments = _activate(activation, product, bias, approximate)
    return op.reference(*arguments).to(x.dtype)


# Norm of each head, then rotary positions.


def _check_qk_norm_rotary(call: Call) -> None:
    op = "qk_norm_rotary"
    for name in ("q", "k"):
        x, weight = getattr(call, name), getattr(call, f"{name}_weight")
        require_angles(op, name, x, call.cos, call.sin, call.layout)
        require_weight(op, x, f"{name}_weight", weight, call.eps)
    require(call.q.dtype == call.k.dtype, op, f"k of q's dtype {call.q.dtype}", call.k.dtype)


def _heads_call(
    layout: str, sizes: tuple[int, int, int, int], heads: tuple[int, int], strided: str = "", per_sample: bool = False,
    weight_dtype: torch.dtype | None = None, **kw: Any,
) -> Sample:  # fmt: skip
    """sizes: tokens, batch, head size, half the rotated channels. heads: of q and of k."""
    s, b, d, half = sizes
    angle = TensorSpec((b, s, half) if per_sample else (s, half), scale=0.5, dtype=torch.float32)
    q, k = (
        TensorSpec(tuple({"S": s, "B": b, "N": n, "D": d, "T": s}[c] for c in layout), strided=strided) for n in heads
    )
    weight = TensorSpec((d,), scale=0.5, dtype=weight_dtype)
    return Sample((q, k, weight, weight, angle, angle), {"layout": layout, **kw})


def _edge_cases_qk_norm_rotary() -> list[Sample]:
    return [
        _heads_call("SBND", (2, 1, 8, 4), (3, 1)),
        *(_heads_call(layout, (5, 2, 8, 4), (4, 2), interleaved=i) for layout in LAYOUTS for i in (False, True)),
        *(_heads_call(layout, (5, 2, 8, 4), (2, 1), per_sample=True) for layout in LAYOUTS[:-1]),
        _heads_call("SBND", (3, 2, 10, 3), (2, 2)),  # only the first 6 channels are rotated
        _heads_call("BNSD", (4, 1, 8, 3), (2, 1), "last", eps=1e-3),
        _heads_call("SBND", (4, 2, 64, 32), (2, 1), "rows"),
        _heads_call("BSND", (3, 1, 16, 8), (2, 1), weight_dtype=torch.float32),
        _heads_call("TND", (0, 1, 8, 4), (2, 1)),
        _heads_call("SBND", (3, 2, 8, 0), (1, 1)),
        _heads_call("TND", (130, 1, 8, 4), (3, 1)),  # the weights' gradients are long sums
    ]


def _samples_qk_norm_rotary() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        s, b, kv, group, half = (draw(st.integers(1, m)) for m in (9, 3, 3, 3, 20))
        layout = draw(st.sampled_from(LAYOUTS))
        d = max(4, 2 * half + draw(st.integers(0, 5)))  # with fewer channels the gradient is often rounding error only
        return _heads_call(
            layout,
            (s, b, d, half),
            (kv * group, kv),
            draw(st.sampled_from(["", "rows", "last"])),
            layout != "TND" and draw(st.booleans()),
            interleaved=draw(st.booleans()),
        )

    return call()


def _compose_qk_norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "SBND",
    interleaved: bool = False,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """q and k in `layout`, q_weight and k_weight [d], cos and sin as in `rotary`."""
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return (
        rotary(q, cos, sin, layout=layout, interleaved=interleaved),
        rotary(k, cos, sin, layout=layout, interleaved=interleaved),
    )


@hal.op(
    check=_check_qk_norm_rotary,
    tol={
        torch.float32: Tol(1e-5, 1e-5),  # as the norm: mean and square root, relative to values up to ~5
        # The normalised values, up to ~5, are rounded. Rotation adds two of them, times up to ~1, which may cancel.
        torch.bfloat16: Tol(4e-2, 1.6e-2),
        torch.float16: Tol(5e-3, 2e-3),
    },
    samples=_samples_qk_norm_rotary,
    edge_cases=_edge_cases_qk_norm_rotary,
    grads=("q", "k", "q_weight", "k_weight"),
    decompose=_compose_qk_norm_rotary,
    parts=(rms_norm, rotary),
)
def qk_norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "SBND",
    interleaved: bool = False,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(q, k), each head divided by its root mean square (rms_norm over the head size), then rotated by `rotary`.

    q: SBND [s, b, n, d], BSND, BNSD or TND [t, n, d]; k has the same layout and may have another number of heads.
    q_weight, k_weight [d]; cos, sin and interleaved as in `rotary`, without a gradient. The results are like q and k.

    Source: Henry et al., "Query-key normalization for transformers", arXiv 2010.04245, with the norm that Qwen3 uses.
    """
    acc = torch.promote_types(q.dtype, torch.float32)
    q_normed = rms_norm.reference(q.to(acc), q_weight, eps)
    k_normed = rms_norm.reference(k.to(acc), k_weight, eps)
    return (
        rotary.reference(q_normed, cos, sin, layout=layout, interleaved=interleaved).to(q.dtype),
        rotary.reference(k_normed, cos, sin, layout=layout, interleaved=interleaved).to(k.dtype),
    )
