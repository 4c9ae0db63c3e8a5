"""grouped_linear (npu_grouped_matmul), grouped_linear_wgrad (npu_grouped_matmul_add_), grouped_swiglu (npu_swiglu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops

from .composed import ID
from .constraints import CONSTRAINTS
from .device import Npu
from .tensors import reasons, refuses


def _limits(x: Tensor, sizes: Sequence[int], groups: int) -> list[str]:
    refusals = CONSTRAINTS["grouped.groups"].refusal("groups", groups)
    refusals += CONSTRAINTS["grouped.last_size"].refusal("channels", max(sizes))
    if not (len(x) and min(sizes) and groups):
        refusals.append("an empty product (npu_grouped_matmul needs an element)")
    return refusals


def _why_not_linear(call: Call) -> Sequence[str]:
    experts, n_out, n_in = call.weight.shape
    return reasons(call.x) + _limits(call.x, (n_out, n_in), experts)


def _ends(group_sizes: Tensor, rows: int) -> Tensor:
    """Cumulative sizes, as the operators take them. The last must be `rows`, so rows after the last group join it."""
    ends = group_sizes.cumsum(0)
    ends[-1:] = rows
    return ends


def _multiply(x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    """group_type 0: rows of x [n, k] times weight [e, k, m], [n, m]; 2: x [m, n] times weight [n, k], [e, m, k]."""
    y: Tensor = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=group_type, group_list_type=0
    )[0]
    return y


def _linear_bwd(residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """dx [n, in] and dweight [e, out, in] from dy [n, out], as far as `needs` requires them."""
    x, weight, ends = residuals
    dy = dy.contiguous()
    dx = _multiply(dy, weight, ends, 0) if needs[0] else None
    return dx, _multiply(dy.t(), x, ends, 2) if needs[1] else None


@Npu.impl(ops.grouped_linear, id="npu/grouped_matmul", why_not=_why_not_linear, bwd=_linear_bwd)
def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    x, weight, ends = x.contiguous(), weight.contiguous(), _ends(group_sizes, len(x))
    return _multiply(x, weight.transpose(1, 2), ends, 0), (x, weight, ends)


def _why_not_wgrad(call: Call) -> Sequence[str]:
    experts, n_out, n_in = call.main_grad.shape
    refusals = reasons(call.x) + _limits(call.x, (n_out, n_in), experts)
    if call.x.dtype == torch.float32:
        refusals.append("dtype float32 (npu_grouped_matmul_add_ multiplies float16 and bfloat16)")
    if not call.main_grad.is_contiguous():
        refusals.append("a main_grad that is not contiguous (it is updated in place)")
    return refusals


@Npu.impl(ops.grouped_linear_wgrad, id="npu/grouped_matmul_add", why_not=_why_not_wgrad)
def grouped_linear_wgrad(x: Tensor, dy: Tensor, group_sizes: Tensor, main_grad: Tensor) -> None:
    torch.ops.npu.npu_grouped_matmul_add_(
        main_grad.detach().view(-1, main_grad.shape[2]),
        dy.detach().contiguous(),
        x.detach().contiguous(),
        _ends(group_sizes, len(x)),
        transpose_x=True,
        transpose_weight=False,
        group_type=2,
    )


def _swiglu_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx [n, 2h] and dprobs [n] from dy [n, h]."""
    x, probs = residuals
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(probs)
    inner, grad = x.float(), dy.float()
    dprobs = (torch.ops.npu.npu_swiglu(inner, -1) * grad).sum(-1)
    dx = torch.ops.npu.npu_swiglu_backward(grad * probs.float()[:, None], inner, -1)
    return dx.to(x.dtype), dprobs.to(probs.dtype)


@Npu.impl(ops.grouped_swiglu, id="npu/swiglu", why_not=refuses(ops.grouped_swiglu), bwd=_swiglu_bwd)
def grouped_swiglu(x: Tensor, probs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = x.contiguous()
    if not x.numel():
        return x.new_empty(len(x), x.shape[1] // 2), (x, probs)
    # In float32, so that the result is rounded once.
    return (torch.ops.npu.npu_swiglu(x.float(), -1) * probs.float()[:, None]).to(x.dtype), (x, probs)


Npu.impl(ops.grouped_linear, id=ID, why_not=refuses(ops.grouped_linear))(ops.grouped_linear.reference)
Npu.impl(ops.grouped_linear_wgrad, id=ID, why_not=refuses(ops.grouped_linear_wgrad, "x", "dy", "main_grad"))(
    ops.grouped_linear_wgrad.reference
)
