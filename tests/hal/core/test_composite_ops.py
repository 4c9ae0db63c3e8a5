"""Composite ops: a backend runs its own implementation, or else the composition of other ops."""

import pytest
import torch
from torch import Tensor

import hal
from hal import Sample, TensorSpec, Tol
from hal.testing import run


@pytest.fixture
def twice(toy):
    """twice(x, w=None) = toy(toy(x, w, scale=2), w), composed of two calls of toy."""

    def reference(x: Tensor, w: Tensor | None = None) -> Tensor:
        """2 x + 3 w."""
        return 2 * x if w is None else 2 * x + 3 * w

    def decompose(x, w=None):
        return toy(toy(x, w, scale=2.0), w)

    reference.__name__ = "twice"
    return hal.op(
        check=lambda call: None,
        tol={torch.float32: Tol(1e-6, 1e-6)},
        samples=lambda: None,
        edge_cases=lambda: [Sample((TensorSpec((2, 3)), TensorSpec((2, 3))))],
        grads=("x", "w"),
        decompose=decompose,
        parts=(toy,),
    )(reference)


X = torch.ones(2)


def test_without_an_implementation_the_composition_runs_and_has_gradients(toy, twice, make_backend):
    backend = make_backend()
    backend.impl(toy, id="a", bwd=lambda residuals, dy: (dy * residuals[0], dy * residuals[0]))(
        lambda x, w=None, *, scale=1.0: (toy.reference(x, w, scale=scale), (scale,))
    )
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with hal.activated(backend()):
        y = twice(x, w)
        y.sum().backward()
        assert hal.why(twice, x, w).chosen == "composition"
        assert str(hal.why(twice, x, w)) == "twice on backend 'cpu_toy':\n  composition of toy: chosen"
    assert y.tolist() == [5.0, 5.0]
    assert (x.grad.tolist(), w.grad.tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_an_implementation_is_preferred_and_its_refusals_lead_to_the_composition(toy, twice, make_backend):
    backend = make_backend()
    backend.impl(toy, id="a")(toy.reference)
    backend.impl(twice, id="fused", why_not=lambda call: [] if call.w is None else ["w"])(lambda x, w=None: x + 100)
    with hal.activated(backend()):
        assert twice(X).tolist() == [101.0, 101.0]
        assert twice(X, X).tolist() == [5.0, 5.0]
        assert hal.why(twice, X, X).reasons == {"fused": ("w",), "composition": ()}
    with hal.activated(backend(), pin={"twice": "composition"}):
        assert twice(X).tolist() == [2.0, 2.0]


def test_a_composition_whose_parts_are_missing_is_refused_with_their_names(toy, twice, make_backend):
    refusal = "composition of toy: refuses: toy has no implementation"
    with hal.activated(make_backend()()), pytest.raises(hal.UnsupportedOp, match=refusal):
        twice(X)
    with hal.activated(make_backend()(), fallback="reference"):
        assert twice(X).tolist() == [2.0, 2.0]


def test_with_the_reference_fallback_only_the_missing_parts_run_their_references(isolated, toy, make_backend):
    def other(x: Tensor) -> Tensor:
        return x + 1

    def both(x: Tensor) -> Tensor:
        return x + 2

    declare = {"check": lambda call: None, "tol": {}, "samples": lambda: None}
    other_op = hal.op(**declare)(other)
    op = hal.op(decompose=lambda x: other_op(toy(x)), parts=(toy, other_op), **declare)(both)
    backend = make_backend()
    backend.impl(toy, id="a")(lambda x, w=None: x + 100)
    with hal.activated(backend()), pytest.raises(hal.UnsupportedOp, match="other has no implementation"):
        op(X)
    with hal.activated(backend(), fallback="reference"), pytest.warns(RuntimeWarning, match="other runs its reference"):
        assert op(X).tolist() == [102.0, 102.0]
        assert hal.why(op, X).chosen == "composition"
    assert (hal.fallbacks().get("other"), hal.fallbacks().get("both")) == (1, None)


def test_a_composition_needs_the_parts_of_the_call_only(isolated, toy, make_backend):
    def maybe(x: Tensor, twice: bool = False) -> Tensor:
        return 2 * x if twice else x

    def negative(x: Tensor) -> Tensor:
        return -x

    declare = {"check": lambda call: None, "tol": {}, "samples": lambda: None}
    missing = hal.op(**declare)(negative)
    op = hal.op(
        decompose=lambda x, twice=False: toy(x, scale=2.0) if twice else missing(missing(x)),
        parts=(toy, missing),
        parts_of=lambda call: [toy] if call.twice else [missing],
        **declare,
    )(maybe)
    backend = make_backend()
    backend.impl(toy, id="a")(toy.reference)
    with hal.activated(backend()):
        assert op(X, True).tolist() == [2.0, 2.0]
        assert hal.why(op, X, True).parts == ("toy",)
        with pytest.raises(hal.UnsupportedOp, match="composition of negative: refuses: negative has no implementation"):
            op(X)


def test_the_kit_compares_a_composition_and_declines_calls_whose_parts_are_refused(toy, twice, make_backend):
    for backend, status in ((make_backend(), "pass"), (make_backend(), "fail"), (make_backend(), "declined")):
        why_not = (lambda call: ["not today"]) if status == "declined" else None
        backend.impl(toy, id="a", why_not=why_not)(_scaled(toy, 1.001 if status == "fail" else 1.0))
        rows = [r for r in run(backend(), ops=["twice"], examples=0).rows if r.implementation == "composition"]
        assert {r.status for r in rows} == ({"fail"} if status == "declined" else {status})
        if status == "declined":
            assert "ran no sample at all" in rows[0].message and "toy on backend" in rows[0].message


def _scaled(toy, factor):
    return lambda x, w=None, *, scale=1.0: factor * toy.reference(x, w, scale=scale)


def test_a_composition_is_declared_with_its_parts(toy):
    def thrice(x: Tensor) -> Tensor:
        return 3 * x

    declare = {"check": lambda call: None, "tol": {}, "samples": lambda: None}
    with pytest.raises(hal.HalError, match="op 'thrice': parts are the ops that decompose calls, which is not given"):
        hal.op(parts=(toy,), **declare)(thrice)
    with pytest.raises(hal.HalError, match="decompose of op 'thrice' must have the signature of the reference"):
        hal.op(decompose=lambda y: y, parts=(toy,), **declare)(thrice)


def test_a_composition_of_torch_functions_needs_no_op(isolated, make_backend):
    def thrice(x: Tensor) -> Tensor:
        return 3 * x

    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None, decompose=lambda x: x + x + x)(thrice)
    with hal.activated(make_backend()()):
        assert op(X).tolist() == [3.0, 3.0]
        assert str(hal.why(op, X)) == "thrice on backend 'cpu_toy':\n  composition of torch functions: chosen"


def test_an_id_of_a_composition_is_reserved(twice, make_backend):
    with pytest.raises(hal.HalError, match="registered twice or reserved"):
        make_backend().impl(twice, id="composition")(twice.reference)


def test_an_implementation_for_another_version_of_an_op_stays_registered_and_refuses(isolated, make_backend):
    def moved(x: Tensor, shift: Tensor) -> Tensor:
        return x + shift

    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None, version=2)(moved)
    backend = make_backend()
    backend.impl(op, id="old")(lambda x: x)  # the signature of version 1
    backend.impl(op, id="new", version=2)(lambda x, shift: x + shift)
    with hal.activated(backend()):
        assert op(X, X).tolist() == [2.0, 2.0]
        assert hal.why(op, X, X).reasons == {"old": ("written for version 1 of moved, which has version 2",), "new": ()}
