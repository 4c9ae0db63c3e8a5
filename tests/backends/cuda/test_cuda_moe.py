"""The router with many experts, unaligned rows, and groups whose sizes leave rows over."""

import pytest
import torch

import hal
from hal import ops

pytestmark = pytest.mark.usefixtures("simulated")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_eight_of_64_experts_in_groups():
    logits, bias = normal(20, 64), normal(64, seed=1)
    how = {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4, "expert_bias": bias}
    probs, indices = ops.moe_router(logits, 8, **how)
    right, chosen = ops.moe_router.reference(logits, 8, **how)
    assert torch.equal(indices, chosen)
    torch.testing.assert_close(probs, right)


def test_scores_that_exceed_the_shared_memory_are_left_to_torch():
    why = hal.why(ops.moe_router, normal(2, 8192), 2)
    assert why.chosen == "cuda/torch"
    assert "8192 experts (their scores exceed the shared memory of a block)" in str(why)


def test_nan_is_never_preferred():
    logits = torch.full((1, 40), torch.nan)
    logits[0, 35], logits[0, 3] = -torch.inf, 1.0
    assert ops.moe_router(logits, 2)[1].tolist() == [[3, 35]]


@pytest.mark.parametrize("shift", [0, 1])
def test_rows_at_any_address(shift):
    x = normal(9 * 16 + 8)[shift : 9 * 16 + shift].view(9, 16)
    indices = torch.arange(18).view(9, 2) % 5
    rows, row_map, sizes = ops.permute(x, indices, 5)
    right = ops.permute.reference(x, indices, 5)
    assert torch.equal(rows, right[0]) and torch.equal(row_map, right[1]) and torch.equal(sizes, right[2])


@pytest.mark.parametrize("pin", ["cuda/grouped_mm", "cuda/loop"])
def test_rows_after_the_last_group_change_nothing_else(pin):
    x, weight, sizes = normal(7, 8), normal(3, 8, 8, seed=1), torch.tensor([2, 0, 3])
    x[5:] = 0
    with hal.policy(pin={"grouped_linear": pin}):
        y = ops.grouped_linear(x, weight, sizes)
    torch.testing.assert_close(y[:5], ops.grouped_linear.reference(x, weight, sizes)[:5])


def test_what_grouped_mm_refuses():
    why = hal.why(ops.grouped_linear, normal(4, 6), normal(2, 8, 6), torch.tensor([1, 3]))
    assert why.chosen == "cuda/loop"
    assert "rows of a multiple of 16 bytes" in str(why)


def test_sizes_that_the_host_reads_are_refused_in_a_graph():
    x, dy, total, sizes = normal(4, 6), normal(4, 8, seed=1), torch.zeros(2, 8, 6), torch.tensor([1, 3])
    with pytest.raises(hal.UnsupportedOp, match="a CUDA graph is being captured"):
        hal.backend().capture(lambda: ops.grouped_linear_wgrad(x, dy, sizes, total))
    ops.grouped_linear_wgrad(x, dy, sizes, total.zero_())
    torch.testing.assert_close(total[0], dy[:1].t() @ x[:1])
