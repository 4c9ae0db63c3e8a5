"""The schema of an op: equivalent type hints give the same schema, and unknown types are refused by name."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, List, Literal, Optional, Union  # noqa: F401, UP035

import pytest
import torch
from torch import Tensor

import hal
from hal import Comm, Rng, ops  # noqa: F401
from hal.core.signature import Schema

# Names that are used only in the hints below, which are strings, must still be imported.

if TYPE_CHECKING:
    from decimal import Decimal  # noqa: F401

MaybeTensor = Optional[Tensor]  # noqa: UP045
X = torch.ones(2)


def schema(hint: Any, returns: Any = "Tensor") -> Schema:
    """The schema of `probe(x: hint) -> returns`."""

    def probe(x):  # type: ignore[no-untyped-def]
        return x

    probe.__annotations__ = {"x": hint, "return": returns}
    return Schema.of(probe)


@pytest.mark.parametrize(
    "hints, kind, optional, spelling",
    [
        (["Tensor", "torch.Tensor", Tensor, Annotated[Tensor, "[s, b, h]"]], "tensor", False, "Tensor"),
        (
            [
                "Tensor | None",
                "torch.Tensor | None",
                "None | Tensor",
                "Optional[Tensor]",
                "Optional[torch.Tensor]",
                "typing.Optional[torch.Tensor]",
                "Union[Tensor, None]",
                "Union[None, torch.Tensor]",
                "MaybeTensor",
                "MaybeTensor | None",
                Optional["Tensor"],
                MaybeTensor,
            ],
            "tensor",
            True,
            "Tensor | None",
        ),
        (
            ["Sequence[Tensor]", "typing.Sequence[torch.Tensor]", "list[Tensor]", "List[Tensor]", "tuple[Tensor, ...]"],
            "tensors",
            False,
            "Sequence[Tensor]",
        ),
        (["list[torch.Tensor] | None", "Optional[Sequence[Tensor]]"], "tensors", True, "Sequence[Tensor] | None"),
        (["Sequence[Tensor | None]", "list[Optional[Tensor]]"], "tensors", False, "Sequence[Tensor | None]"),
        (["Rng", "hal.Rng", hal.Rng], "rng", False, "Rng"),
        (["Rng | None", "Optional[hal.Rng]"], "rng", True, "Rng | None"),
        (["Comm", "hal.Comm"], "comm", False, "Comm"),
        (["hal.Comm | None", "Optional[Comm]"], "comm", True, "Comm | None"),
        (["int", int], "plain", False, "int"),
        (["Optional[float]", "float | None"], "plain", True, "float | None"),
        (["Sequence[int]", "tuple[int, int]", "tuple[int, ...]", "list[int]"], "plain", False, "Sequence[int]"),
        (["torch.device | None"], "plain", True, "device | None"),
    ],
)
def test_every_spelling_of_a_type_is_the_same_parameter(
    hints: list[Any], kind: str, optional: bool, spelling: str
) -> None:
    parameters = [schema(hint).parameters["x"] for hint in hints]
    assert all(p == parameters[0] for p in parameters)
    assert (parameters[0].kind, parameters[0].optional, parameters[0].type_name) == (kind, optional, spelling)


def test_an_op_names_its_parameters() -> None:
    def summed(x: Tensor, *rest: Tensor) -> Tensor:
        return x

    def scaled(x: Tensor, **rest: float) -> Tensor:
        return x

    for reference, named in ((summed, r"\*rest"), (scaled, r"\*\*rest")):
        with pytest.raises(hal.HalError, match=f"op '{reference.__name__}': an op cannot take {named}"):
            Schema.of(reference)


@pytest.mark.parametrize(
    "hint, accepted, refused",
    [
        ("Tensor", [X], [None, [X], 1.0]),
        ("Tensor | None", [X, None], [[X]]),
        ("Sequence[Tensor]", [[X], (X, X), []], [None, X, [X, None], [1.0]]),
        ("Sequence[Tensor] | None", [[X], None], [X]),
        ("Sequence[Tensor | None]", [[X, None]], [None, [1]]),
        ("Rng", [Rng(1)], [None, 1]),
        ("Comm | None", [hal.SingleRankComm(), None], [1]),
        ("int", [1, True], [1.0, None, "1"]),
        ("float", [1, 1.0], [None, "1"]),
        ("bool", [True], [1, None]),
        ("Sequence[int]", [[1], (1, 2), range(3), torch.Size([2])], [1, ["a"], None]),
        ("Sequence[str]", [["a"], ()], ["a", [1]]),
        ("torch.dtype", [torch.int8], ["int8", None]),
        ("torch.device | None", [torch.device("cpu"), "cpu", None], [0]),
    ],
)
def test_values_are_held_to_the_type(hint: str, accepted: list[Any], refused: list[Any]) -> None:
    parameter = schema(hint).parameters["x"]
    assert [v for v in accepted if not parameter.accepts(v)] == []
    assert [v for v in refused if parameter.accepts(v)] == []


@pytest.mark.parametrize(
    "hint, message",
    [
        ("Missing", r"type hint 'Missing' of parameter 'x' cannot be resolved: NameError.*'Missing' is not defined"),
        ("Decimal", r"of parameter 'x' cannot be resolved: NameError.*not under TYPE_CHECKING"),
        ("Sequence[", r"of parameter 'x' cannot be resolved: SyntaxError"),
        ("dict", r"parameter 'x' has the type hint 'dict'.*Known: Tensor, Rng, Comm, int"),
        ("Any", r"parameter 'x' has the type hint 'Any'"),
        ("int | str", r"parameter 'x' has the type hint 'int \| str'"),
        ("Literal['a']", r"parameter 'x' has the type hint"),
        ("Sequence[Rng]", r"parameter 'x' has the type hint"),
        ("Sequence[int | None]", r"parameter 'x' has the type hint"),
        ("Sequence[Sequence[Tensor]]", r"parameter 'x' has the type hint"),
        ("tuple[int, Tensor]", r"parameter 'x' has the type hint"),
        ("list", r"parameter 'x' has the type hint 'list'"),
        ("dict[str, Tensor]", r"parameter 'x' has the type hint"),
        ("None", r"parameter 'x' has the type hint 'None'"),
    ],
)
def test_an_unknown_hint_is_refused_and_op_and_parameter_are_named(hint: str, message: str) -> None:
    with pytest.raises(hal.HalError, match=f"op 'probe': .*{message}"):
        schema(hint)


def test_a_missing_hint_is_refused(isolated: None) -> None:
    with pytest.raises(hal.HalError, match="op 'untyped': parameter 'scale' has no type hint"):

        @hal.op(check=lambda call: None, tol={}, samples=lambda: None)
        def untyped(x: Tensor, scale) -> Tensor:  # type: ignore[no-untyped-def]
            return x

    assert "untyped" not in hal.OPS


@pytest.mark.parametrize(
    "hint, returns",
    [
        ("None", "none"),
        ("Tensor", "tensor"),
        ("tuple[Tensor, Tensor]", "tensors"),
        ("tuple[torch.Tensor, ...]", "tensors"),
        ("Tensor | tuple[Tensor, Tensor]", "tensors"),
        ("Union[Tensor, typing.Tuple[Tensor, Tensor]]", "tensors"),
    ],
)
def test_what_an_op_returns(hint: str, returns: str) -> None:
    assert schema("Tensor", hint).returns == returns


@pytest.mark.parametrize("hint", ["float", "list[Tensor]", "Tensor | None", "tuple[Tensor, int]", "dict[str, Tensor]"])
def test_an_op_returns_tensors_only(hint: str) -> None:
    with pytest.raises(hal.HalError, match="op 'probe': the result has the type hint"):
        schema("Tensor", hint)


@pytest.mark.parametrize("hint", ["Optional[torch.Tensor]", "torch.Tensor | None", "MaybeTensor"])
def test_an_optional_tensor_is_no_list(isolated: None, make_backend: Any, hint: str) -> None:
    def biased(x, bias=None):  # type: ignore[no-untyped-def]
        return x if bias is None else x + bias

    biased.__annotations__ = {"x": "Tensor", "bias": hint, "return": "Tensor"}
    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None, grads=("x", "bias"))(biased)
    backend = make_backend()
    backend.impl(op, id="a", bwd=lambda residuals, dy: (dy, dy))(lambda x, bias=None: (biased(x, bias), ()))
    with hal.activated(backend()):
        bias = torch.ones(2, requires_grad=True)
        op(X, bias).sum().backward()
        assert torch.equal(bias.grad, X)
        assert torch.equal(op(X), X)
        assert len(op.memo) == 2
        with pytest.raises(hal.ContractError, match=r"bias: Tensor \| None; found list"):
            op(X, [bias])


RNGS = [Rng(seed) for seed in range(50)]
COMMS = [hal.SingleRankComm() for _ in range(5)]


@pytest.mark.parametrize(
    "hint, values",
    [
        *((hint, RNGS) for hint in ("hal.Rng", "Rng", "Optional[Rng]", "hal.Rng | None")),
        *((hint, COMMS) for hint in ("hal.Comm", "Optional[Comm]")),
    ],
)
def test_a_memo_key_has_no_seed_and_no_identity_however_the_type_is_spelled(
    isolated: None, make_backend: Any, hint: str, values: list[Any]
) -> None:
    def copying(x, value):  # type: ignore[no-untyped-def]
        return x.clone()

    copying.__annotations__ = {"x": "Tensor", "value": hint, "return": "Tensor"}
    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None)(copying)
    backend = make_backend()
    backend.impl(op, id="a")(copying)
    with hal.activated(backend()):
        for value in values:
            op(X, value)
        assert len(op.memo) == 1
        if values is RNGS:
            op(X, Rng(1).block((4,), (2,)))
            assert len(op.memo) == 2


def test_a_memo_key_has_every_flag_and_the_place_of_every_tensor(isolated: None, make_backend: Any) -> None:
    def flagged(x: Tensor, y: Tensor, *, a: bool = False, b: bool = False, c: bool = True) -> Tensor:
        return x + y

    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None)(flagged)
    backend = make_backend()
    backend.impl(op, id="a")(flagged)
    with hal.activated(backend()):
        for flags in ({}, {"a": True}, {"b": True}, {"c": False}, {"a": True, "b": True}, {"a": False}, {"c": True}):
            op(X, X, **flags)
        assert len(op.memo) == 5
        assert op(X.to("meta"), X.to("meta")).is_meta
        with pytest.raises(hal.HalError):
            op(X, X.to("meta"))


def test_parameters_may_have_any_name(isolated: None, make_backend: Any) -> None:
    """None of the names in the generated code (memo key, candidates, autograd) hides a parameter."""

    def crowded(
        call: Tensor, key: Tensor, run: Tensor | None = None, *, output: float = 1.0, forward: float = 1.0
    ) -> Tensor:
        return (call + key) * output * forward

    op = hal.op(
        check=lambda call: None,
        tol={},
        samples=lambda: None,
        grads=("call", "key"),
    )(crowded)

    def why_not(call: hal.Call) -> Sequence[str]:
        return () if call.call is X and call.forward == 3.0 else ("the call",)

    def implementation(call: Any, key: Any, run: Any = None, *, output: Any = 1.0, forward: Any = 1.0) -> Any:
        return crowded(call, key, run, output=output, forward=forward), (output * forward,)

    for marked in (False, True):
        backend = make_backend()
        backend.impl(
            op,
            id="a",
            why_not=hal.by_metadata(why_not) if marked else why_not,
            bwd=lambda residuals, dy: (dy * residuals[0], dy * residuals[0]),
        )(implementation)
        key = torch.ones(2, requires_grad=True)
        with hal.activated(backend()):
            y = op(X, key, X, output=2.0, forward=3.0)
            y.sum().backward()
        assert y.tolist() == [12.0, 12.0]
        assert key.grad is not None
        assert key.grad.tolist() == [6.0, 6.0]


def test_the_ops_of_hal_have_the_schema_of_their_text() -> None:
    attention = ops.flash_attention.schema
    assert attention.parameters["mask"].type_name == "Tensor | None"
    assert attention.parameters["rng"].kind == "rng"
    assert attention.returns == "tensors"
    assert ops.adamw.schema.parameters["model_params"].type_name == "Sequence[Tensor] | None"
    assert ops.embedding.schema.parameters["comm"].kind == "comm"
    assert typing.get_type_hints(ops.linear.reference)["bias"] == MaybeTensor
