"""Gradients of lowered ops: the kernels of torch's Autograd key, and which tensors a graph keeps for the backward pass.

Forward-mode derivatives and second derivatives of lowered ops do not exist; both raise UnsupportedOp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import HalError, UnsupportedOp
from . import dispatch
from .op import Op

if TYPE_CHECKING:
    from .backend import Impl
    from .lower import Lowered


def register(lowered: Lowered, library: Any) -> None:
    """Registers the Autograd kernels of the torch ops of `lowered`.

    functorch runs the same kernels, one level at a time, which is what _SingleLevelFunction is for (functorch makes
    its own from an autograd.Function that is called from Python, but not from one that a kernel calls).
    """
    op = lowered.op

    def plain(*flat: Any) -> Any:
        refuse_tangents(op, flat)
        if op.grads and (needs := _needs(lowered, flat)):
            *outputs, _ = _apply(_Forward, lowered, needs, _kept(lowered, flat), *flat)
            return outputs if op.schema.returns == "tensors" else outputs[0]
        with torch._C._AutoDispatchBelowAutograd():
            return lowered.torch_op(*flat)

    def recorded(*flat: Any) -> Any:
        # Called at an outer level of functorch, which may differentiate by other arguments than the inner level.
        *inputs, needs, kept = flat
        if mine := _needs(lowered, inputs):
            both = [a or b for a, b in zip(needs, mine)]
            return list(_apply(_Forward, lowered, both, sorted({*kept, *_kept(lowered, inputs)}), *inputs))
        with torch._C._AutoDispatchBelowAutograd():
            return lowered.torch_forward(*flat)

    def backward(*flat: Any) -> Any:
        refuse_tangents(op, flat)
        token, sources, kept, upstream, *shapes = flat
        # autograd only tracks tensors that are arguments themselves.
        return list(_apply(_Backward, lowered, kept, shapes, len(sources), token, *sources, *upstream))

    library.impl(op.name, plain, "Autograd")
    if op.grads:
        library.impl(f"{op.name}_forward", recorded, "Autograd")
        library.impl(f"{op.name}_backward", backward, "Autograd")


def _needs(lowered: Lowered, flat: Sequence[Any]) -> list[bool]:
    """Which arguments of `op.grads` get a gradient; empty if none."""
    if not torch.is_grad_enabled():
        return []
    values = [flat[lowered.position(name)] for name in lowered.op.grads]
    needs = [v is not None and v.requires_grad for v in values]
    return needs if any(needs) else []


class _Forward(_SingleLevelFunction):
    """hal::NAME_forward(*flat), differentiated by hal::NAME_backward. Returns its results and the token."""

    @staticmethod
    def forward(ctx: Any, lowered: Lowered, needs: list[bool], kept: list[int], *flat: Any) -> Any:
        with _below():
            *outputs, token = lowered.torch_forward(*flat, needs, kept)
        sources = [*tensors(flat), *outputs]
        ctx.lowered, ctx.kept = lowered, [i for i in kept if i < len(sources)]
        ctx.save_for_backward(token, *(sources[i] for i in ctx.kept))
        ctx.wanted = [n for n, need in zip(lowered.op.grads, needs) if need]
        wanted = [flat[lowered.position(n)] for n in ctx.wanted]
        ctx.shapes = (
            [s for x in wanted for s in x.shape],
            [x.ndim for x in wanted],
            [x.dtype for x in wanted],
            wanted[0].device,
        )
        ctx.count = len(flat)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(token, *(outputs[i] for i in lowered.op.nondiff_outputs if i < len(outputs)))
        return (*outputs, token)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        lowered = ctx.lowered
        token, *sources = ctx.saved_tensors
        upstream = [g for i, g in enumerate(output_grads[:-1]) if i not in lowered.op.nondiff_outputs]
        grads = lowered.torch_backward(token, sources, ctx.kept, upstream, *ctx.shapes)
        by_position: list[Any] = [None] * ctx.count
        for name, grad in zip(ctx.wanted, grads):
            by_position[lowered.position(name)] = grad
        return None, None, None, *by_position

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_forward_mode(ctx.lowered.op.name)


class _Backward(_SingleLevelFunction):
    """hal::NAME_backward, whose gradients cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, lowered: Lowered, kept: list[int], shapes: list[Any], count: int, *values: Any) -> Any:
        ctx.op = lowered.op.name
        token, sources, upstream = values[0], list(values[1 : count + 1]), list(values[count + 1 :])
        with _below():
            return tuple(lowered.torch_backward(token, sources, kept, upstream, *shapes))

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        raise UnsupportedOp(
            f"{ctx.op}: a lowered op has no second derivative; call the op in eager code with pin={{'{ctx.op}': "
            f"'reference'}}, whose reference torch can differentiate twice"
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_forward_mode(ctx.op)


def _apply(function: Any, *args: Any) -> Any:
    with enable_single_level_autograd_function():
        return function.apply(*args)


@contextmanager
def _below() -> Iterator[None]:
    """Calls torch ops below this level of autograd: functorch's next level, which may differentiate, or the kernels."""
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(torch._C._are_functorch_transforms_active()):
        yield


def refuse_tangents(op: Op[Any, Any], values: Sequence[Any]) -> None:
    """Raises UnsupportedOp if one of the values is a dual tensor of torch.autograd.forward_ad or torch.func.jvp."""
    if forward_ad._current_level >= 0 and any(has_tangent(t) for t in tensors(values)):
        raise _no_forward_mode(op.name)


def has_tangent(t: Tensor) -> bool:
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]


