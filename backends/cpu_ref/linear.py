"""linear: float32 products by oneDNN where torch.mm would use MKL's slow path, and torch's products otherwise.

MKL uses its AVX-512 kernels on Intel's processors only; on others torch.mm runs float32 at half the speed of oneDNN.
torch ships oneDNN and exposes it through the operator that its compiler uses for fused layers. For the gradient of the
weight that operator would copy its operands, so it is a kernel of this backend (kernels/linear_kind.h). With few
outputs oneDNN is slower than torch.mm; these products, and those of few inputs, are kernels as well
(kernels/linear_narrow.h). Accuracy is the same (float32 products and sums). torch.mm already uses oneDNN for 16-bit
products; but torch's linear adds a bias to the rounded product in a second pass, whereas the operator adds it before
rounding, at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hal import Call, HalError, address, ops

from . import cpu
from .build import lib
from .device import CpuRef
from .memory import empty
from .tensors import CODE, reasons, refuses

_SMALL = 1 << 22
"""Below this many multiplications both take the same time, and the call of torch.mm is cheaper."""

_FEW = 32
"""Up to this many outputs the kernel takes 0.4 to 1.0 of oneDNN's time, up to this many inputs 0.6 to 1.0."""


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """oneDNN's x w^T + b, if torch has it and MKL is slow on this processor."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return None
    if cpu.vendor() == "GenuineIntel" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    operator: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return operator


def _onednn_for(x: Tensor, w: Tensor) -> Callable[..., Tensor] | None:
    """_onednn() if the product of x [..., k] and w [n, k] is large enough for it, else None."""
    large = x.dtype == torch.float32 and x.numel() * w.shape[0] >= _SMALL
    return _onednn() if large else None


@cache
def _onednn_bf16() -> Callable[..., Tensor] | None:
    """The same for bfloat16, if torch has it and this processor supports it."""
    operators = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(operators, "_is_mkldnn_bf16_supported")):
        return None
    usable = hasattr(operators, "_linear_pointwise") and operators._is_mkldnn_bf16_supported()
    return operators._linear_pointwise.default if usable else None


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times the transpose of w [n, k], plus bias [n]."""
    if x.dtype == torch.float16:
        return product(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)
    biased_bf16 = bias is not None and x.dtype == torch.bfloat16 and bias.dtype == x.dtype and x.numel() > 0
    onednn = _onednn_bf16() if biased_bf16 else _onednn_for(x, w)
    if onednn is None:
        if x.ndim > 2 and not x.is_contiguous():  # torch might run one product per matrix and add the bias afterwards
            return torch.nn.functional.linear(_rows(x), w, bias).view(*x.shape[:-1], w.shape[0])
        return torch.nn.functional.linear(x, w, bias)
    if x.dtype == torch.float32 and _is_narrow(x, w) and fast(x.dtype):
        return _narrow(_rows(x), w, bias).view(*x.shape[:-1], w.shape[0])
    # The operator ignores the stride of the bias.
    return onednn(_dense(x), _dense(w), None if bias is None else bias.contiguous(), "none", [], "")


def _is_narrow(x: Tensor, w: Tensor) -> bool:
    """Whether w [n, k] has few inputs or outputs and x [..., k] enough rows. The kernel packs w, which takes as long as
    multiplying some hundred rows, and oneDNN has a product for a single output."""
    return min(w.shape) <= _FEW and w.shape[0] > 1 and x.numel() >= 512 * w.shape[1]


