"""An op's signature as data: the types of its parameters, and source text for generating functions that share it.

`Schema` is read from the reference's resolved type hints once, when the op is defined; everything that treats a tensor
differently from an `Rng` (verification, memo keys, autograd, lowering, the kit) uses it.

`fragments` and `define` make functions with an op's signature from source text, like a dataclass's __init__: binding
*args and **kwargs generically would cost more than the complete dispatch budget of 1 us.
"""

from __future__ import annotations

import collections.abc
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..comm.contract import Comm
from ..errors import HalError
from ..rng import Rng
from .tensor_rng import TensorRng

Kind = Literal["tensor", "tensors", "rng", "comm", "plain"]


@dataclass(frozen=True)
class _Type:
    """A type that a hint may name. accepts: the Python types of its values. torch: its name in torch.library."""

    name: str
    kind: Kind
    accepts: tuple[type, ...]
    torch: str = ""


_TYPES: dict[Any, _Type] = {
    Tensor: _Type("Tensor", "tensor", (Tensor,), "Tensor"),
    Rng: _Type("Rng", "rng", (Rng, TensorRng)),
    Comm: _Type("Comm", "comm", (Comm,)),
    int: _Type("int", "plain", (int, numbers.Integral, torch.SymInt), "SymInt"),
    float: _Type("float", "plain", (float, int, numbers.Real, torch.SymFloat, torch.SymInt), "float"),
    bool: _Type("bool", "plain", (bool, torch.SymBool), "bool"),
    str: _Type("str", "plain", (str,), "str"),
    # As in torch's own functions, the device may be given by name.
    torch.device: _Type("device", "plain", (torch.device, str), "Device"),
    torch.dtype: _Type("dtype", "plain", (torch.dtype,), "ScalarType"),
}
_ELEMENTS = (Tensor, int, float, bool, str)
"""The element types of sequences."""

