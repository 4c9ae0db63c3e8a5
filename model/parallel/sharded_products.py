"""Products of layers whose weights are split over tensor-parallel ranks, with the communication around them.

Gradients of weights are added to their float32 sums (`main_grad`), where the parameters have one. With
`Parallel.overlap`, products and the communication beside them are ops that a backend overlaps (docs/adr/0063).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hal import Comm, ops
from hal.nn.float8_products import EXACT, ExactProducts

from .tensor_sharding import Parallel

mappings = ops.mappings


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel, products: ExactProducts = EXACT
) -> Tensor:
    """The product of a column-parallel layer, x [s, b, in] -> [s, b, out / ranks], which enters the tensor-parallel
    region. With sequence parallelism x is this rank's [s / ranks, b, in]."""
    if parallel.sequence:
        y: Tensor = _GatheredLinear.apply(x, weight, bias, parallel, products)  # type: ignore[no-untyped-call]
        return y
    return linear(mappings.copy_to_region(x, parallel.tp), weight, bias, products)


def row_linear(x: Tensor, weight: Tensor, parallel: Parallel, products: ExactProducts = EXACT) -> Tensor:
    """The product of a row-parallel layer, x [s, b, in / ranks] -> [s, b, out], which leaves the tensor-parallel
    region: the sum over the ranks, with sequence parallelism of this rank's [s / ranks, b, out]."""
    if parallel.overlap:
        y: Tensor = _ScatteredLinear.apply(x, weight, parallel.tp)  # type: ignore[no-untyped-call]
        return y
    leave = mappings.reduce_scatter_from_region if parallel.sequence else mappings.reduce_from_region
    return leave(linear(x, weight, products=products), parallel.tp)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, products: ExactProducts = EXACT) -> Tensor:
    """x W^T + bias, with weight-gradient accumulation fused into `main_grad`, if the parameters have one. This is the
    float32 gradient sum (Megatron's name), which the optimizer sets from the second microbatch on."""
    sums = main_grads(weight, bias)
    if sums is None and products is EXACT:
        return ops.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, sums, products)  # type: ignore[no-untyped-call]
    return y


_MainGrads = tuple[Tensor, Tensor | None]
"""The float32 gradient sums of a linear layer's weight [out, in] and bias [out]."""


def main_grads(weight: Tensor, bias: Tensor | None) -> _MainGrads | None:
    """The gradient sums of a layer, or None unless each of its parameters has a `main_grad`."""
    weight_sum: Tensor | None = getattr(weight, "main_grad", None)
    bias_sum: Tensor | None = getattr(bias, "main_grad", None)
    if weight_sum is None or (bias is not None and bias_sum is None):
        return None
    return weight_sum, bias_sum


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass adds the gradients of weight and bias to their `main_grad`, if there is one,
    instead of returning them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: _MainGrads | None, products: ExactProducts
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grads, ctx.products, ctx.has_bias = sums, products, bias is not None
        return products.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = ctx.products.input_gradient(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, *_parameter_gradients(ctx, x, dy), None, None


class _GatheredLinear(torch.autograd.Function):
    """linear(all_gather(x), weight, bias) that saves only this rank's rows x [s / ranks, b, in] for the backward pass.

    The rows are gathered a second time while the gradient of x is computed, so that all activations that a layer saves
    are divided by the number of ranks (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel, products: ExactProducts
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.has_bias, ctx.main_grads = parallel.tp, bias is not None, main_grads(weight, bias)
        ctx.products = products
        if parallel.overlap:
            y: Tensor = ops.all_gather_linear(x, weight, bias, comm=parallel.tp)  # type: ignore[assignment]
            return y
        return products.forward(parallel.tp.all_gather(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Both collectives overlap with a matrix product: the gather with that of dx, the scatter with that of dw.
        gathering = ctx.comm.start("all_gather", x)
        scattering = ctx.comm.start("reduce_scatter", ctx.products.input_gradient(dy, weight))
        gradients = _parameter_gradients(ctx, gathering.wait(), dy)
        return scattering.wait(), *gradients, None, None


class _ScatteredLinear(torch.autograd.Function):
    """reduce_scatter(linear(x, weight)), x [s, b, in / ranks] -> [s / ranks, b, out], whose communication overlaps with
    the product, as does that of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Comm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.has_bias, ctx.main_grads, ctx.products = comm, False, main_grads(weight, None), EXACT
        return ops.linear_reduce_scatter(x, weight, comm=comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dy = ops.all_gather_linear(dy, weight.t(), comm=ctx.comm, return_gathered=True)
        return dx, _parameter_gradients(ctx, x, dy)[0], None


def _parameter_gradients(ctx: Any, x: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias from x [..., in] and dy [..., out], or (None, None) after adding them to
    `main_grad`."""
    if ctx.main_grads is not None:
        ctx.products.add_gradients(x, dy, *ctx.main_grads)
        return None, None
    dy_rows = dy.flatten(0, -2)
    return ctx.products.weight_gradient(dy_rows, x.flatten(0, -2)), dy_rows.sum(0) if ctx.has_bias else None
