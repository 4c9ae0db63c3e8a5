"""The products of a linear layer in float8: how operands are quantised, and the three products of a training step.

Weights and the sums of gradients keep their dtype. Each operand is quantised anew for each product, by default from its
own largest magnitudes ("current scaling"), so that there is no state between steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hal import ops
from hal.ops.float8 import BLOCK, blocks, spread


def quantize(
    x: Tensor, dtype: torch.dtype, blocks_of: str = "tensor", magnitude: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(x / scale in `dtype`, the float32 scale). The largest magnitude becomes the dtype's largest number.

    x: [..., n]. dtype: float8_e4m3fn or float8_e5m2. blocks_of: which elements share a scale: "tensor" all, scale [];
    "row" 128 adjacent ones, scale [..., ceil(n / 128)]; "square" 128 x 128 of x [m, n], scale [ceil(m / 128),
    ceil(n / 128)]. A block of zeros has scale 1. NaN and infinity make their whole block NaN.
    magnitude: with "tensor", a function of x's largest magnitude (float32 scalar) that returns the one to use in its
    place; elements above it become the dtype's largest number.
    """
    x = x.detach().float()
    amax = x.abs()
    if blocks_of == "tensor":
        amax = amax.amax() if x.numel() else amax.sum()
        amax = amax if magnitude is None else magnitude(amax)
    else:
        amax = _largest(amax, -1)
        if blocks_of == "square":
            amax = _largest(amax, -2)
    most = torch.finfo(dtype).max
    scale = torch.where(amax == 0.0, torch.ones_like(amax), amax / most)
    return (x / spread(scale, x)).clamp(-most, most).to(dtype), scale


def _largest(x: Tensor, dim: int) -> Tensor:
    """The maximum of every 128 elements along `dim`, of non-negative values."""
    x = x.transpose(dim, -1)
    count = blocks(x.shape[-1])
    padded = F.pad(x, (0, count * BLOCK - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], count, BLOCK).amax(-1).transpose(dim, -1)


@dataclass(frozen=True)
class ExactProducts:
    """The products of a linear layer y = x W^T + bias in the dtype of its operands."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., out] from x [..., in], weight [out, in] and bias [out]."""
        return ops.linear(x, weight, bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[..., in] from dy [..., out]."""
        return ops.linear(dy, weight.t())

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """[out, in] from the rows dy [n, out] and x [n, in], in their dtype."""
        return ops.linear(dy.t(), x.t())

    def add_gradients(self, x: Tensor, dy: Tensor, weight_sum: Tensor, bias_sum: Tensor | None) -> None:
        """Adds the gradients of weight and bias to float32 sums in place; x [..., in] and dy [..., out]."""
        ops.linear_wgrad(x, dy, weight_sum, bias_sum)


@dataclass(frozen=True)
class Float8Products(ExactProducts):
    """The same with operands in float8 and sums in float32.

    by_block: scales of 1 x 128 elements of activations and gradients and of 128 x 128 of weights, as DeepSeek-V3 (arXiv
    2412.19437, section 3.3.2); otherwise one scale per tensor. gradient: the dtype of dy; the other operands are
    float8_e4m3fn. magnitude: with one scale per tensor, a function of the operand ("x", "weight" or "dy") and its
    largest magnitude (float32 scalar) that returns the one from which the scale is made, e.g. that of all ranks' parts.
    """

    by_block: bool = False
    gradient: torch.dtype = torch.float8_e5m2
    magnitude: Callable[[str, Tensor], Tensor] | None = None

    def _quantize(self, operand: str, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.gradient if operand == "dy" else torch.float8_e4m3fn
        if self.by_block:
            return quantize(x, dtype, "square" if operand == "weight" else "row")
        return quantize(x, dtype, magnitude=self.magnitude and functools.partial(self.magnitude, operand))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (x8, x_scale), (w8, w_scale) = self._quantize("x", x), self._quantize("weight", weight)
        y = ops.scaled_linear(x8, w8, x_scale, w_scale, dtype=x.dtype)
        return y if bias is None else y + bias

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        (dy8, dy_scale), (w8, w_scale) = self._quantize("dy", dy), self._quantize("weight", weight)
        return ops.scaled_linear(dy8, w8.t(), dy_scale, w_scale.t() if self.by_block else w_scale, dtype=dy.dtype)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._summed_over_rows(dy, x, x.dtype)

    def add_gradients(self, x: Tensor, dy: Tensor, weight_sum: Tensor, bias_sum: Tensor | None) -> None:
        dy_rows = dy.flatten(0, -2)
        weight_sum += self._summed_over_rows(dy_rows, x.flatten(0, -2), torch.float32)
        if bias_sum is not None:
            bias_sum += dy_rows.float().sum(0)

    def _summed_over_rows(self, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """dy^T x [out, in]; with scales by block, 128 adjacent rows share one."""
        dy8, dy_scale = self._quantize("dy", dy.t())
        x8, x_scale = self._quantize("x", x.t())
        return ops.scaled_linear(dy8, x8, dy_scale, x_scale, dtype=dtype)


EXACT = ExactProducts()
