"""Results above 6 MiB are written with streaming stores, in whole cache lines or in parts. They are bit-equal to the
results of the same rows in a smaller tensor, which is written with ordinary stores."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hal import ops
from hal.backends.cpu_ref import build

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
LIMIT = re.search(r"HAL_STREAM_MIN \(\(int64_t\)(\d+) << 20\)", (build.KERNELS / "common.h").read_text())
assert LIMIT
STREAMED = int(LIMIT[1]) << 20
FEW = 37  # rows of the smaller tensor

Row = Callable[[Tensor], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def parameters(x: Tensor, count: int) -> list[Tensor]:
    return [normal(x.shape[-1], seed=9 + i).to(x.dtype) for i in range(count)]


OPS: dict[str, Row] = {
    "layer_norm": lambda x: ops.layer_norm(x, *parameters(x, 2)),
    "rms_norm": lambda x: ops.rms_norm(x, *parameters(x, 1)),
    "swiglu": lambda x: ops.swiglu(x),
    "biased_swiglu": lambda x: ops.swiglu(x, *parameters(x, 1)),
    "gelu": lambda x: ops.bias_gelu(x, *parameters(x, 1)),
    "erf_gelu": lambda x: ops.bias_gelu(x, *parameters(x, 1), approximate="none"),
    "softmax": lambda x: ops.scale_mask_softmax(x[None, None], None, 0.3)[0, 0],
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.arange(x.shape[0]) % FEW * 7),
}
WIDTHS = [(F32, 512), (F32, 514), (F32, 1026), (F32, 4999), (BF16, 258), (BF16, 2730), (F16, 3001), (F64, 515)]


@pytest.mark.parametrize(("dtype", "width"), WIDTHS, ids=lambda v: str(v))
@pytest.mark.parametrize("name", OPS)
def test_streamed_rows_are_those_of_a_small_result(name: str, dtype: torch.dtype, width: int) -> None:
    width += width % 2 if "swiglu" in name else 0
    per_row = width * dtype.itemsize // (2 if "swiglu" in name else 1)  # of the output
    rows = STREAMED // per_row // FEW * FEW + 2 * FEW
    x, dy = normal(FEW, width).to(dtype), None
    results = []
    for repeated in (x, x.repeat(rows // FEW, 1)):
        leaf = repeated.requires_grad_()
        y = OPS[name](leaf)
        dy = normal(*y[:FEW].shape, seed=3).to(y.dtype)
        dy = dy.repeat(y.shape[0] // FEW, *[1] * (y.ndim - 1))
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    assert results[1][1].nbytes > STREAMED
    for small, large in zip(*results):
        assert bool((bits(large).view(rows // FEW, *small.shape) == bits(small)).all())


@pytest.mark.parametrize("queries", [33, 1300])
def test_a_causal_row_ends_in_zeros_wherever_a_line_begins(queries: int) -> None:
    heads = STREAMED // (4 * queries * 777) + 1
    x = normal(1, heads, queries, 777).requires_grad_()
    y = ops.scale_mask_softmax(x, None, 0.5, True)
    hidden = torch.ones(queries, 777, dtype=torch.bool).triu(777 - queries + 1)
    want = torch.softmax((x * 0.5).masked_fill(hidden, float("-inf")), -1) if queries <= 777 else None
    dy = normal(*y.shape, seed=1)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert not y.detach()[..., hidden].any() and not dx[..., hidden].any()
    if want is not None:
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(dx, torch.autograd.grad(want, x, dy)[0])
