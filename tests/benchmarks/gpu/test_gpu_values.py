"""The checks of values at the measured size find wrong elements, in outputs and in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hal import Rng, ops
from hal.bench.gpu.values import Attention, ByRows, Errors

NORM = ByRows(ops.rms_norm, lambda first, x, w: ops.rms_norm.reference(x, w), (True, False), 2, chunk=5)


class Off(torch.autograd.Function):
    """Adds `out` to one element of the result, and `gradient` to one of the gradient."""

    @staticmethod
    def forward(ctx, x, row, out, gradient):
        ctx.row, ctx.gradient = row, gradient
        y = x.clone()
        y[row] += out
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        dx[ctx.row] += ctx.gradient
        return dx, None, None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [0, 12])
def test_an_error_in_any_row_is_found(dtype: torch.dtype, row: int) -> None:
    x, w = torch.randn(13, 32, dtype=dtype), torch.ones(32, dtype=dtype)
    assert NORM.worst(ops.rms_norm.reference, (x, w)) <= 1.0
    assert NORM.worst(lambda x, w: Off.apply(ops.rms_norm.reference(x, w), row, 0.5, 0.0), (x, w)) > 1.0
    assert NORM.worst(lambda x, w: ops.rms_norm.reference(Off.apply(x, row, 0.0, 0.5), w), (x, w)) > 1.0
    assert NORM.worst(lambda x, w: ops.rms_norm.reference(x, Off.apply(w, row, 0.0, 0.5)), (x, w)) > 1.0


def test_a_result_that_is_not_a_number_is_infinitely_wrong() -> None:
    for value in (float("nan"), float("inf")):
        errors = Errors(ops.rms_norm)
        errors.add(torch.tensor([value]), torch.tensor([1.0]))
        assert errors.worst == float("inf")
    errors = Errors(ops.rms_norm)
    errors.add(torch.tensor([float("inf")]), torch.tensor([float("inf")], dtype=torch.float64))
    assert errors.worst == 0.0


def _attention(window: int | None, rng: Rng | None):
    how = {"layout": "BNSD", "pre_tokens": window, "next_tokens": 0}
    dropout = {"dropout_p": 0.3, "rng": rng} if rng else {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.flash_attention.reference(q, k, v, **how, **dropout)

    return run


@pytest.mark.parametrize("rng", [None, Rng(3)])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_is_compared_with_the_bits_of_its_window_and_draw(window: int | None, rng: Rng | None) -> None:
    q, k = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8)
    check = Attention(ops.flash_attention, window, 0.3 if rng else 0.0, rng, queries=6)
    assert check.worst(_attention(window, rng), (q, k, k.clone())) <= 1.0
    others = [_attention(5, rng), _attention(window, Rng(4))]
    assert all(check.worst(other, (q, k, k.clone())) > 1.0 for other in others)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_in_a_gradient_of_attention_is_found(at: int) -> None:
    inputs = [torch.randn(1, 2, 20, 8) for _ in range(3)]

    def wrong(*tensors: Tensor) -> Tensor:
        changed = [
            Off.apply(x.transpose(0, 2), -1, 0.0, 0.5).transpose(0, 2) if i == at else x for i, x in enumerate(tensors)
        ]
        return _attention(None, None)(*changed)

    assert Attention(ops.flash_attention, queries=5).worst(wrong, inputs) > 1.0
