"""The operators for mixtures of experts: what the library refuses, and calls at the limits of what HAL gives it.

Sources of the rules: aclnnGroupedMatmulV4, aclnnGroupedMatmulAdd, aclnnMoeTokenPermute, aclnnMoeTokenUnpermuteGrad and
aclnnMoeGatingTopKSoftmax (constraints). 161002 is an invalid parameter, 561002 what the tiling refuses.
"""

import pytest
import torch

import hal
from hal import ops
from hal.backends.npu import device


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype).npu()


def ends(*values):
    return torch.tensor(values).npu()


def grouped(x, weight, group_list, group_type=0, split_item=3):
    options = {"split_item": split_item, "group_type": group_type, "group_list_type": 0}
    return torch.ops.npu.npu_grouped_matmul([x], [weight], group_list=group_list, **options)[0].cpu()


ILLEGAL = [
    ("x is transposed", "561002", lambda: grouped(normal(4, 6).t(), normal(2, 4, 3), ends(2, 6))),
    ("another summed size", "561002", lambda: grouped(normal(6, 4), normal(2, 5, 3), ends(2, 6))),
    ("another number of groups", "561002", lambda: grouped(normal(6, 4), normal(3, 4, 3), ends(2, 6))),
    ("a size of 65536", "161002", lambda: grouped(normal(2, 1), normal(1, 1, 65536), ends(2))),
    ("1025 groups", "161002", lambda: grouped(normal(1, 1), normal(1025, 1, 1), ends(*[0] * 1024, 1))),
    (
        "x of the sums is not transposed",
        "561002",
        lambda: grouped(normal(3, 6), normal(6, 4), ends(2, 6), group_type=2),
    ),
    (
        "float32 is added",
        "161002",
        lambda: torch.ops.npu.npu_grouped_matmul_add_(normal(3, 4), normal(6, 3), normal(6, 4), ends(6)).cpu(),
    ),
    (
        "padded mode",
        "161002",
        lambda: torch.ops.npu.npu_moe_token_permute(normal(2, 4), ends(0, 1), None, True)[0].cpu(),
    ),
]


@pytest.mark.parametrize("what, code, call", ILLEGAL, ids=lambda v: v if isinstance(v, str) else "")
def test_what_the_library_refuses(npu, what, code, call):
    with pytest.raises(RuntimeError, match=code):
        call()


def test_rows_after_the_last_group_are_given_to_it(npu):
    x, weight, sizes = normal(6, 8), normal(3, 4, 8), torch.tensor([2, 0, 3]).npu()
    x[5] = 0
    y = ops.grouped_linear(x, weight, sizes).cpu()
    right = ops.grouped_linear.reference(x.cpu(), weight.cpu(), sizes.cpu())
    torch.testing.assert_close(y[:5], right[:5])


def test_dropped_assignments_have_no_row_and_no_gradient(npu):
    x, indices = normal(4, 8).requires_grad_(), torch.tensor([[0, -1], [1, 0], [-1, -1], [2, 1]]).npu()
    rows, row_map, sizes = ops.permute(x, indices, 3)
    assert row_map.cpu().tolist() == [[0, -1], [2, 1], [-1, -1], [4, 3]] and sizes.cpu().tolist() == [2, 2, 1]
    assert not rows[5:].any()
    y = ops.unpermute(rows, row_map)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.cpu()[:, 0].tolist() == [1, 2, 0, 2]


def test_which_implementation_runs(npu):
    why = hal.why(ops.moe_router, normal(4, 8), 2, score_function="sigmoid")
    assert why.chosen == "npu/torch"
    assert hal.why(ops.moe_router, normal(4, 8), 2, pre_softmax=True).chosen == "npu/gating_top_k_softmax"


def test_implementations_that_this_release_cannot_run_are_left_out(npu, monkeypatch):
    assert device.provided("npu/gating_top_k_softmax") and device.provided("npu/grouped_matmul")
    assert npu.capabilities().graphs
    monkeypatch.setitem(device._NEEDED, "npu/gating_top_k_softmax", "npu_of_the_future")
    assert not device.provided("npu/gating_top_k_softmax")
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    assert not device.provided("npu/grouped_matmul") and not npu.capabilities().graphs
