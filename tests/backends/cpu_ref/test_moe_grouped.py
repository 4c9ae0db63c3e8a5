"""Grouped products beyond the kit's sizes: pieces of the summed dimension, groups at the kernel's limit."""

import pytest
import torch

import hal
from hal import ops

SIZES = (32, 0, 1, 33, 6, 7, 64, 5, 0, 13)


@pytest.fixture(autouse=True)
def backend():
    with hal.activated(hal.use("cpu_ref")):
        yield


def arguments(n_in, n_out, dtype, sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), n_in, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(sizes), n_out, n_in, generator=generator, dtype=torch.float64) * n_in**-0.5
    return x.to(dtype), weight.to(dtype), torch.tensor(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "n_in, n_out", [(1100, 70), (2048, 33), (544, 602), (48, 1000), (31, 3), (1, 1), (544, 608), (32, 32)]
)
def test_forward_and_gradients_are_those_of_the_reference_in_float64(n_in, n_out, dtype):
    x, weight, sizes = arguments(n_in, n_out, dtype)
    x.requires_grad_()
    weight.requires_grad_()
    y = ops.grouped_linear(x, weight, sizes)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    got = [y, *torch.autograd.grad(y, (x, weight), dy)]
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    right = ops.grouped_linear.reference(*exact, sizes)
    for name, mine, other in zip(("y", "dx", "dweight"), got, [right, *torch.autograd.grad(right, exact, dy.double())]):
        assert mine.dtype == dtype
        error = (mine.double() - other).abs().max() / other.abs().max()
        assert error < 32 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("n_in, dtype", [(1100, torch.float32), (1056, torch.bfloat16), (1057, torch.bfloat16)])
def test_results_do_not_depend_on_the_number_of_threads(n_in, dtype):
    x, weight, sizes = arguments(n_in, 224, dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, before):
            torch.set_num_threads(threads)
            leaf = x.clone().requires_grad_()
            y = ops.grouped_linear(leaf, weight, sizes)
            results.append((y.detach()[:32], torch.autograd.grad(y.sum(), leaf)[0][:32]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("sizes", [[5, 6], [-1, 3]])
def test_sizes_that_do_not_fit_are_refused(sizes):
    x, weight = torch.randn(10, 4), torch.randn(2, 3, 4)
    with pytest.raises(hal.ContractError, match="group_sizes from 0 whose sum is at most 10; found"):
        ops.grouped_linear(x, weight, torch.tensor(sizes))
    with pytest.raises(hal.ContractError, match="group_sizes from 0 whose sum is at most 10; found"):
        ops.grouped_linear_wgrad(x, torch.randn(10, 3), torch.tensor(sizes), torch.zeros(2, 3, 4))


def test_rows_after_the_last_group_change_nothing_else():
    x, weight, sizes = arguments(64, 48, torch.float32)
    more = torch.cat([x, torch.full((9, 64), torch.nan)])
    assert torch.equal(ops.grouped_linear(more, weight, sizes)[: len(x)], ops.grouped_linear(x, weight, sizes))
    sums = torch.zeros(2, *weight.shape)
    dy = torch.randn(len(more), 48)
    ops.grouped_linear_wgrad(more, dy, sizes, sums[0])
    ops.grouped_linear_wgrad(x, dy[: len(x)], sizes, sums[1])
    assert torch.equal(*sums)


def test_a_frozen_weight_costs_no_gradient(monkeypatch):
    from hal.backends.cpu_ref import moe_grouped

    x, weight, sizes = arguments(64, 48, torch.float32)
    monkeypatch.setattr(moe_grouped, "_wgrad", None)
    y = ops.grouped_linear(x.requires_grad_(), weight, sizes)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
