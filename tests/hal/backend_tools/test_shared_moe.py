"""The router, permute, unpermute and grouped products of two functions each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hal import backend_tools, ops
from hal.core.adapters import require_same_signature


def router(score_function: str, topk: int = 2, **given: Any) -> backend_tools.RouterSpec:
    return backend_tools.router_spec(
        ops.moe_router.Call(torch.empty(3, 8), topk, score_function=score_function, **given)
    )


def test_a_routers_spec_replaces_names_by_numbers() -> None:
    assert router("softmax", 3, scaling_factor=2) == (3, 0, 0, 2.0, 0, 0)
    assert router("softmax", num_groups=4, group_topk=2) == (2, 4, 2, 1.0, 0, 0)
    assert router("softmax", pre_softmax=True) == (2, 0, 0, 1.0, 0, 1)
    assert router("softmax", pre_softmax=True, num_groups=4, group_topk=2) == (2, 4, 2, 1.0, 2, 1)
    assert router("sigmoid") == (2, 0, 0, 1.0, 0, 3)
    assert router("sigmoid", expert_bias=torch.zeros(8)) == (2, 0, 0, 1.0, 1, 3)
    assert router("sigmoid", num_groups=4, group_topk=2) == (2, 4, 2, 1.0, 1, 3)
    assert router("sigmoid", 1).probability == router("sinkhorn", 1).probability == 2
    assert router("sinkhorn").probability == 1
    assert router("sinkhorn", pre_softmax=True).selection == 0


def _probabilities(logits: Tensor, indices: Tensor, spec: backend_tools.RouterSpec) -> Tensor:
    """What RouterSpec's docstring says of `probability`, times the scale."""
    chosen = logits.gather(1, indices)
    sigmoids = chosen.sigmoid()
    kinds = (
        chosen.softmax(-1),
        logits.softmax(-1).gather(1, indices),
        sigmoids,
        sigmoids / sigmoids.sum(-1, keepdim=True),
    )
    return kinds[spec.probability] * spec.scale


def _route(
    logits: Tensor,
    bias: Tensor | None,
    probs: Tensor,
    indices: Tensor,
    given: bool,
    spec: backend_tools.RouterSpec,
) -> None:
    assert all(t.is_contiguous() for t in (logits, probs, indices)) and (bias is None or bias.is_contiguous())
    if not given:
        scores = (logits, logits.sigmoid(), logits.softmax(-1))[spec.selection]
        indices.copy_((scores if bias is None else scores + bias).topk(spec.topk).indices)
    probs.copy_(_probabilities(logits, indices, spec))


def _route_bwd(
    logits: Tensor, indices: Tensor, dprobs: Tensor, dlogits: Tensor, spec: backend_tools.RouterSpec
) -> None:
    assert dprobs.is_contiguous()
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        dlogits.copy_(torch.autograd.grad(_probabilities(leaf, indices, spec), leaf, dprobs)[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pre_softmax": True},
        {"score_function": "sigmoid", "scaling_factor": 2.5},
        {"score_function": "sigmoid", "expert_bias": torch.linspace(-1.0, 1.0, 16)[::2]},
        {"indices": torch.stack([torch.arange(5), torch.arange(5) + 3]).t()},
    ],
    ids=["softmax", "pre_softmax", "sigmoid", "bias", "indices"],
)
def test_a_router_of_two_functions_is_the_reference(options: dict[str, Any]) -> None:
    forward, backward = backend_tools.router_from(_route, _route_bwd)
    require_same_signature(ops.moe_router, forward, "moe_router")
    logits = torch.randn(8, 5).t()
    (probs, indices), residuals = forward(logits, 2, **options)
    leaf = logits.detach().requires_grad_()
    expected = ops.moe_router.reference(leaf, 2, **options)
    torch.testing.assert_close((probs, indices), expected)
    dprobs = torch.randn(2, 5).t()
    torch.testing.assert_close(backward(residuals, dprobs), torch.autograd.grad(expected[0], leaf, dprobs))


