"""Random draws with HAL's bits, which Ascend's generators do not produce, and the ops that drop elements.

Philox4x32-10 runs on the device in int64 arithmetic. One evaluation gives four consecutive elements, so a draw costs a
quarter of an evaluation per element; this includes blocks of a larger draw if their rows start at a multiple of four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import hal
from hal import Call, Rng, ops
from hal.backend_tools import draw_device_reasons

from .device import Npu
from .tensors import add_bias, refuses

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
    """int64 of `shape`: the upper 24 bits of each element's Philox word."""
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


def keep_mask(shape: Sequence[int], p: float, rng: Rng, device: torch.device) -> Tensor:
    """bool of `shape`, True where dropout with probability `p` keeps the element."""
    return draw(shape, rng, device) >= hal.dropout_threshold(p)


def _why_not_uniform(call: Call) -> Sequence[str]:
    return draw_device_reasons(call.device, "npu", "npu")


@Npu.impl(ops.philox_uniform, id="npu/torch", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    return draw(shape, rng, hal.device() if device is None else device).to(torch.float32) * 2.0**-24


def _dropped(x: Tensor, p: float, rng: Rng | None) -> Tensor:
    """dropout(x); x itself if nothing is dropped."""
    if p == 0.0 or rng is None:
        return x
    return torch.where(keep_mask(x.shape, p, rng, x.device), x * (1.0 / (1.0 - p)), torch.zeros_like(x))


@Npu.impl(ops.dropout, id="npu/torch", why_not=refuses(ops.dropout, "x"))
def dropout(x: Tensor, p: float, rng: Rng | None) -> Tensor:
    y = _dropped(x, p, rng)
    return x.clone() if y is x else y


@Npu.impl(ops.bias_dropout_add, id="npu/torch", why_not=refuses(ops.bias_dropout_add))
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float = 0.0, rng: Rng | None = None
) -> Tensor:
    return (residual.float() + _dropped(add_bias(x, bias).float(), p, rng)).to(residual.dtype)
