"""One autograd.Function per implementation, made from a forward and a backward function.

The forward has the op's signature and returns `(output, residuals)`; the backward maps `(residuals, *output_grads)` to
one gradient per name in `op.grads` that the forward takes; if it has a parameter `needs`, it is passed which of them
autograd uses. The wrapper converts the call to the positional arguments that autograd.Function needs, and skips
autograd altogether when no input requires a gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import HalError, PluginError, UnsupportedOp
from . import issued
from .op import Op
from .signature import define, fragments


def make_call(
    op: Op[Any, Any], forward: Callable[..., Any], bwd: Callable[..., Any], id: str, grads: Sequence[str] | None = None
) -> Callable[..., Any]:
    """A function with the op's signature that runs `forward`, and `bwd` in autograd's backward pass.

    grads: the parameters whose gradients `bwd` returns, by default all of `op.grads`.
    """
    f = fragments(op.signature)
    source = (
        f"def call({f.header}):\n"
        f"    if _grad_enabled() and ({_requires_grad(op)}):\n"
        f"        return _apply({', '.join(f.names)})\n"
        f"    _output, _ = _forward({f.passed})\n"
        f"    return _output\n"
    )
    scope = {
        "_forward": forward,
        "_grad_enabled": torch.is_grad_enabled,
        "_apply": _function(op, forward, bwd, id, op.grads if grads is None else grads).apply,
        **f.scope,
    }
    return define("call", source, scope, f"{id} for {op.name}")


def _requires_grad(op: Op[Any, Any]) -> str:
    """Source text of the condition that one of the op's differentiable arguments requires a gradient."""
    return " or ".join(
        f"({name} is not None and {name}.requires_grad)"
        if op.schema.parameters[name].optional
        else f"{name}.requires_grad"
        for name in op.grads
    )


def noting_writes(op: Op[Any, Any], call: Callable[..., Any], id: str) -> Callable[..., Any]:
    """Wraps `call` to increment the version counters of `op.mutates` afterwards, as torch's in-place functions do.

    A backward pass that saved the old values then raises an error instead of using the new ones.
    """
    f = fragments(op.signature)
    source = (
        f"def call({f.header}):\n"
        f"    _result = _forward({f.passed})\n"
        f"    _increment_versions({', '.join(op.mutates)})\n"
        f"    return _result\n"
    )
    scope = {"_forward": call, "_increment_versions": _increment_versions, **f.scope}
    return define("call", source, scope, f"{id} for {op.name}")


def _increment_versions(*arguments: Any) -> None:
    for value in arguments:
        tensors = (value,) if isinstance(value, Tensor) else value or ()
        # Tensors of inference mode have no version.
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def takes_needs(bwd: Callable[..., Any]) -> bool:
    """Whether a backward function has the parameter `needs`: which gradients autograd uses."""
    return "needs" in inspect.signature(bwd).parameters


