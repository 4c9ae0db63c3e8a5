"""The wrapper around a forward and a backward function: which inputs get gradients, and what is skipped."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import hal


@pytest.fixture
def calls():
    return []


@pytest.fixture
def wrapped(toy, make_backend, calls):
    backend = make_backend()

    def bwd(residuals, dy):
        calls.append(("bwd", residuals))
        w, scale = residuals
        return dy * scale, None if w is None else dy * scale

    def forward(x, w=None, *, scale=1.0):
        calls.append(("forward", torch.is_grad_enabled()))
        return toy.reference(x, w, scale=scale), (w, scale)

    backend.impl(toy, id="a", bwd=bwd)(forward)
    with hal.activated(backend()):
        yield toy


def test_gradients_reach_the_parameters_that_have_one(wrapped):
    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    wrapped(x, w, scale=3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert torch.equal(w.grad, torch.full((3,), 3.0))


def test_an_absent_tensor_gets_none_and_plain_residuals_come_back(wrapped, calls):
    x = torch.ones(3, requires_grad=True)
    wrapped(x, scale=2.0).sum().backward()
    assert calls[-1] == ("bwd", (None, 2.0))


def test_one_of_two_inputs_may_ask_for_a_gradient(wrapped):
    w = torch.ones(3, requires_grad=True)
    wrapped(torch.ones(3), w).sum().backward()
    assert torch.equal(w.grad, torch.ones(3))


def test_without_a_gradient_autograd_is_not_involved(wrapped, calls):
    assert wrapped(torch.ones(3)).grad_fn is None
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert wrapped(x).grad_fn is None
    assert wrapped(x).grad_fn is not None
    assert [c[0] for c in calls] == ["forward"] * 3


def test_the_node_in_the_graph_is_named_after_op_and_implementation(wrapped):
    y = wrapped(torch.ones(3, requires_grad=True))
    assert "toy[a]" in y.grad_fn.name()


def test_a_saved_tensor_that_was_changed_is_noticed(wrapped):
    x, w = torch.ones(3, requires_grad=True), torch.ones(3)
    y = wrapped(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("power", [2, 1])  # 2: the gradient of the output itself requires a gradient
def test_a_second_derivative_is_refused_not_wrong(wrapped, power):
    x = torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad((wrapped(x) ** power).sum(), x, create_graph=True)
    with pytest.raises(hal.UnsupportedOp, match="implementation 'a' has no second derivative"):
        dx.square().sum().backward()
    with pytest.raises(hal.UnsupportedOp, match="second derivative"):  # a gradient penalty added to the loss
        y = wrapped(x).sum()
        (y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()).backward()


@pytest.mark.parametrize("power", [2, 1])
@pytest.mark.parametrize("wrt", ["input", "leaf", "weight"])
def test_a_second_derivative_is_refused_also_of_autograd_grad(wrapped, power, wrt):
    """autograd.grad runs only the nodes needed for the requested gradients, and passes None or a subset otherwise."""
    leaf, w = torch.full((3,), 2.0, requires_grad=True), torch.ones(3, requires_grad=True)
    x = leaf * 3.0
    y = (wrapped(x, w) ** power).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    at = {"input": x, "leaf": leaf, "weight": w}[wrt]
    if power == 2 or wrt != "input":  # with power 1, the graph of dx leads to leaf and w, but not to x
        with pytest.raises(hal.UnsupportedOp, match="second derivative"):
            torch.autograd.grad((dx * leaf).sum() + (w * x).sum(), at)
    other = torch.ones(3, requires_grad=True)
    assert torch.equal(torch.autograd.grad((dx * other).sum(), other)[0], dx)


def test_torchs_hessian_is_refused(wrapped):
    with pytest.raises(hal.UnsupportedOp, match="second derivative"):
        torch.autograd.functional.hessian(lambda x: (wrapped(x) ** 3).sum(), torch.ones(3))


def test_autograd_knows_what_an_op_has_written(isolated, make_backend):
    def fill(x: Tensor, more: Sequence[Tensor] | None = None) -> None:
        pass

    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None, edge_cases=list, mutates=("x", "more"))(fill)
    backend = make_backend()

    @backend.impl(op, id="a")
    def through_a_pointer(x, more=None):
        for t in (x, *(more or ())):
            t.numpy()[...] = 7.0

    with hal.activated(backend()):
        for at in (0, 1):
            saved, other = torch.ones(3), torch.ones(3)
            y = (torch.ones(3, requires_grad=True) * saved).sum()
            op(*((saved, None), (other, [saved]))[at])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
        with torch.inference_mode():
            op(x := torch.ones(3))
        assert x.tolist() == [7.0] * 3


@pytest.mark.parametrize("returned", [(torch.ones(3),), torch.ones(3), [torch.ones(3), None], (None, None, None)])
def test_the_wrong_number_of_gradients_is_named(toy, make_backend, returned):
    backend = make_backend()
    backend.impl(toy, id="a", bwd=lambda residuals, dy: returned)(lambda x, w=None, *, scale=1.0: (x * 1.0, ()))
    with hal.activated(backend()):
        y = toy(torch.ones(3, requires_grad=True))
        with pytest.raises(hal.HalError, match=r"'a' must return a tuple of 2 gradients, for x, w;"):
            y.sum().backward()


def test_an_output_without_gradient_is_marked_and_its_gradient_is_not_passed(isolated, make_backend):
    def pair(x: Tensor) -> "tuple[Tensor, Tensor]":
        return x * 2, x.detach() + 1

    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None, grads=("x",), nondiff_outputs=(1,))(pair)
    backend = make_backend()
    backend.impl(op, id="a", bwd=lambda residuals, dy: (2 * dy,))(lambda x: (pair(x), ()))
    with hal.activated(backend()):
        x = torch.ones(3, requires_grad=True)
        y, z = op(x)
        assert y.requires_grad
        assert not z.requires_grad
        (y * z).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 4.0))


def test_an_implementation_without_bwd_is_differentiated_by_torch(toy, make_backend):
    backend = make_backend()
    backend.impl(toy, id="a")(toy.reference)
    with hal.activated(backend()):
        x = torch.ones(3, requires_grad=True)
        toy(x, scale=5.0).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 5.0))


@pytest.mark.parametrize("wanted", [("x",), ("w",), ("x", "w")])
def test_a_backward_with_needs_is_told_which_gradients_are_wanted(toy, make_backend, wanted):
    backend, needs_args = make_backend(), []

    def bwd(residuals, dy, *, needs):
        needs_args.append(needs)
        return tuple(dy * 3 if need else None for need in needs)

    backend.impl(toy, id="a", bwd=bwd)(lambda x, w=None, *, scale=1.0: (x * 1.0, ()))
    x, w = (torch.ones(3, requires_grad=name in wanted) for name in ("x", "w"))
    with hal.activated(backend()):
        toy(x, w).sum().backward()
    assert needs_args == [("x" in wanted, "w" in wanted)]
    assert [t.grad is not None for t in (x, w)] == ["x" in wanted, "w" in wanted]
