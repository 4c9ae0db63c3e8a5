"""Functions of a backend, adapted to an op's signature.

An implementation may lack parameters that have a default: those that an op gained after the implementation was written,
or that it does not support. A call that gives such a parameter another value is refused with that reason. Hints are the
exception: they never change a result, so they are dropped instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import HalError
from .signature import define, fragments

if TYPE_CHECKING:
    from .call import Call
    from .op import Op


def optional(op: Op[Any, Any]) -> list[str]:
    """The parameters that an implementation may lack: those with a default."""
    return [p.name for p in op.signature.parameters.values() if p.default is not p.empty]


def lacking(op: Op[Any, Any], function: Callable[..., Any]) -> list[str]:
    """The op's parameters, hints apart, that `function` does not have."""
    given = inspect.signature(function).parameters
    return [name for name in op.signature.parameters if name not in given and name not in op.hints]


def require_same_signature(
    op: Op[Any, Any], function: Callable[..., Any], what: str, may_lack: Collection[str] = ()
) -> None:
    """Raises HalError unless `function` has the op's parameter names, kinds and defaults, in order.

    Hints and the parameters `may_lack` may be missing.
    """

    def parameters(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    signature = inspect.signature(function)
    absent = [p for p in (*op.hints, *may_lack) if p not in signature.parameters]
    if parameters(signature) != [p for p in parameters(op.signature) if p[0] not in absent]:
        raise HalError(
            f"{what} must have the signature of the reference\n  reference: {op.name}{op.signature}\n"
            f"  found:     {getattr(function, '__name__', function)}{signature}\n"
            "Use the same names, order and defaults."
            + (
                f" Only {', '.join(may_lack)} may be left out; calls that use them are then refused."
                if may_lack
                else ""
            )
        )


def passing_known(op: Op[Any, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the op's signature that calls `function` without the parameters that it does not have."""
    signature = inspect.signature(function)
    if len(signature.parameters) == len(op.signature.parameters):
        return function
    f = fragments(op.signature)
    source = f"def passing_known({f.header}):\n    return _function({fragments(signature).passed})\n"
    return define("passing_known", source, {"_function": function, **f.scope}, f"parameters of {op.name}")


def refusing(
    op: Op[Any, Any], why_not: Callable[[Call], Sequence[str]] | None, absent: Sequence[str]
) -> Callable[[Call], Sequence[str]]:
    """A why_not for an implementation that lacks the parameters `absent`.

    It refuses calls that give one of them a value other than its default, and otherwise returns the result of `why_not`
    (None: no further reasons).
    """
    if not absent:
        return why_not or accept
    defaults = {name: op.signature.parameters[name].default for name in absent}

    def refuse(call: Call) -> Sequence[str]:
        reasons = []
        for name, default in defaults.items():
            value = getattr(call, name)
            if value is not default and (default is None or value != default):
                reasons.append(f"{name} (the implementation has no such parameter)")
        return reasons or (why_not(call) if why_not else ())

    return refuse


def accept(call: Call) -> Sequence[str]:
    """The why_not of an implementation that takes every call."""
    return ()


def require_takes_call(function: Callable[[Call], object], what: str) -> None:
    """Raises HalError unless `function` can be called with one argument, the call."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise HalError(
            f"{what} takes {inspect.signature(function)}; it must take one argument, a hal.Call, whose attributes are "
            "the op's arguments"
        ) from None