def _no_forward_mode(op: str) -> HalError:
    return UnsupportedOp(
        f"{op}: HAL's ops have no forward-mode derivatives (torch.func.jvp, jacfwd, dual tensors). Use reverse mode "
        f"(torch.func.vjp, grad, jacrev), or hal.policy(pin={{'{op}': 'reference'}}), under which torch differentiates "
        f"the reference"
    )


def _kept(lowered: Lowered, flat: Sequence[Any]) -> list[int]:
    """The sources of this call that a graph should keep: those that an implementation's residuals share memory with.

    A traced call has no elements to run on, so this is determined from the op's edge cases, by parameter and by result,
    once per backend and policy. A source that is missing here costs a copy, not a wrong gradient. Results that the call
    does not have may be among them.
    """
    op = lowered.op
    if op.kept is None:
        with _outside():
            op.kept = frozenset(source for impl in dispatch.candidates(op) for source in _used(lowered, impl))
    numbers: list[int] = []
    position = 0
    for name in op.schema.parameters:
        count = lowered.tensors_of(name, flat)
        if name in op.kept:
            numbers += range(position, position + count)
        position += count
    return numbers + sorted(position + i for i in op.kept if isinstance(i, int))


def _used(lowered: Lowered, impl: Impl) -> set[str | int]:
    """The parameters and results (by index) that the residuals of an implementation share memory with."""
    op, used, given = lowered.op, set[str | int](), set[str]()
    for sample in op.edge_cases():
        args, kwargs = sample.build(torch.float32, dispatch.device())
        call = op.Call(*args, **kwargs)
        names = {name for name in op.schema.parameters if getattr(call, name) is not None}
        # A sample runs only if it gives a parameter that no earlier one gave, because attention has very many samples.
        if not sample.grad or names <= given or impl.refusals(call):
            continue
        given |= names
        flat = lowered.flatten(*args, **kwargs)
        owners = [name for name in op.schema.parameters for _ in range(lowered.tensors_of(name, flat))]
        needs = [name in names for name in op.grads]
        used |= {owners[i] if i < len(owners) else i - len(owners) for i in lowered.residual_sources(impl, flat, needs)}
    return used


@contextmanager
def _outside() -> Iterator[None]:
    """Disables dispatch modes and transforms, so that the block computes on real tensors."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among the values and in lists of them, in order."""
    return [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, Tensor)]