_KNOWN = (
    "Tensor, Rng, Comm, int, float, bool, str, torch.device and torch.dtype, each of them also '| None'; sequences "
    f"(Sequence[X], list[X], tuple[X, ...]) of {', '.join(_TYPES[t].name for t in _ELEMENTS)} or Tensor | None"
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of an op.

    kind: "tensor", "tensors" (a sequence of them), "rng", "comm", or "plain" for every other value.
    types: the Python types of the value or, if `sequence`, of its elements.
    optional: None is accepted instead.
    type_name: the type in one canonical spelling. torch_type: the same for torch.library; "" where it has none.
    """

    name: str
    kind: Kind
    types: tuple[type, ...]
    optional: bool
    sequence: bool
    type_name: str
    torch_type: str

    def accepts(self, value: object) -> bool:
        """Whether `value` is of the declared type."""
        if value is None:
            return self.optional
        if not self.sequence:
            return isinstance(value, self.types)
        # An optimizer passes hundreds of tensors on every call, but they are of one or two types.
        return isinstance(value, (list, tuple, range)) and all(issubclass(t, self.types) for t in set(map(type, value)))

    def __str__(self) -> str:
        return f"{self.name}: {self.type_name}"


@dataclass(frozen=True)
class Schema:
    """The types of an op's parameters, in order, and of its result.

    returns: "none", "tensor", or "tensors" for a tuple of them (or one or several, depending on an argument).
    """

    parameters: Mapping[str, Parameter]
    returns: Literal["none", "tensor", "tensors"]

    @classmethod
    def of(cls, reference: Callable[..., Any]) -> Schema:
        """The schema of a reference function.

        Raises HalError, which names the op and the parameter, for *args and **kwargs, and for a hint that is missing,
        that cannot be resolved, or whose type is none of those that every part of HAL can handle.
        """
        signature = inspect.signature(reference)
        parameters = {}
        for name, p in signature.parameters.items():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise HalError(f"op '{reference.__name__}': an op cannot take {p}; name its parameters")
            parameter = _parameter(name, _resolved(reference, f"parameter '{name}'", p.annotation))
            if parameter is None:
                raise HalError(
                    f"op '{reference.__name__}': parameter '{name}' has the type hint {_text(p.annotation)}, which an "
                    f"op cannot take. Known: {_KNOWN}"
                )
            parameters[name] = parameter
        returns = _returns(_resolved(reference, "the result", signature.return_annotation))
        if returns is None:
            raise HalError(
                f"op '{reference.__name__}': the result has the type hint {_text(signature.return_annotation)}; an op "
                "returns None, a Tensor, a tuple of Tensors, or either of the last two (Tensor | tuple[Tensor, ...])"
            )
        return cls(parameters, returns)


def _resolved(reference: Callable[..., Any], what: str, annotation: Any) -> Any:
    """The type that an annotation of `reference` resolves to; `what` names the annotated item in errors."""
    if annotation is inspect.Parameter.empty:
        raise HalError(f"op '{reference.__name__}': {what} has no type hint. Known: {_KNOWN}")

    # typing.get_type_hints evaluates all annotations of a function together, and its error does not identify the one
    # that failed. This function has only one.
    def annotated() -> None: ...

    annotated.__annotations__ = {"hint": annotation}
    try:
        return typing.get_type_hints(annotated, getattr(inspect.unwrap(reference), "__globals__", {}))["hint"]
    except Exception as error:
        raise HalError(
            f"op '{reference.__name__}': the type hint {_text(annotation)} of {what} cannot be resolved: "
            f"{type(error).__name__}: {error}. Import its names in the module of the reference at run time, not under "
            "TYPE_CHECKING"
        ) from error


def _text(annotation: Any) -> str:
    return repr(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _parameter(name: str, hint: Any) -> Parameter | None:
    """The parameter that a resolved hint describes; None for a type that is not known."""
    item, optional = _without_none(hint)
    sequence = typing.get_origin(item) in (collections.abc.Sequence, list, tuple)
    none_element = False
    if sequence:
        elements = {e for e in typing.get_args(item) if e is not ...}
        if len(elements) != 1:
            return None
        item, none_element = _without_none(elements.pop())
        if item not in _ELEMENTS or (none_element and item is not Tensor):
            return None
    known = _TYPES.get(item) if isinstance(item, collections.abc.Hashable) else None
    if known is None:
        return None
    kind, accepted, type_name, torch_type = known.kind, known.accepts, known.name, known.torch
    if none_element:
        accepted, type_name, torch_type = (*accepted, type(None)), f"{type_name} | None", f"{torch_type}?"
    if sequence:
        kind = "tensors" if kind == "tensor" else kind
        type_name, torch_type = f"Sequence[{type_name}]", f"{torch_type}[]"
    if optional:
        type_name, torch_type = f"{type_name} | None", torch_type and f"{torch_type}?"
    return Parameter(name, kind, accepted, optional, sequence, type_name, torch_type)


def _returns(hint: Any) -> Literal["none", "tensor", "tensors"] | None:
    """The kind of result for a resolved return hint; None if an op may not return it."""
    hint = getattr(hint, "__value__", hint)  # an alias made by a `type` statement
    if hint is type(None):
        return "none"
    if hint is Tensor:
        return "tensor"
    for member in typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,):
        elements = typing.get_args(member) if typing.get_origin(member) is tuple else (member,)
        if not elements or any(e is not Tensor and e is not ... for e in elements):
            return None
    return "tensors"


_UNIONS = (typing.Union, types.UnionType)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """(the hint without None, whether None was among its alternatives)."""
    hint = getattr(hint, "__value__", hint)  # an alias made by a `type` statement
    if typing.get_origin(hint) in _UNIONS:
        alternatives = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(alternatives) == 1:
            return _without_none(alternatives[0])[0], True
    return hint, False


@dataclass(frozen=True)
class Fragments:
    """header: parameters as in a def; passed: the same names as a call's arguments; names: just the names.

    scope: values the header's defaults refer to.
    """

    header: str
    passed: str
    names: tuple[str, ...]
    scope: dict[str, Any]


def fragments(signature: inspect.Signature) -> Fragments:
    """The fragments of `signature`; keyword-only parameters stay keyword-only.

    Source text that uses them gives its own names a leading underscore, so that a parameter may have any other.
    """
    header: list[str] = []
    scope: dict[str, Any] = {}
    parameters = list(signature.parameters.values())
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and (i == 0 or parameters[i - 1].kind is not p.KEYWORD_ONLY):
            header.append("*")
        if p.default is p.empty:
            header.append(p.name)
        else:
            scope[f"_default_{p.name}"] = p.default
            header.append(f"{p.name}=_default_{p.name}")
    passed = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)
    return Fragments(", ".join(header), passed, tuple(signature.parameters), scope)


def define(name: str, source: str, scope: dict[str, Any], where: str) -> Callable[..., Any]:
    """Runs `source`, which defines `name`, in `scope`; `where` appears in tracebacks."""
    exec(compile(source, f"<hal: {where}>", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function
