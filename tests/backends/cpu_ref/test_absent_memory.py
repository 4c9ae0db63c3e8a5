"""Tensors without memory are refused, because a kernel would receive address 0."""

from __future__ import annotations

import pytest
import torch

import hal
from hal import ops

CALLS = {
    "layer_norm": lambda x: ops.layer_norm(x, torch.ones(64), torch.zeros(64)),
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(64)),
    "swiglu": ops.swiglu,
    "bias_gelu": lambda x: ops.bias_gelu(x, torch.zeros(64)),
    "scale_mask_softmax": lambda x: ops.scale_mask_softmax(x.view(1, 1, 16, 64)),
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.zeros(16, dtype=torch.int64)),
    "bias_dropout_add": lambda x: ops.bias_dropout_add(x, None, torch.zeros(16, 64)),
    "flash_attention": lambda x: ops.flash_attention(*[x.view(1, 16, 64)] * 3, layout="BSH", num_heads=2),
    "l2norm": lambda x: ops.l2norm([x]),
}


@pytest.fixture(autouse=True)
def backend() -> None:
    hal.use("cpu_ref")


@pytest.mark.parametrize("op", CALLS)
def test_freed_storage_is_refused(op: str) -> None:
    x = torch.randn(16, 64)
    CALLS[op](x)  # caches the dispatch decision for this shape and dtype
    x.untyped_storage().resize_(0)
    with pytest.raises(hal.ContractError, match=r"a Tensor of shape \(.*\) has no memory"):
        CALLS[op](x)


def test_storage_freed_before_the_backward_pass_is_refused() -> None:
    x = torch.randn(16, 64, requires_grad=True)
    loss = CALLS["layer_norm"](x).sum()
    x.untyped_storage().resize_(0)
    with pytest.raises(hal.ContractError, match="has no memory"):
        loss.backward()


def test_tensors_that_wrap_others_are_refused() -> None:
    CALLS["rms_norm"](torch.randn(16, 64))
    nested = torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)], layout=torch.jagged)
    with pytest.raises(hal.ContractError, match="has no memory"):
        CALLS["rms_norm"](nested)


def test_tensors_without_elements_need_no_memory() -> None:
    for op in ("layer_norm", "swiglu"):
        assert CALLS[op](torch.empty(0, 64)).shape[0] == 0
