"""torch.compile of code that calls HAL's ops: each op is a graph break, and gradients pass through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hal
from hal import ops

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: ops.layer_norm(x, torch.ones(64), torch.zeros(64)),
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(64)),
    "swiglu": ops.swiglu,
    "scale_mask_softmax": lambda x: ops.scale_mask_softmax(x.view(1, 1, 16, 64)),
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.zeros(16, dtype=torch.int64)),
    "flash_attention": lambda x: ops.flash_attention(*[x.view(1, 16, 64)] * 3, layout="BSH", num_heads=2),
    "linear": lambda x: ops.linear(x, torch.ones(8, 64)),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    hal.use("cpu_ref")
    torch._dynamo.reset()


@pytest.mark.parametrize("op", CALLS)
def test_compiled_code_calls_ops_as_eager_code_does(op: str) -> None:
    def body(x: Tensor) -> Tensor:
        return CALLS[op](x * 2.0) + 1.0

    results = []
    for run in (body, torch.compile(body, backend="aot_eager")):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = run(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, dx))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_optimizers_ops_run_in_compiled_code_too() -> None:
    @torch.compile(backend="eager")
    def norm(x: Tensor) -> Tensor:
        return ops.l2norm([x + 1.0]) * 2.0

    assert norm(torch.zeros(16)).item() == 8.0
