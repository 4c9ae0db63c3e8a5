"""Registration: what is refused at once, and the honest defaults."""

import pytest
import torch

import hal


def test_implementations_keep_their_order(toy, make_backend):
    backend = make_backend()
    backend.impl(toy, id="a")(lambda x, w=None, *, scale=1.0: x)
    backend.impl(toy, id="b")(lambda x, w=None, *, scale=1.0: x)
    assert [i.id for i in backend.impls["toy"]] == ["a", "b"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w=None: x,
        lambda x, weight=None, *, scale=1.0: x,
        lambda x, w=None, scale=1.0: x,
        lambda x, w=None, *, scale=2.0: x,
        lambda *args, **kwargs: args[0],
    ],
    ids=["missing", "renamed", "positional", "other default", "catch-all"],
)
def test_another_signature_is_refused_and_both_are_shown(toy, make_backend, function):
    with pytest.raises(hal.HalError, match=r"(?s)implementation 'a' must have the signature.*reference: toy.*found:"):
        make_backend().impl(toy, id="a")(function)
    with pytest.raises(hal.HalError, match="why_not of implementation 'a' must have the signature"):
        make_backend().impl(toy, id="a", why_not=function)(toy.reference)


def test_ids_are_unique_per_op_and_reference_is_reserved(toy, make_backend):
    backend = make_backend()
    backend.impl(toy, id="a")(toy.reference)
    with pytest.raises(hal.HalError, match="'a' of op 'toy' is registered twice or reserved"):
        backend.impl(toy, id="a")(toy.reference)
    with pytest.raises(hal.HalError, match="twice or reserved"):
        backend.impl(toy, id="reference")(toy.reference)


def test_a_backward_needs_an_op_with_gradients(isolated, make_backend):
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x

    op = hal.op(check=lambda x: None, tol={}, samples=lambda: None)(counted)
    with pytest.raises(hal.HalError, match="op 'counted' has no gradients, so it takes no bwd"):
        make_backend().impl(op, id="a", bwd=lambda residuals, dy: ())(counted)


def test_a_subclass_starts_from_its_parents_implementations_and_adds_its_own(toy, make_backend):
    parent = make_backend()
    parent.impl(toy, id="a")(toy.reference)
    child = type("Child", (parent,), {"name": "child"})
    child.impl(toy, id="b")(toy.reference)
    assert [i.id for i in child.impls["toy"]] == ["a", "b"]
    assert [i.id for i in parent.impls["toy"]] == ["a"]


def test_the_defaults_invent_nothing(make_backend):
    backend = make_backend()()
    assert backend.memory_stats() == {}
    assert backend.simulated is False
    assert backend.build() is None
    with backend.stream(), backend.profile_range("a range"):
        pass


def test_a_backend_must_have_the_four_methods():
    class Lazy(hal.Backend):
        name = "lazy"

    with pytest.raises(TypeError, match=r"abstract methods? .*comm.*device.*probe.*synchronize"):
        Lazy()


def test_options_are_the_constructors_parameters(make_backend):
    base = make_backend()

    class Optioned(base):
        name = "optioned"

        def __init__(self, simulate=False, lanes=4):
            self.simulate, self.lanes = simulate, lanes

    assert Optioned(lanes=2).options() == {"simulate": False, "lanes": 2}


def test_an_op_is_defined_once_and_its_declarations_are_checked(toy):
    with pytest.raises(hal.HalError, match="op 'toy' is defined twice"):
        hal.op(check=toy.check, tol={}, samples=lambda: None)(toy.reference)

    def another(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(hal.HalError, match=r"grads/mutates name \['y'\]"):
        hal.op(check=lambda x: None, tol={}, samples=lambda: None, grads=("y",))(another)
    with pytest.raises(hal.HalError, match="check of op 'another' must have the signature"):
        hal.op(check=lambda y: None, tol={}, samples=lambda: None)(another)
