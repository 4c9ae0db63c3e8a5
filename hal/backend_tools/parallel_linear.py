"""all_gather_linear and linear_reduce_scatter from a device's products with communication, which take matrices.

The gradient of the gathered rows' product takes the two transfers and the two products that it consists of, because
each transfer overlaps with a whole product there. That of the scattered product is the gathering one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hal import Call, Comm

Gather = Callable[[Tensor, Tensor, Comm, bool], tuple[Tensor, Tensor | None]]
"""(x [m, in], weight [out, in], comm, wanted) -> (gathered x times weight^T [ranks * m, out], gathered x [ranks * m,
in] if it is wanted). Both arguments are contiguous, or the weight's transpose is."""
Scatter = Callable[[Tensor, Tensor, Comm], Tensor]
"""(x [m, in], weight [out, in], comm) -> this rank's rows [m / ranks, out] of the sum of all ranks' x weight^T."""


def parallel_linear_reasons(call: Call) -> Sequence[str]:
    """Reasons why a call of either op is not one of products with communication: one rank, or no elements."""
    if call.comm is None or call.comm.size == 1:
        return ["one rank (there is nothing to communicate)"]
    return [] if call.x.numel() and call.weight.numel() else ["no elements"]


class ParallelLinear:
    """The forward and backward functions of both ops, for `Backend.impl`, made from `gather` and `scatter`."""

    def __init__(self, gather: Gather, scatter: Scatter) -> None:
        self._gather, self._scatter = gather, scatter

    def all_gather_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        comm: Comm | None = None,
        return_gathered: bool = False,
    ) -> tuple[Any, tuple[Any, ...]]:
        """The op's forward with residuals."""
        assert comm is not None
        y, rows = self._gather(_rows(x), _dense(weight), comm, return_gathered)
        y = y.view(-1, *x.shape[1:-1], weight.shape[0])
        if bias is not None:
            y = y + bias
        output = y if rows is None else (y, rows.view(-1, *x.shape[1:]))
        return output, (x, weight, bias is not None, comm)

    def all_gather_linear_gradients(
        self, residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx [s / ranks, ..., in], dweight [out, in] and dbias [out] from dy [s, ..., out], as far as needed."""
        x, weight, biased, comm = residuals
        gathering = comm.start("all_gather", x) if needs[1] else None
        scattering = comm.start("reduce_scatter", dy @ weight) if needs[0] else None
        dy_rows = dy.flatten(0, -2)
        dweight = None if gathering is None else dy_rows.t() @ gathering.wait().flatten(0, -2)
        dbias = dy_rows.sum(0) if biased and needs[2] else None
        return None if scattering is None else scattering.wait(), dweight, dbias

    def linear_reduce_scatter(
        self, x: Tensor, weight: Tensor, *, comm: Comm | None = None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The op's forward with residuals."""
        assert comm is not None
        y = self._scatter(_rows(x), _dense(weight), comm)
        return y.view(-1, *x.shape[1:-1], weight.shape[0]), (x, weight, comm)

    def linear_reduce_scatter_gradients(
        self, residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx [s, ..., in] and dweight [out, in] from dy [s / ranks, ..., out], as far as needed."""
        x, weight, comm = residuals
        dx, dy_rows = self._gather(_rows(dy), _dense(weight.t()), comm, needs[1])
        return dx.view(x.shape), None if dy_rows is None else dy_rows.t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    """x [..., n] as a contiguous matrix [m, n]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _dense(weight: Tensor) -> Tensor:
    """The weight, copied unless it or its transpose is contiguous."""
    return weight if weight.is_contiguous() or weight.t().is_contiguous() else weight.contiguous()