def _narrow(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """kernels/linear_narrow.h: x [rows, k] times the transpose of w [n, k], plus bias [n], all float32."""
    x = x if x.stride(1) == 1 else x.contiguous()
    y = empty((x.shape[0], w.shape[0]), torch.float32)
    bias = None if bias is None else bias.contiguous()
    at = [t.data_ptr() or address(t) for t in (x, w, y)]
    shape = (*x.shape, w.shape[0])
    if not lib().hal_linear_narrow(at[0], x.stride(0), at[1], *w.stride(), address(bias), at[2], *shape):
        raise HalError(f"linear's kernel for few inputs or outputs does not multiply a weight of {tuple(w.shape)}")
    return y


def product_to(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out [rows, n] = x [rows, k] times the transpose of w [n, k]: without a copy where torch's own product is used."""
    if x.dtype == torch.float16 or _onednn_for(x, w) is not None:
        out.copy_(product(x, w))
    else:
        torch.mm(x, w.t(), out=out)


def _dense(x: Tensor) -> Tensor:
    """x, copied if neither its rows nor its columns are contiguous, for which oneDNN has only a scalar loop."""
    return x if 1 in x.stride() else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """x [..., k] as [rows, k]."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _backward(
    residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx [..., k], dw [n, k] and db [n] from dy [..., n], as far as `needs` requires them."""
    x, weight = residuals
    dy_rows, x_rows = _rows(dy), _rows(x)
    by_kernel = needs[1] and (_onednn_for(x_rows, weight) is not None or _faster_by_kernel(x_rows)) and fast(x.dtype)
    if by_kernel:
        dy_rows = dy_rows.contiguous()  # before the first product, which would copy it for itself
    dx = product(dy_rows, weight.t()).view(*dy.shape[:-1], weight.shape[1]) if needs[0] else None
    if by_kernel:
        dw, db = _weight_gradient(dy_rows, x_rows.contiguous(), needs[2])
    else:
        dw = product(dy_rows.t(), x_rows.t()) if needs[1] else None
        db = dy_rows.sum(0) if needs[2] else None
    return dx, dw, db


def _weight_gradient(dy: Tensor, x: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    """dy^T x [out, in] and, if biased, the sum of dy's rows [out], like dy [rows, out]; dy and x [rows, in] are
    contiguous."""
    dw = empty((dy.shape[1], x.shape[1]), torch.float32)
    db = torch.empty(dy.shape[1]) if biased else None
    _kernel(dy, x, dw, db, add=False)
    return dw.to(dy.dtype), None if db is None else db.to(dy.dtype)


def _faster_by_kernel(x: Tensor) -> bool:
    """Whether the kernel and a conversion are faster than torch.mm for the gradient of a weight from x [rows, in]: in
    bfloat16 where both use AMX, 1.02 to 1.5 times; with fewer rows or wider ones they are not."""
    return x.dtype == torch.bfloat16 and len(x) >= 2048 and x.shape[1] < 4096 and _has_amx()


@cache
def _has_amx() -> bool:
    return "amx_bf16" in cpu.features()


def _kernel(dy: Tensor, x: Tensor, dw: Tensor, db: Tensor | None, *, add: bool) -> None:
    """kernels/linear_kind.h: dw [out, in] (+)= dy^T x and db [out] (+)= the sum of dy's rows, all contiguous."""
    supported = lib().hal_linear_wgrad(
        CODE[dy.dtype],
        dy.data_ptr() or address(dy),
        x.data_ptr() or address(x),
        dw.data_ptr() or address(dw),
        address(db),
        x.shape[0],
        *dw.shape,
        add,
    )
    if not supported:
        raise HalError(f"linear's kernel does not multiply {dy.dtype} on this processor")


@CpuRef.impl(ops.linear, id="cpu_ref/onednn", why_not=refuses(ops.linear), bwd=_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    return product(x, weight, bias), (x, weight)


def _why_not_wgrad(call: Call) -> Sequence[str]:
    main_bias_grad = call.main_bias_grad
    if not (call.main_grad.is_contiguous() and (main_bias_grad is None or main_bias_grad.is_contiguous())):
        return ["a main_grad or main_bias_grad that is not contiguous (it is updated in place)"]
    return reasons(call.x, call.dy, call.main_grad, main_bias_grad)


@CpuRef.impl(ops.linear_wgrad, id="cpu_ref/c", why_not=_why_not_wgrad)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    if x.dtype == torch.float16:
        x, dy = x.float(), dy.float()
    # The kernel adds to main_grad while it writes, which saves a pass over it; small products gain nothing.
    if x.numel() * dy.shape[-1] >= _SMALL and fast(x.dtype) and not _faster_by_mkl(x, dy):
        _kernel(_rows(dy).contiguous(), _rows(x).contiguous(), main_grad, main_bias_grad, add=True)
        return
    ops.linear_wgrad.reference(x, dy, main_grad, main_bias_grad)


def _faster_by_mkl(x: Tensor, dy: Tensor) -> bool:
    """Whether torch's addmm, which also adds in place, is faster than the kernel: in float32 on Intel's processors, by
    4 to 9 % where the weight is at least as wide as it is high. Where it is higher, the kernel is 2 to 4 % faster."""
    return x.dtype == torch.float32 and dy.shape[-1] <= x.shape[-1] and cpu.vendor() == "GenuineIntel"


@cache
def fast(dtype: torch.dtype) -> bool:
    return bool(lib().hal_linear_is_fast(CODE[dtype]))
