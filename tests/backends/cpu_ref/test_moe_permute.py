"""permute and unpermute beyond the kit's sizes: non-temporal stores, rows at any address, refused maps."""

import pytest
import torch

import hal
from hal import ops


@pytest.fixture(autouse=True)
def backend():
    with hal.activated(hal.use("cpu_ref")):
        yield


@pytest.mark.parametrize("capacity", [None, 1000])
@pytest.mark.parametrize("h, dtype", [(1024, torch.float32), (515, torch.bfloat16), (1030, torch.float64)])
def test_large_calls_are_those_of_the_reference(h, dtype, capacity):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, h, generator=generator, dtype=torch.float64).to(dtype)
    probs = torch.rand(2000, 3, generator=generator)
    indices = torch.randint(-1, 8, (2000, 3), generator=generator)
    results = []
    for permute, unpermute in ((ops.permute, ops.unpermute), (ops.permute.reference, ops.unpermute.reference)):
        leaf, weights = x.clone().requires_grad_(), probs.to(x.dtype).requires_grad_()
        rows, row_map, sizes, permuted = permute(leaf, indices, 8, probs=weights, capacity=capacity)
        y = unpermute(rows, row_map, probs=weights)
        grads = torch.autograd.grad(y.sum() + (permuted * torch.arange(len(permuted))).sum(), (leaf, weights))
        results.append((rows.detach(), row_map, sizes, permuted.detach(), y.detach(), *grads))
    copies, sums = ([r[:4] for r in results], [r[4:] for r in results])
    assert all(torch.equal(mine, right) for mine, right in zip(*copies))
    for mine, right in zip(*sums):
        assert mine.dtype == right.dtype
        assert (mine - right).abs().max() <= 8 * torch.finfo(dtype).eps * right.abs().max()


def test_an_expert_that_does_not_exist_is_refused():
    with pytest.raises(hal.ContractError, match=r"expected indices from -1 to 3; found some from \(0, 4\)"):
        ops.permute(torch.randn(2, 3), torch.tensor([[0, 4], [1, 2]]), 4)


def test_a_row_that_does_not_exist_is_refused():
    with pytest.raises(hal.ContractError, match="expected a row_map of 3 rows; found 3 in it"):
        ops.unpermute(torch.randn(3, 5), torch.tensor([[0, 3]]))


def test_rows_beyond_the_capacity_are_dropped_in_the_order_of_tokens():
    rows, row_map, sizes = ops.permute(torch.arange(6.0)[:, None], torch.zeros(6, 1, dtype=torch.int64), 2, capacity=4)
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert row_map[:, 0].tolist() == [0, 1, 2, 3, -1, -1] and sizes.tolist() == [4, 4]
