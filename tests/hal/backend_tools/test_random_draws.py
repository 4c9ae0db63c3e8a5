"""The elements of a random draw that a kernel computes, and dropout made of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hal import Rng, backend_tools, ops
from hal.core.adapters import require_same_signature

BLOCK = Rng(1).block((4, 6, 9, 12), (1, 2, 3, 4))


@pytest.mark.parametrize(
    "rng, shape, width",
    [
        (Rng(1), (3, 4, 10), 10),
        (Rng(1), (3, 4, 10), 120),
        (BLOCK, (2, 3, 5, 7), 7),
        (Rng(1).block((8, 9), (2, 3)), (4, 5), 5),
        (Rng(1).block((8,), (2,)), (4,), 4),
        (Rng(1).block((), ()), (), 1),
    ],
)
def test_rows_of_a_draw_hold_the_elements_that_indexing_says(rng: Rng, shape: tuple[int, ...], width: int) -> None:
    first, sizes, strides = backend_tools.draw_rows(rng, shape, width)
    assert len(sizes) == 4 and len(strides) == 3 and math.prod(sizes) == math.prod(shape)
    steps = [torch.arange(n) * s for n, s in zip(sizes, (*strides, 1))]
    walked = first + sum(s.reshape(-1, *[1] * (3 - i)) for i, s in enumerate(steps))
    index0, full = rng.indexing(shape)
    expected = torch.full(shape, index0)
    for d, (n, s) in enumerate(zip(shape, full)):
        expected = expected + (torch.arange(n) * s).reshape(-1, *[1] * (len(shape) - d - 1))
    assert walked.flatten().tolist() == expected.flatten().tolist()


def test_steps_of_a_draw_are_its_strides_without_the_last() -> None:
    index0, strides = BLOCK.indexing((2, 3, 5, 7))
    assert backend_tools.draw_steps(BLOCK, (2, 3, 5, 7)) == (index0, *strides[:3])
    assert backend_tools.draw_steps(Rng(0), (5, 7)) == (0, 0, 0, 7)


def test_only_blocks_of_many_dimensions_are_refused() -> None:
    assert backend_tools.draw_reasons(None, (1,) * 6) == ()
    assert backend_tools.draw_reasons(Rng(0), (1,) * 6) == ()
    assert backend_tools.draw_reasons(BLOCK, (1,) * 4) == ()
    assert "5 dimensions" in backend_tools.draw_reasons(BLOCK, (1,) * 5)[0]


def test_dropout_redraws_its_mask_and_copies_where_nothing_drops() -> None:
    calls = []

    def drop(x: Tensor, p: float, rng: Rng) -> Tensor:
        calls.append((p, rng))
        return 2 * x

    forward, backward = backend_tools.dropout_from(drop)
    require_same_signature(ops.dropout, forward, "dropout")
    x = torch.ones(3)
    y, residuals = forward(x, 0.5, Rng(3))
    (dx,) = backward(residuals, x)
    assert (y == 2.0).all() and (dx == 2.0).all() and calls == [(0.5, Rng(3))] * 2
    y, residuals = forward(x, 0.0, Rng(3))
    assert y is not x and torch.equal(y, x)
    assert backward(residuals, x)[0] is x and len(calls) == 2


def test_a_draw_on_another_kind_of_device_is_refused() -> None:
    for device in (None, "cpu", torch.device("cpu", 0)):
        assert backend_tools.draw_device_reasons(device, "cpu", "mine") == ()
    reasons = backend_tools.draw_device_reasons(torch.device("meta"), "cpu", "mine")
    assert reasons == ["device meta (mine draws into CPU memory)"]


@pytest.mark.parametrize("bias", [None, torch.tensor([1.0, -2.0, 0.5])], ids=["no bias", "bias"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=["wide stream", "same dtype"])
@pytest.mark.parametrize("p, rng", [(0.0, Rng(1)), (0.5, None), (0.5, Rng(1))], ids=["p=0", "no rng", "p=0.5"])
def test_a_residual_addition_of_two_functions_is_the_reference(
    p: float, rng: Rng | None, stream: torch.dtype, bias: Tensor | None
) -> None:
    """With dropout the gradient drops the same elements; a gradient that is dy itself is not computed."""
    asked = []

    def keep(shape: torch.Size, p: float, rng: Rng | None) -> Tensor:
        return torch.ones(shape) if rng is None else ops.dropout.reference(torch.ones(shape), p, rng)

    def add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, rng: Rng | None) -> Tensor:
        assert rng is not None or p == 0.0
        terms = x.float() if bias is None else x.float() + bias.float()
        return (residual.float() + terms * keep(x.shape, p, rng)).to(residual.dtype)

    def gradients(
        dy: Tensor, wants_dx: bool, bias: Tensor | None, dtype: torch.dtype, p: float, rng: Rng | None
    ) -> tuple[Tensor | None, Tensor | None]:
        assert dy.is_contiguous()
        asked.append(wants_dx)
        dx = dy.float() * keep(dy.shape, p, rng)
        return dx.to(dtype) if wants_dx else None, None if bias is None else dx.sum(0).to(bias.dtype)

    forward, backward = backend_tools.bias_dropout_add_from(add, gradients)
    require_same_signature(ops.bias_dropout_add, forward, "bias_dropout_add")
    x, residual = torch.randn(4, 3).bfloat16(), torch.randn(4, 3).to(stream)
    b = None if bias is None else bias.bfloat16()
    y, saved = forward(x, b, residual, p=p, rng=rng)
    leaves = [t if t is None else t.detach().requires_grad_() for t in (x, b, residual)]
    expected = ops.bias_dropout_add.reference(*leaves, p=p, rng=rng)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(3, 4).to(stream).t()
    given = backward(saved, dy)
    wanted = torch.autograd.grad(expected, [t for t in leaves if t is not None], dy)
    torch.testing.assert_close([g for g in given if g is not None], list(wanted))
    unchanged = (p == 0.0 or rng is None) and stream == torch.bfloat16
    assert (given[0] is dy) == unchanged and given[2] is dy
    assert asked == ([] if unchanged and bias is None else [not unchanged])