def test_sinkhorns_choice_is_given_to_the_router_and_no_tokens_run_nothing() -> None:
    forward, backward = backend_tools.router_from(_route, _route_bwd)
    logits = torch.randn(6, 4)
    (probs, indices), _ = forward(logits, 2, score_function="sinkhorn")
    torch.testing.assert_close((probs, indices), ops.moe_router.reference(logits, 2, score_function="sinkhorn"))

    def never(*arguments: object) -> None:
        raise AssertionError

    forward, backward = backend_tools.router_from(never, never)
    (probs, indices), residuals = forward(torch.empty(0, 4), 2)
    assert probs.shape == indices.shape == (0, 2) and indices.dtype == torch.int64
    assert backward(residuals, probs)[0].shape == (0, 4)


INDICES = torch.tensor([[2, 0], [-1, 1], [0, 2]])


def _gather(rows: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    assert rows.is_contiguous() and row_map.is_contiguous()
    return ops.unpermute.reference(rows, row_map, probs=probs)


@pytest.mark.parametrize("capacity", [None, 1, 3])
def test_the_gradient_of_permute_gathers_rows_and_probabilities(capacity: int | None) -> None:
    x, probs = torch.randn(3, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    rows, row_map, _, permuted = ops.permute.reference(x, INDICES, 3, probs=probs, capacity=capacity)
    assert torch.equal(backend_tools.permuted_probs(probs, row_map, len(rows)), permuted)
    drows, dpermuted = torch.randn(4, len(rows)).t(), torch.randn(len(rows))
    expected = torch.autograd.grad((rows, permuted), (x, probs), (drows, dpermuted))
    backward = backend_tools.permute_backward(_gather)
    torch.testing.assert_close(backward((row_map,), drows, dpermuted), expected)
    dx, none = backward((row_map,), drows)
    torch.testing.assert_close(dx, expected[0])
    assert none is None


@pytest.mark.parametrize("weighted", [True, False])
def test_unpermute_of_two_functions_is_the_reference(weighted: bool) -> None:
    def gradients(rows: Tensor, row_map: Tensor, probs: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        assert all(t.is_contiguous() for t in (rows, row_map, dy))
        leaves = [t.detach().requires_grad_() for t in (rows, probs) if t is not None]
        with torch.enable_grad():
            y = ops.unpermute.reference(leaves[0], row_map, probs=None if probs is None else leaves[1])
        drows, *dprobs = torch.autograd.grad(y, leaves, dy)
        assert probs is None or (probs.is_contiguous() and probs.dtype == torch.float32)
        return drows, dprobs[0] if dprobs else None

    forward, backward = backend_tools.unpermute_from(_gather, gradients)
    require_same_signature(ops.unpermute, forward, "unpermute")
    row_map = ops.permute.reference(torch.empty(3, 4), INDICES, 3)[1].t().contiguous().t()
    rows, probs = torch.randn(4, 6).t(), torch.rand(2, 3).bfloat16().t() if weighted else None
    y, residuals = forward(rows, row_map, probs=probs)
    leaves = [t.detach().requires_grad_() for t in (rows, probs) if t is not None]
    expected = ops.unpermute.reference(leaves[0], row_map, probs=leaves[1] if weighted else None)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(4, 3).t()
    drows, dprobs = backward(residuals, dy)
    wanted = torch.autograd.grad(expected, leaves, dy)
    torch.testing.assert_close(drows, wanted[0])
    if weighted:
        torch.testing.assert_close(dprobs, wanted[1])
    else:
        assert dprobs is None


def test_groups_without_rows_are_passed_over() -> None:
    groups = list(backend_tools.filled_groups([2, 0, 3, 0]))
    assert groups == [(0, slice(0, 2)), (2, slice(2, 5))]