@dataclass(frozen=True)
class _Differentiable:
    """The forward and backward that autograd.Function needs, made from those of an implementation.

    positional: the implementation's forward, with the arguments in the order of the signature.
    slots: the positions of the parameters `grads` among the arguments. count: the number of arguments.
    """

    op: Op[Any, Any]
    id: str
    positional: Callable[..., Any]
    bwd: Callable[..., Any]
    takes_needs: bool
    grads: Sequence[str]
    slots: tuple[int, ...]
    count: int

    def forward(self, ctx: Any, *values: Any) -> Any:
        result = self.positional(*values)
        if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], tuple):
            raise PluginError(f"'{self.id}' has a bwd, so it must return (output, residuals), the latter a tuple")
        output, residuals = result
        if self.op.nondiff_outputs and isinstance(output, tuple):
            ctx.mark_non_differentiable(*(output[i] for i in self.op.nondiff_outputs))
        # Only tensors saved this way are freed with the graph and checked against changes in place. Each leaves a
        # placeholder among the residuals; plain values are kept as they are. Without plain values, nothing is kept.
        tensors = [r for r in residuals if isinstance(r, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.plain = ()
        if len(tensors) < len(residuals):
            ctx.plain = tuple(_SAVED_TENSOR if isinstance(r, Tensor) else r for r in residuals)
        return output

    def backward(self, ctx: Any, *output_grads: Any) -> Any:
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return self._gradients(ctx, saved, output_grads)
        # create_graph=True. The implementation's backward cannot be differentiated, so its gradients are computed
        # without a graph and then passed through _Once, which raises when they are differentiated. (torch's
        # once_differentiable would return constants where no output gradient requires a gradient itself.)
        with torch.no_grad():
            grads = self._gradients(ctx, saved, output_grads)
        grads = tuple(g if g is None else g.detach().requires_grad_() for g in grads)
        # autograd.grad runs only the nodes that lead to its inputs. _Once is on all such paths if it takes everything
        # that the gradients depend on: the upstream gradients, the residuals and the leaves behind this node.
        sources = (*output_grads, *saved, *_leaves(ctx))
        return _Once.apply(self.op.name, self.id, self.count, *grads, *sources)  # type: ignore[no-untyped-call]

    def _gradients(self, ctx: Any, saved: tuple[Tensor, ...], output_grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """One gradient per argument of the call, None for those that have none."""
        residuals = saved
        if ctx.plain:
            tensors = iter(saved)
            residuals = tuple(next(tensors) if r is _SAVED_TENSOR else r for r in ctx.plain)
        if self.op.nondiff_outputs and len(output_grads) > 1:
            output_grads = tuple(g for i, g in enumerate(output_grads) if i not in self.op.nondiff_outputs)
        try:
            if self.takes_needs:
                needs = tuple(ctx.needs_input_grad[slot] for slot in self.slots)
                grads = self.bwd(residuals, *output_grads, needs=needs)
            else:
                grads = self.bwd(residuals, *output_grads)
        except RuntimeError as error:
            if any(map(_batched, output_grads)):
                raise UnsupportedOp(
                    f"{self.op.name}: implementation '{self.id}' takes no batch of upstream gradients "
                    "(is_grads_batched, vectorize=True); use torch.func.jacrev, or one call of autograd.grad for each"
                ) from error
            raise
        if issued.after is not None:
            issued.after(f"{self.op.name} ({self.id}), backward")
        if not isinstance(grads, tuple) or len(grads) != len(self.slots):
            raise HalError(
                f"bwd of implementation '{self.id}' must return a tuple of {len(self.slots)} gradients, for "
                f"{', '.join(self.grads)}; it returned {type(grads).__name__} of length "
                f"{len(grads) if hasattr(grads, '__len__') else '?'}"
            )
        by_argument: list[Any] = [None] * self.count
        for slot, grad in zip(self.slots, grads):
            by_argument[slot] = grad
        return tuple(by_argument)


def _batched(x: Any) -> bool:
    """Whether x is a batch that vmap, or autograd.grad's older one, shows as a single tensor."""
    functorch = torch._C._functorch
    return isinstance(x, Tensor) and (functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x))


def _function(
    op: Op[Any, Any], forward: Callable[..., Any], bwd: Callable[..., Any], id: str, grads: Sequence[str]
) -> type[torch.autograd.Function]:
    """The autograd.Function of one implementation, whose `apply` takes the arguments in the order of the signature."""
    f = fragments(op.signature)
    positional = define(
        "positional",
        f"def positional({', '.join(f.names)}):\n    return _forward({f.passed})\n",
        {"_forward": forward},
        id,
    )
    slots = tuple(f.names.index(name) for name in grads)
    implementation = _Differentiable(op, id, positional, bwd, takes_needs(bwd), grads, slots, len(f.names))
    members = {"forward": staticmethod(implementation.forward), "backward": staticmethod(implementation.backward)}
    # autograd names the graph's nodes after this class, so that profiles and errors show the op and the implementation.
    return type(f"{op.name}[{id}]", (torch.autograd.Function,), members)


def _leaves(node: Any) -> list[Tensor]:
    """The leaf tensors of the graph behind `node`, whose gradients torch accumulates."""
    visited, frontier = {node}, [node]
    while frontier:
        new = {n for n, _ in frontier.pop().next_functions if n is not None} - visited
        visited |= new
        frontier += new
    return [n.variable for n in visited if n.name() == "torch::autograd::AccumulateGrad"]


class _Once(torch.autograd.Function):
    """Returns the first `count` tensors, which are gradients that depend on the rest; cannot be differentiated."""

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


_SAVED_TENSOR = object()
"""The placeholder, in a tuple of plain values, of a tensor that autograd saves."""
