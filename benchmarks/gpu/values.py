"""Whether results at the measured size are right: against the ops' references in float64, in pieces that fit in memory.

Errors are in tolerances of the op's contract: at most 1 where every element obeys rule 1 of hal.testing.comparison.
Everything is computed where the tensors are, because the host would take minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Rng

Function = Callable[..., Any]
"""Takes tensors, returns one."""


@dataclass
class Errors:
    """The largest error in tolerances so far."""

    op: hal.Op[Any, Any]
    worst: float = 0.0

    def add(self, result: Tensor, exact: Tensor, summands: int = 0) -> None:
        """result: what was computed; exact: in float64. summands: 0 for an output, and for a gradient the number of
        rows of which each of its elements is the sum (1: it is no sum)."""
        if not exact.numel():
            return
        got, exact = result.detach().double(), exact.detach().double()
        if result.dtype in self.op.tol:
            tol = self.op.tol[result.dtype]
        else:  # a rounded copy of a float32 result
            tol = self.op.tol[torch.float32]
            tol = hal.Tol(tol.atol, tol.rtol + torch.finfo(result.dtype).eps)
        size = exact.abs()
        atol = tol.atol
        if summands:
            of_sum = 2.0**-24 * math.sqrt(summands) if summands > 1 else 0.0
            atol = max(atol, of_sum) * max(1.0, float(size.max()))
        ratio = (got - exact).abs() / (atol + tol.rtol * size)
        # An infinity where the exact result has the same one is right, and any other one, or NaN, infinitely wrong.
        wrong = torch.full_like(ratio, math.inf)
        ratio = torch.where(got == exact, torch.zeros_like(ratio), torch.where(ratio.isnan(), wrong, ratio))
        self.worst = max(self.worst, float(ratio.max()))


@dataclass(frozen=True)
class ByRows:
    """A check of a function of rows: its results and gradients, a chunk of rows at a time.

    op: whose tolerances hold. exact(first, *inputs): the same function of rows from `first` on, for float64. rows: for
    every input whether its first dimension is the rows; gradients of the others are sums over all rows. gradients: how
    many inputs have one, from the first one on. chunk: rows at a time. per_row: rows of a sum in each of these.
    """

    op: hal.Op[Any, Any]
    exact: Function
    rows: Sequence[bool]
    gradients: int
    chunk: int = 512
    per_row: int = 1

    def worst(self, function: Function, inputs: Sequence[Tensor]) -> float:
        """The largest error of `function` on these inputs, in tolerances."""
        errors, count = Errors(self.op), inputs[self.rows.index(True)].shape[0]
        leaves = [x.detach().requires_grad_(i < self.gradients) for i, x in enumerate(inputs)]
        out = function(*leaves)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, leaves[: self.gradients], dout) if self.gradients else ()
        sums: dict[int, Tensor] = {}
        for first in range(0, count, self.chunk):
            here = slice(first, first + self.chunk)
            part = [x.detach()[here] if row else x.detach() for x, row in zip(inputs, self.rows)]
            double = [x.double().requires_grad_(i < self.gradients) for i, x in enumerate(part)]
            expected = self.exact(first, *double)
            errors.add(out[here], expected)
            if not self.gradients:
                continue
            wanted = torch.autograd.grad(expected, double[: self.gradients], dout[here].double())
            for i, gradient in enumerate(wanted):
                if self.rows[i]:
                    errors.add(got[i][here], gradient, 1)
                else:
                    sums[i] = gradient + sums[i] if i in sums else gradient
        for i, total in sums.items():
            errors.add(got[i], total, count * self.per_row)
        return errors.worst


@dataclass(frozen=True)
class Attention:
    """A check of causal attention [b, n, s, d]: out and the gradient of q for `queries` queries at the beginning, in
    the middle and at the end, and the gradients of the keys and values that only the last of them see."""

    op: hal.Op[Any, Any]
    window: int | None = None
    dropout_p: float = 0.0
    rng: Rng | None = None
    gradients: int = 3
    queries: int = 64
    places: Sequence[float] = (0.0, 0.5, 1.0)

    def worst(self, function: Function, inputs: Sequence[Tensor]) -> float:
        """The largest error of `function` on q, k and v, in tolerances."""
        errors = Errors(self.op)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        dout = torch.randn_like(out)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        length = inputs[0].shape[2]
        count = min(self.queries, length)
        for place in self.places:
            first = int((length - count) * place)
            here, seen = slice(first, first + count), slice(0, first + count)
            parts = [x.detach()[:, :, p].double().requires_grad_() for x, p in zip(inputs, (here, seen, seen))]
            expected = self._exact(first, length, *parts)
            gradients = torch.autograd.grad(expected, parts, dout[:, :, here].double())
            errors.add(out[:, :, here], expected)
            errors.add(dq[:, :, here], gradients[0], 1)
        # The last place: no earlier query sees these keys.
        for got, exact in ((dk, gradients[1]), (dv, gradients[2])):
            errors.add(got[:, :, here], exact[:, :, here], count)
        return errors.worst

    def _exact(self, first: int, length: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        options: dict[str, Any] = {"layout": "BNSD", "pre_tokens": self.window, "next_tokens": 0}
        if self.rng is not None:
            full = (*q.shape[:2], length, length)
            options |= {"dropout_p": self.dropout_p, "rng": self.rng.block(full, (0, 0, first, 0))}
        return self.op.reference(q, k, v, **options)
