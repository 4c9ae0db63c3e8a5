"""Adapts functions that take only some of an op's parameters to the op's complete signature.

`Backend.impl` accepts an implementation or a why_not only with the reference's parameters, kinds and defaults. The
functions here generate that signature once, at registration, so that a backend lists only the parameters it uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from hal.core.op import Op
from hal.core.signature import define, fragments
from hal.errors import HalError


def with_signature_of(
    op: Op[Any, Any], **derived: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a function whose parameters are some of the op's: the result takes all of them.

    derived: parameter of the decorated function -> function that computes it from parameters of the op, which it
        declares under the same names. Each call costs one extra Python call, plus one per derived parameter.

    >>> @with_signature_of(ops.cross_entropy)
    ... def why_not(logits, comm):
    ...     return () if comm is None else ["a sharded vocabulary"]

    Raises HalError for a parameter that is neither the op's nor derived.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        scope: dict[str, Any] = {"_function": function}
        arguments = []
        for name, parameter in inspect.signature(function).parameters.items():
            value = name
            if name in derived:
                scope[f"_derive_{name}"] = derived[name]
                value = f"_derive_{name}({_passed(op, derived[name])})"
            else:
                _require_parameters(op, [name], function)
            arguments.append(f"{name}={value}" if parameter.kind is parameter.KEYWORD_ONLY else value)
        return _adapted(op, f"_function({', '.join(arguments)})", scope, function)

    return decorate


def why_not_tensors(
    op: Op[Any, Any], *parameters: str, reasons: Callable[..., Sequence[str]], by_metadata: bool = False
) -> Callable[..., Sequence[str]]:
    """A why_not that returns `reasons(*tensors)` for the op's tensor parameters of these names.

    parameters: by default those that have a gradient. A list of tensors is passed as separate arguments.
    by_metadata: whether the result is marked with `hal.by_metadata`; `reasons` must then keep to what that allows.
    """
    names = parameters or op.grads
    # The arguments are written out in the source, so that a call costs no more than a hand-written why_not.
    _require_parameters(op, names, reasons)
    arguments = ", ".join(f"*({n} or ())" if op.schema.parameters[n].kind == "tensors" else n for n in names)
    adapted = _adapted(op, f"_function({arguments})", {"_function": reasons}, reasons)
    adapted.by_metadata = by_metadata  # type: ignore[attr-defined]
    return adapted


def _adapted(
    op: Op[Any, Any], expression: str, scope: dict[str, Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function with the op's signature that returns `expression`; it keeps the name and marks of `function`."""
    f = fragments(op.signature)
    source = f"def adapted({f.header}):\n    return {expression}\n"
    adapted = define("adapted", source, {**scope, **f.scope}, f"{function.__name__} for {op.name}")
    # Not functools.wraps: its __wrapped__ would show inspect.signature the parameters of `function`.
    adapted.__name__, adapted.__module__, adapted.__doc__ = function.__name__, function.__module__, function.__doc__
    vars(adapted).update(vars(function))
    return adapted


def _passed(op: Op[Any, Any], function: Callable[..., Any]) -> str:
    names = list(inspect.signature(function).parameters)
    _require_parameters(op, names, function)
    return ", ".join(f"{name}={name}" for name in names)


def _require_parameters(op: Op[Any, Any], names: Sequence[str], function: Callable[..., Any]) -> None:
    unknown = [name for name in names if name not in op.signature.parameters]
    if unknown:
        raise HalError(
            f"{function.__name__} for op '{op.name}' takes {', '.join(unknown)}, which {op.name}{op.signature} lacks"
        )
