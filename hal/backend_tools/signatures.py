"""Adapts functions to what `Backend.impl` takes: an op's complete signature, or one `Call`.

The functions here generate source once, at registration, so that a backend lists only the parameters it uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hal.core.call import Call
from hal.core.op import Op
from hal.core.signature import define, fragments
from hal.errors import HalError


def with_signature_of(
    op: Op[Any, Any], *, without: Collection[str] = (), **derived: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a function whose parameters are some of the op's: the result takes all of them.

    without: parameters that the result does not take, so that `Backend.impl` refuses calls that give them a value, and
        expects no gradient of them. The decorated function may have them, with defaults, which it then gets.
    derived: parameter of the decorated function -> function that computes it from the `Call`, such as
        `attention_spec`. They cost one `Call` per call of the op, and one Python call each.

    >>> @with_signature_of(ops.cross_entropy)
    ... def forward(logits, target):
    ...     return torch.nn.functional.cross_entropy(logits, target, reduction="none")

    Raises HalError for a parameter that is neither the op's nor derived.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = op.signature
        if without:
            _require_parameters(op, without, function)
            kept = [p for name, p in signature.parameters.items() if name not in without]
            signature = signature.replace(parameters=kept)
        f = fragments(signature)
        scope: dict[str, Any] = {"_function": function, "_Call": op.Call, **f.scope}
        arguments, skipped = [], False
        for name, parameter in inspect.signature(function).parameters.items():
            value = name
            if name in without:
                skipped = True  # The positions of later parameters no longer agree.
                continue
            if name in derived:
                scope[f"_derive_{name}"] = derived[name]
                value = f"_derive_{name}(_call)"
            else:
                _require_parameters(op, [name], function)
            by_name = skipped or parameter.kind is parameter.KEYWORD_ONLY
            arguments.append(f"{name}={value}" if by_name else value)
        source = (
            f"def adapted({f.header}):\n"
            + (f"    _call = _Call({f.passed})\n" if derived else "")
            + f"    return _function({', '.join(arguments)})\n"
        )
        adapted = define("adapted", source, scope, f"{function.__name__} for {op.name}")
        # Not functools.wraps: its __wrapped__ would show inspect.signature the parameters of `function`.
        adapted.__name__, adapted.__module__, adapted.__doc__ = function.__name__, function.__module__, function.__doc__
        return adapted

    return decorate


def why_not_tensors(
    op: Op[Any, Any], *parameters: str, reasons: Callable[..., Sequence[str]], by_metadata: bool = False
) -> Callable[[Call], Sequence[str]]:
    """A why_not that returns `reasons(*tensors)` for the op's tensor parameters of these names.

    parameters: by default those that have a gradient. A list of tensors is passed as separate arguments.
    by_metadata: whether the result is marked with `hal.by_metadata`; `reasons` must then keep to what that allows.
    """
    names = parameters or op.grads
    # The arguments are written out in the source, so that a call costs no more than a hand-written why_not.
    _require_parameters(op, names, reasons)
    arguments = ", ".join(
        f"*(call.{n} or ())" if op.schema.parameters[n].kind == "tensors" else f"call.{n}" for n in names
    )
    source = f"def why_not(call):\n    return _reasons({arguments})\n"
    why_not = define("why_not", source, {"_reasons": reasons}, f"why_not of {op.name}")
    why_not.by_metadata = by_metadata  # type: ignore[attr-defined]
    return why_not


def _require_parameters(op: Op[Any, Any], names: Collection[str], function: Callable[..., Any]) -> None:
    unknown = [name for name in names if name not in op.signature.parameters]
    if unknown:
        raise HalError(
            f"{function.__name__} for op '{op.name}' takes {', '.join(unknown)}, which {op.name}{op.signature} lacks"
        )
