"""Registration: what is refused immediately, and the defaults."""

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
        lambda w=None, *, scale=1.0: w,
        lambda x, weight=None, *, scale=1.0: x,
        lambda x, w=None, scale=1.0: x,
        lambda x, w=None, *, scale=2.0: x,
        lambda *args, **kwargs: args[0],
    ],
    ids=["lacks x", "renamed", "positional", "other default", "catch-all"],
)
def test_another_signature_is_refused_and_both_are_shown(toy, make_backend, function):
    with pytest.raises(hal.HalError, match=r"(?s)implementation 'a' must have the signature.*reference: toy.*found:"):
        make_backend().impl(toy, id="a")(function)


@pytest.fixture
def hinted(isolated):
    """hinted(x, *, scale=1.0, may_overwrite=False) = scale * x; the last parameter is a hint, added later."""

    def reference(x: torch.Tensor, *, scale: float = 1.0, may_overwrite: bool = False) -> torch.Tensor:
        return x * scale

    reference.__name__ = "hinted"
    return hal.op(
        check=lambda call: None,
        tol={},
        samples=lambda: None,
        grads=("x",),
        hints=("may_overwrite",),
    )(reference)


def test_an_implementation_from_before_a_hint_goes_on_working(hinted, make_backend):
    backend = make_backend()
    backend.impl(
        hinted,
        id="old",
        why_not=lambda call: ["too much"] if call.scale > 9 else [],
        bwd=lambda residuals, dy: (dy * residuals[0],),
    )(lambda x, *, scale=1.0: (x * scale, (scale,)))
    x = torch.ones(2, requires_grad=True)
    with hal.activated(backend()):
        hinted(x, scale=3.0, may_overwrite=True).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 3.0))
        assert hal.why(hinted, x, scale=10.0, may_overwrite=True).reasons == {"old": ("too much",)}


def test_an_implementation_that_knows_a_hint_is_given_it(hinted, make_backend):
    backend, given = make_backend(), []

    def knows(x, *, scale=1.0, may_overwrite=False):
        given.append(may_overwrite)
        return x * scale

    backend.impl(hinted, id="new")(knows)
    with hal.activated(backend()):
        hinted(torch.ones(1), may_overwrite=True)
        hinted(torch.ones(1))
    assert given == [True, False]


def test_calls_with_a_parameter_that_an_implementation_lacks_are_refused(toy, make_backend):
    backend = make_backend()
    backend.impl(toy, id="old", why_not=lambda call: ["dtype"] if call.x.dtype == torch.float64 else [])(
        lambda x: x * 2
    )
    x = torch.ones(2)
    with hal.activated(backend()):
        assert torch.equal(toy(x), 2 * x) and torch.equal(toy(x, None, scale=1.0), 2 * x)
        reasons = hal.why(toy, x, x, scale=3.0).reasons["old"]
        assert reasons == tuple(f"{name} (the implementation has no such parameter)" for name in ("w", "scale"))
        assert hal.why(toy, x.double()).reasons == {"old": ("dtype",)}
        with pytest.raises(hal.UnsupportedOp, match="scale \\(the implementation has no such parameter"):
            toy(x, scale=3.0)


def test_a_backward_of_an_implementation_that_lacks_a_parameter(hinted, make_backend):
    backend = make_backend()
    backend.impl(hinted, id="old", bwd=lambda residuals, dy: (dy * 5,))(lambda x: (x * 5, ()))
    x = torch.ones(2, requires_grad=True)
    with hal.activated(backend()):
        hinted(x, may_overwrite=True).sum().backward()
        assert hal.why(hinted, x, scale=2.0).chosen is None
    assert torch.equal(x.grad, torch.full((2,), 5.0))


def test_a_package_still_loads_after_its_op_has_gained_a_parameter(isolated, make_backend):
    def declared(reference):
        hal.OPS.pop("growing", None)
        reference.__name__ = "growing"
        return hal.op(check=lambda call: None, tol={}, samples=lambda: None)(reference)

    def first(x: torch.Tensor) -> torch.Tensor:
        return x

    def second(x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return x + shift

    def package(op):
        backend = make_backend()
        backend.impl(op, id="acme", why_not=hal.by_metadata(lambda call: []))(lambda x: x.clone())
        return backend()

    for op in (declared(first), declared(second)):
        with hal.activated(package(op)):
            assert op(torch.ones(1)).item() == 1
    with hal.activated(package(op)):
        assert hal.why(op, torch.ones(1), shift=1.0).reasons == {
            "acme": ("shift (the implementation has no such parameter)",)
        }


@pytest.mark.parametrize("function", [lambda x, w: [], lambda *, call: []])
def test_why_not_takes_one_argument(toy, make_backend, function):
    with pytest.raises(hal.HalError, match=r"why_not of implementation 'a' takes .*; it must take one"):
        make_backend().impl(toy, id="a", why_not=function)(toy.reference)


def test_a_hint_has_a_default_and_a_name(isolated):
    def positional(x: torch.Tensor, fast: bool = False) -> torch.Tensor:
        return x

    declare = {"check": lambda call: None, "tol": {}, "samples": lambda: None}
    with pytest.raises(hal.HalError, match="the hint fast must be keyword-only and have a default"):
        hal.op(hints=("fast",), **declare)(positional)
    with pytest.raises(hal.HalError, match=r"grads/mutates/hints/choice name \['slow'\]"):
        hal.op(hints=("slow",), **declare)(positional)


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

    with pytest.raises(hal.HalError, match=r"grads/mutates/hints/choice name \['y'\]"):
        hal.op(check=lambda call: None, tol={}, samples=lambda: None, grads=("y",))(another)
    with pytest.raises(hal.HalError, match=r"check of op 'another' takes \(x, y\); it must take one argument"):
        hal.op(check=lambda x, y: None, tol={}, samples=lambda: None)(another)


def test_a_process_has_the_device_that_its_launcher_gave_it(make_backend, monkeypatch):
    backend = make_backend()()
    monkeypatch.setattr(backend, "probe", lambda: hal.Probe(True, 4, "four"))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("HAL_DEVICES", raising=False)
    assert backend.local_index() == 2
    monkeypatch.setenv("HAL_DEVICES", "3,1,0")
    assert backend.local_index() == 0
    for listed in ("3,1", "3,1,x"):
        monkeypatch.setenv("HAL_DEVICES", listed)
        with pytest.raises(hal.HalError, match=f"HAL_DEVICES is '{listed}'; process 2 of this machine needs a number"):
            backend.local_index()
    monkeypatch.setattr(backend, "probe", lambda: hal.Probe(True, 1, "one"))
    assert backend.local_index() == 0
