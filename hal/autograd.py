"""One autograd.Function per implementation, made from a forward and a backward function.

The forward has the op's signature and returns `(output, residuals)`; the backward maps `(residuals, *output_grads)` to
one gradient per name in `op.grads`; if it has a parameter `needs`, it is told which of them are wanted. The wrapper
adds a positional argument list (what autograd.Function needs) and skips autograd altogether when no input asks for a
gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .errors import HalError, PluginError, UnsupportedOp
from .op import Op
from .signature import define, fragments, tensor_kind


def make_call(op: Op[Any, Any], forward: Callable[..., Any], bwd: Callable[..., Any], id: str) -> Callable[..., Any]:
    """A function with the op's signature that runs `forward`, and `bwd` when autograd asks for it."""
    f = fragments(op.signature)
    positional = define(
        "positional",
        f"def positional({', '.join(f.names)}):\n    return forward({f.passed})\n",
        {"forward": forward},
        id,
    )
    wants = " or ".join(
        f"({n} is not None and {n}.requires_grad)" if _optional(op, n) else f"{n}.requires_grad" for n in op.grads
    )
    source = (
        f"def call({f.header}):\n"
        f"    if grad_enabled() and ({wants}):\n"
        f"        return apply({', '.join(f.names)})\n"
        f"    output, _ = forward({f.passed})\n"
        f"    return output\n"
    )
    apply = _function(op, positional, bwd, id, list(f.names)).apply
    scope = {"forward": forward, "grad_enabled": torch.is_grad_enabled, "apply": apply, **f.scope}
    return define("call", source, scope, f"{id} for {op.name}")


def noting_writes(op: Op[Any, Any], call: Callable[..., Any], id: str) -> Callable[..., Any]:
    """`call`, and then autograd is told that `op.mutates` were written, as torch's own in-place functions tell it: a
    backward pass that has saved the old values raises instead of using the new ones."""
    f = fragments(op.signature)
    body = f"result = forward({f.passed})\n    written({', '.join(op.mutates)})\n    return result"
    source = f"def call({f.header}):\n    {body}\n"
    return define("call", source, {"forward": call, "written": _written, **f.scope}, f"{id} for {op.name}")


def _written(*arguments: Any) -> None:
    for value in arguments:
        tensors = (value,) if isinstance(value, torch.Tensor) else value or ()
        # Tensors of inference mode have no version.
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def takes_needs(bwd: Callable[..., Any]) -> bool:
    """Whether a backward function wants to know which gradients are wanted."""
    return "needs" in inspect.signature(bwd).parameters


def _optional(op: Op[Any, Any], name: str) -> bool:
    return tensor_kind(op.signature.parameters[name].annotation) == "optional"


def _function(
    op: Op[Any, Any], positional: Callable[..., Any], bwd: Callable[..., Any], id: str, names: list[str]
) -> type[torch.autograd.Function]:
    slots = [names.index(n) for n in op.grads]
    n_params, nondiff, told = len(names), op.nondiff_outputs, takes_needs(bwd)

    class ImplFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            result = positional(*values)
            if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], tuple):
                raise PluginError(f"'{id}' has a bwd, so it must return (output, residuals), the latter a tuple")
            output, residuals = result
            if nondiff and isinstance(output, tuple):
                ctx.mark_non_differentiable(*(output[i] for i in nondiff))
                ctx.diff = [i for i in range(len(output)) if i not in nondiff]
            else:
                ctx.diff = None
            ctx.save_for_backward(*(r for r in residuals if isinstance(r, torch.Tensor)))
            ctx.plain = tuple(_TENSOR if isinstance(r, torch.Tensor) else r for r in residuals)
            return output

        @staticmethod
        def backward(ctx: Any, *output_grads: Any) -> Any:
            kept = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return gradients(ctx, kept, output_grads)
            with torch.no_grad():
                grads = gradients(ctx, kept, output_grads)
            # create_graph: torch's once_differentiable would return constants unless output_grads ask for more.
            asking = [g if g is None else g.detach().requires_grad_() for g in grads]
            # What they depend on is named, or autograd.grad, which runs only what leads to its inputs, would pass by.
            sources = (*output_grads, *kept, *_leaves(ctx))
            return _Once.apply(op.name, id, n_params, *asking, *sources)  # type: ignore[no-untyped-call]

    def gradients(ctx: Any, kept: tuple[Any, ...], output_grads: tuple[Any, ...]) -> tuple[Any, ...]:
        saved = iter(kept)
        residuals = tuple(next(saved) if r is _TENSOR else r for r in ctx.plain)
        if ctx.diff is not None:
            output_grads = tuple(output_grads[i] for i in ctx.diff)
        wanted = {"needs": tuple(ctx.needs_input_grad[slot] for slot in slots)} if told else {}
        grads = bwd(residuals, *output_grads, **wanted)
        if not isinstance(grads, tuple) or len(grads) != len(slots):
            raise HalError(
                f"bwd of implementation '{id}' must return a tuple of {len(slots)} gradients, for {op.grads}; "
                f"it returned {type(grads).__name__} of length {len(grads) if hasattr(grads, '__len__') else '?'}"
            )
        result: list[Any] = [None] * n_params
        for slot, grad in zip(slots, grads):
            result[slot] = grad
        return tuple(result)

    # The metaclass names the graph's node when a class is made, so that profiles and errors show op and implementation.
    return type(f"{op.name}[{id}]", (ImplFunction,), {})


def _leaves(node: Any) -> list[torch.Tensor]:
    """The tensors at the ends of the graph behind `node`."""
    seen, ahead = {node}, [node]
    while ahead:
        further = {n for n, _ in ahead.pop().next_functions if n is not None} - seen
        seen |= further
        ahead += further
    return [n.variable for n in seen if n.name() == "torch::autograd::AccumulateGrad"]


class _Once(torch.autograd.Function):
    """Passes on the first `count` tensors, gradients, which depend on the rest; differentiating them raises
    UnsupportedOp."""

    @staticmethod
    def forward(ctx: Any, op: str, id: str, count: int, *tensors: Any) -> Any:
        ctx.op, ctx.id = op, id
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        raise UnsupportedOp(
            f"{ctx.op}: implementation '{ctx.id}' has no second derivative; pin={{'{ctx.op}': 'reference'}} runs the "
            f"reference, which torch can differentiate twice"
        )


_TENSOR = object()
