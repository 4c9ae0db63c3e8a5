"""One autograd.Function per implementation, made from a forward and a backward function.

The forward has the op's signature and returns `(output, residuals)`; the backward maps `(residuals, *output_grads)` to
one gradient per name in `op.grads`. The wrapper adds a positional argument list (what autograd.Function needs) and
skips autograd altogether when no input asks for a gradient. It is generated as source, like a dataclass's __init__,
because generic *args/**kwargs binding would cost more than the whole dispatch budget.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .errors import HalError
from .op import Op

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def make_call(op: Op[Any, Any], forward: Callable[..., Any], bwd: Callable[..., Any], id: str) -> Callable[..., Any]:
    """A function with the op's signature that runs `forward`, and `bwd` when autograd asks for it."""
    parameters = list(op.signature.parameters.values())
    names = [p.name for p in parameters]
    header, defaults = [], {}
    for i, p in enumerate(parameters):
        if p.kind is _KEYWORD and (i == 0 or parameters[i - 1].kind is not _KEYWORD):
            header.append("*")
        if p.default is p.empty:
            header.append(p.name)
        else:
            defaults[f"_default_{p.name}"] = p.default
            header.append(f"{p.name}=_default_{p.name}")
    passed = ", ".join(f"{p.name}={p.name}" if p.kind is _KEYWORD else p.name for p in parameters)
    wants = " or ".join(
        f"({n} is not None and {n}.requires_grad)" if _optional(op, n) else f"{n}.requires_grad" for n in op.grads
    )
    source = (
        f"def positional({', '.join(names)}):\n    return forward({passed})\n"
        f"def call({', '.join(header)}):\n"
        f"    if grad_enabled() and ({wants}):\n"
        f"        return apply({', '.join(names)})\n"
        f"    return forward({passed})[0]\n"
    )
    scope: dict[str, Any] = {"forward": forward, "grad_enabled": torch.is_grad_enabled, **defaults}
    exec(compile(source, f"<hal call of {id} for {op.name}>", "exec"), scope)
    scope["apply"] = _function(op, scope["positional"], bwd, id, names).apply
    call: Callable[..., Any] = scope["call"]
    call.__name__ = op.name
    return call


def _optional(op: Op[Any, Any], name: str) -> bool:
    return "None" in str(op.signature.parameters[name].annotation)


def _function(
    op: Op[Any, Any], positional: Callable[..., Any], bwd: Callable[..., Any], id: str, names: list[str]
) -> type[torch.autograd.Function]:
    slots = [names.index(n) for n in op.grads]
    n_params, nondiff = len(names), op.nondiff_outputs

    class ImplFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            output, residuals = positional(*values)
            if nondiff and isinstance(output, tuple):
                ctx.mark_non_differentiable(*(output[i] for i in nondiff))
                ctx.diff = [i for i in range(len(output)) if i not in nondiff]
            else:
                ctx.diff = None
            ctx.save_for_backward(*(r for r in residuals if isinstance(r, torch.Tensor)))
            ctx.plain = tuple(_TENSOR if isinstance(r, torch.Tensor) else r for r in residuals)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *output_grads: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            residuals = tuple(next(saved) if r is _TENSOR else r for r in ctx.plain)
            if ctx.diff is not None:
                output_grads = tuple(output_grads[i] for i in ctx.diff)
            grads = bwd(residuals, *output_grads)
            if not isinstance(grads, tuple) or len(grads) != len(slots):
                raise HalError(
                    f"bwd of implementation '{id}' must return a tuple of {len(slots)} gradients, for {op.grads}; "
                    f"it returned {type(grads).__name__} of length {len(grads) if hasattr(grads, '__len__') else '?'}"
                )
            result: list[Any] = [None] * n_params
            for slot, grad in zip(slots, grads):
                result[slot] = grad
            return tuple(result)

    ImplFunction.__name__ = ImplFunction.__qualname__ = f"{op.name}[{id}]"
    return ImplFunction


_TENSOR = object()
