"""Random draws with HAL's bits, which Ascend's generators do not produce, and the ops that drop elements.

Three functions drop: the kernel (kernels/philox.cpp); the vendor's operators, in the opt-in mode of vendor_rng.py; and
int64 operators of torch_npu, which are slow on a device (22 of 144 calls, the right shifts, run on its host processor)
and serve where the kernel could not be built. Operators evaluate Philox once for four consecutive elements; this
includes blocks of a larger draw if their rows start at a multiple of four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import hal
from hal import Call, Rng, ops
from hal.backend_tools import bias_dropout_add_from, draw_device_reasons, draw_reasons, dropout_from

from . import kernels, vendor_rng
from .device import Npu
from .tensors import add_bias, bias_gradient, refuses

Drop = Callable[[Tensor, float, Rng], Tensor]
"""(x, p, rng) -> x with elements dropped with probability p > 0, in new memory."""
_MASK = 0xFFFFFFFF


def _philox(counter: Tensor, rng: Rng) -> Tensor:
    """int64 [..., 4]: the four words of each block with number `counter` [...] (Salmon et al., SC 2011, table 2)."""
    # Offsets are unsigned 64-bit integers. As int64 the upper half is negative, and the sum wraps modulo 2**64 as
    # required.
    counter = counter + (rng.offset if rng.offset < 1 << 63 else rng.offset - (1 << 64))
    c0, c1, c2, c3 = counter & _MASK, (counter >> 32) & _MASK, torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = rng.seed & _MASK, rng.seed >> 32
    for _ in range(10):
        # int64 products wrap modulo 2**64; shifting and masking gives the same bits as unsigned arithmetic.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def draw(shape: Sequence[int], rng: Rng, device: torch.device) -> Tensor:
    """int64 of `shape`: the upper 24 bits of each element's Philox word, by operators."""
    shape, (first, strides) = tuple(shape), rng.indexing(shape)
    # Rows are the trailing dimensions whose elements are consecutive; the leading dimensions give the start of each
    # row.
    split = len(shape)
    while split and (shape[split - 1] == 1 or strides[split - 1] == math.prod(shape[split:])):
        split -= 1
    aligned = not any(n > 1 and stride % 4 for n, stride in zip(shape[:split], strides))
    # If all rows start at the same position within a block of four, each block gives four consecutive elements;
    # otherwise a block is computed for each element.
    split, skipped = (split, first % 4) if aligned else (len(shape), 0)
    start = torch.full(shape[:split], first, dtype=torch.int64, device=device)
    for d, (n, stride) in enumerate(zip(shape[:split], strides)):
        start += (torch.arange(n, device=device) * stride).view(-1, *[1] * (split - d - 1))
    start, length = start.reshape(-1, 1), math.prod(shape[split:])
    if aligned:
        blocks = torch.arange((skipped + length + 3) // 4, device=device)
        words = _philox(start // 4 + blocks, rng).flatten(1)[:, skipped : skipped + length]
    else:
        words = _philox(start // 4, rng).flatten(1).gather(1, start % 4)
    return words.reshape(shape) >> 8


def _dropped_by_operators(x: Tensor, p: float, rng: Rng) -> Tensor:
    keep = draw(x.shape, rng, x.device) >= hal.dropout_threshold(p)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros_like(x))


def no_kernel() -> list[str]:
    """The reason why HAL's kernel cannot run; empty if it can."""
    return [f"HAL's AscendC kernel is missing: {kernels.missing()}"] if kernels.missing() else []


def _why_not_uniform(call: Call) -> Sequence[str]:
    return draw_device_reasons(call.device, "npu", "npu")


def _why_not_uniform_kernel(call: Call) -> Sequence[str]:
    return [*_why_not_uniform(call), *draw_reasons(call.rng, call.shape), *no_kernel()]


@Npu.impl(ops.philox_uniform, id="npu/philox", why_not=_why_not_uniform_kernel)
def philox_uniform_kernel(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    out = torch.empty(tuple(shape), dtype=torch.float32, device=hal.device() if device is None else device)
    kernels.philox(out, rng, kernels.draw_width(rng, out.shape))
    return out


@Npu.impl(ops.philox_uniform, id="npu/torch", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    return draw(shape, rng, hal.device() if device is None else device).to(torch.float32) * 2.0**-24


_DTYPES = {ops.dropout: refuses(ops.dropout, "x"), ops.bias_dropout_add: refuses(ops.bias_dropout_add)}


def _why_not_kernel(op: hal.Op) -> Callable[[Call], Sequence[str]]:  # type: ignore[type-arg]
    def why_not(call: Call) -> Sequence[str]:
        return [*_DTYPES[op](call), *draw_reasons(call.rng, call.x.shape), *no_kernel()]

    return why_not


def _bias_dropout_add(drop: Drop) -> tuple[Callable[..., object], Callable[..., object]]:
    """The forward and backward function of ops.bias_dropout_add; sums in float32."""

    def add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, rng: Rng | None) -> Tensor:
        y = add_bias(x, bias).float()
        return (residual.float() + (y if rng is None or p == 0.0 else drop(y, p, rng))).to(residual.dtype)

    def gradients(
        dy: Tensor, wants_dx: bool, bias: Tensor | None, dtype: torch.dtype, p: float, rng: Rng | None
    ) -> tuple[Tensor | None, Tensor | None]:
        dx = dy.float() if rng is None or p == 0.0 else drop(dy.float(), p, rng)
        return dx.to(dtype), bias_gradient(dx, bias)

    return bias_dropout_add_from(add, gradients)


def _register(id: str, drop: Drop, kernel: bool) -> None:
    for op, (forward, backward) in (
        (ops.dropout, dropout_from(drop)),
        (ops.bias_dropout_add, _bias_dropout_add(drop)),
    ):
        Npu.impl(op, id=id, why_not=_why_not_kernel(op) if kernel else _DTYPES[op], bwd=backward)(forward)


_register(f"npu/{vendor_rng.SUFFIX}", vendor_rng.dropped, kernel=False)
_register("npu/philox", kernels.dropped, kernel=True)
_register("npu/torch", _dropped_by_operators, kernel=False)
