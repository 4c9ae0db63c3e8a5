"""The tolerance rule: the error that a result may have, against the reference in float64.

With atol, rtol from the table of (op, dtype) and S = 1 for outputs, S = max(1, max|g64|) for gradients:

1. every element:   |y - y64| <= atol * S + rtol * |y64|     (+ one rounding where y has less precision than dtype)
2. every tensor:    max|y - y64| <= max(2 * max|r - y64|, atol * S + max(eps, rtol / 2) * max|y64|)

A gradient that is a sum over n rows has max(atol, 2^-24 * sqrt(n)) in the place of atol, see `SUM_CONSTANT`.
r is the reference in the dtype under test and eps the spacing of y's dtype. Rule 1 is what a user may rely on.
Rule 2 refuses a kernel that is less accurate than the plain formula; its floor (one rounding, or half of the table's
relative part) is for references that happen to be exact. NaN and infinities must be where the float64 result has them;
where it rounds to more than the largest number of y's dtype, the result must be the infinity of that sign. An error "in
tolerances" is the larger of both ratios; a waiver of factor f allows f of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.core.op import Tol

SUM_CONSTANT = 1.0
"""lambda in the allowed error lambda * u * sqrt(n) * S of a sum of n terms in float32, u = 2^-24.

Rounding after each addition is a random walk: a partial sum of k independent terms of mean 0 and standard deviation s
has size s * sqrt(k), and is rounded by at most u and typically 0.4 u times that, so n additions in sequence have an
error of about 0.3 u * s * n. The sum itself, of which S is the size, is about s * sqrt(n): the error relative to S
grows with sqrt(n) (N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci.
Comput. 41, A2815, 2019; for terms of mean 0: Sharper Probabilistic Backward Error Analysis for Basic Linear Algebra
Kernels with Random Data, SIAM J. Sci. Comput. 42, A3427, 2020). lambda = 1 is about three standard deviations. Sums in
blocks or trees have smaller errors; a kernel may add in sequence. Sums of 16-bit terms are computed in float32 as well,
and their table entries exceed this for all n in use.
"""

_UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Error:
    """The error of one tensor: `tolerances` (0 = exact, 1 = just allowed) and a line that shows the worst element."""

    tolerances: float
    text: str


@dataclass(frozen=True)
class Expected:
    """What a result is compared with, and how much it may differ.

    exact: the reference's result in float64. native: its result in `dtype`, the dtype under test; both have the
    result's shape. summands: the number of rows of which each element of a gradient is the sum.
    """

    exact: Tensor
    native: Tensor
    tol: Tol
    dtype: torch.dtype
    gradient: bool = False
    summands: int = 1

    def measure(self, y: Tensor) -> Error:
        """The error of `y`, which may be on any device. Integer and bool tensors must be equal."""
        if y.numel() == 0:
            return Error(0.0, "")
        return _worst(self.errors(y), y.detach().cpu(), self.exact.detach())

    def errors(self, y: Tensor) -> Tensor:
        """The error of every element of `y` in tolerances, float64 of y's shape."""
        got, exact = y.detach().cpu(), self.exact.detach()
        if not got.is_floating_point():
            return _infinite_at(got != exact.to(got.dtype))
        eps = torch.finfo(got.dtype).eps
        got, native = got.to(torch.float64), self.native.detach().to(torch.float64)
        # Infinity is the correct result from half a spacing beyond the largest number on, which is (2 - eps) times a
        # power of two (IEEE 754, round to nearest).
        limit = torch.finfo(y.dtype).max * (1.0 + 0.5 * eps / (2.0 - eps))
        right = torch.where(exact.abs() >= limit, exact.sign() * float("inf"), exact)
        finite = right.isfinite() & got.isfinite()
        misplaced = ~finite & ~((got == right) | (got.isnan() & right.isnan()))
        if misplaced.any():
            return _infinite_at(misplaced)
        zero = torch.zeros_like(got)
        size = torch.where(finite, exact.abs(), zero)
        error = torch.where(finite, (got - exact).abs(), zero)
        top = float(size.max())
        of_sum = SUM_CONSTANT * _UNIT_ROUNDOFF * math.sqrt(self.summands) if self.summands > 1 else 0.0
        atol = max(self.tol.atol, of_sum) * (max(1.0, top) if self.gradient else 1.0)
        rounding = eps if eps > torch.finfo(self.dtype).eps else 0.0
        allowed = atol + (self.tol.rtol + rounding) * size
        # With a tolerance of 0, an exact result must not become 0 / 0 = NaN; any other error becomes infinite.
        by_element = torch.where(error == 0, zero, error / allowed)
        lost = torch.where(finite & native.isfinite(), (native - exact).abs(), zero).max()
        by_tensor = error / max(2.0 * float(lost), atol + max(eps, self.tol.rtol / 2) * top, 1e-300)
        return torch.maximum(by_element, by_tensor)


def _infinite_at(wrong: Tensor) -> Tensor:
    """Infinity where `wrong` (bool, any shape) is True, else 0, in float64."""
    return torch.zeros(wrong.shape, dtype=torch.float64).masked_fill(wrong, float("inf"))


def _worst(ratio: Tensor, got: Tensor, exact: Tensor) -> Error:
    """The error at the largest `ratio`; all three have one shape."""
    flat = int(ratio.flatten().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), ratio.shape)]
    worst = float(ratio.flatten()[flat])
    return Error(
        worst,
        f"error of {worst:.3g} tolerances at {index}: "
        f"got {float(got.flatten()[flat]):.9g}, float64 reference {float(exact.flatten()[flat]):.9g}",
    )


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits (NaN equals the same NaN, -0 differs from 0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(raw(a), raw(b))


def raw(x: Tensor) -> Tensor:
    """The bytes of x's elements, on the CPU."""
    # Cloned because a view as bytes requires stride 1, and a single element counts as contiguous with any stride.
    return x.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
