"""Calls as data: arguments by name, copies for the oracle, leaves for autograd, and code that reproduces a call.

`run` executes a call and collects everything it produced (outputs, tensors written in place, gradients) under one set
of names, so that an implementation, the reference and the float64 oracle are compared name by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.core.op import Op, Sample, TensorSpec


def bind(op: Op[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter of the op by name, including defaults."""
    bound = op.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def build(op: Op[Any, Any], sample: Sample, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The sample's arguments by name, with tensors of `dtype` on `device`."""
    return bind(op, *sample.build(dtype, device))


def not_stored(sample: Sample, stored: Collection[torch.dtype]) -> tuple[str, ...]:
    """The reasons why a device that stores these dtypes cannot hold the tensors to which the sample gives a dtype."""
    values = [*sample.args, *sample.kwargs.values()]
    flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
    needed = {v.dtype for v in flat if isinstance(v, TensorSpec) and v.dtype is not None}
    return tuple(f"the device stores no {d} (capability dtypes)" for d in sorted(needed - set(stored), key=str))


def invoke(op: Op[Any, Any], function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls `function`, which has the op's signature."""
    args, kwargs = [], {}
    for name, parameter in op.signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = arguments[name]
        else:
            args.append(arguments[name])
    return function(*args, **kwargs)


def tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, label, tensor) of every tensor argument; a list's tensors are labelled name[i]."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, name, value
        elif isinstance(value, (list, tuple)):
            yield from ((name, f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Tensor))


def map_tensors(arguments: Mapping[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The arguments with `function` applied to every tensor."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        return [convert(v) for v in value] if isinstance(value, list) else value

    return {name: convert(value) for name, value in arguments.items()}


def to_double(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the CPU, floating-point tensors and dtypes in float64: the arguments of the oracle."""
    wide = map_tensors(arguments, lambda x: x.detach().cpu().to(torch.float64 if x.is_floating_point() else x.dtype))
    dtypes = [n for n, v in wide.items() if isinstance(v, torch.dtype) and v.is_floating_point]
    return {**wide, **dict.fromkeys(dtypes, torch.float64)}


def to_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same shapes, dtypes and strides on the meta device."""
    return map_tensors(arguments, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))


@dataclass
class Outcome:
    """The results of a call. gradients is set by the caller, from `backward`; None: autograd returned none."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    result: Any
    leaves: dict[str, Tensor]
    differentiable: list[Tensor]


def run(
    op: Op[Any, Any],
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    with_grad: bool,
    wanted: Sequence[str] | None = None,
) -> Outcome:
    """Calls `function`, recording for autograd if `with_grad`; `backward` is the second half.

    The differentiable arguments (those in `wanted`, or all if it is None) become detached leaves, which share memory
    with `arguments`.
    """
    given = dict(arguments)
    leaves = {}
    if with_grad:
        for name in op.grads if wanted is None else wanted:
            if isinstance(given[name], Tensor) and given[name].is_floating_point():
                given[name] = leaves[name] = given[name].detach().requires_grad_()
    with torch.set_grad_enabled(with_grad):
        result = invoke(op, function, given)
    return outcome_of(op, given, leaves, result)


def outcome_of(op: Op[Any, Any], given: Mapping[str, Any], leaves: dict[str, Tensor], result: Any) -> Outcome:
    """What a call with the arguments `given` has produced, without gradients. leaves: as of Outcome."""
    parts = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    labels = [f"output {i}" for i in range(len(parts))] if isinstance(result, tuple) else ["the output"]
    outputs: dict[str, Tensor] = dict(zip(labels, parts))
    outputs |= {f"{label}, written in place": t for name, label, t in tensors(given) if name in op.mutates}
    differentiable = [t for i, t in enumerate(parts) if _may_have_gradient(t) and i not in op.nondiff_outputs]
    return Outcome(outputs, {}, result, leaves, differentiable)


def _may_have_gradient(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def backward(outcome: Outcome, dys: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Gradients of the leaves for these upstream gradients, one per differentiable output. The graph is kept."""
    pairs = [(y, dy) for y, dy in zip(outcome.differentiable, dys) if y.requires_grad]
    if not pairs or not outcome.leaves:
        return dict.fromkeys(outcome.leaves)
    grads = torch.autograd.grad(
        [y for y, _ in pairs],
        list(outcome.leaves.values()),
        [dy.to(y.device) for y, dy in pairs],
        retain_graph=True,
        allow_unused=True,
    )
    return dict(zip(outcome.leaves, grads))


def upstream(outputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Random upstream gradients like `outputs`, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]


def scattered(dy: Tensor) -> Tensor:
    """The same values with gaps in memory, to check that kernels accept gradients that are not contiguous."""
    if dy.ndim == 0 or dy.numel() == 0:
        return dy
    store = dy.new_zeros((*dy.shape[:-1], 2 * dy.shape[-1] + 1))
    return store[..., : 2 * dy.shape[-1] : 2].copy_(dy)


def code(value: Any) -> str:
    """Python source of a value of a `Sample`; arguments that are defaults are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown: list[str] = []
        for i, f in enumerate(dataclasses.fields(value)):
            item = getattr(value, f.name)
            if f.default is not dataclasses.MISSING:
                default: Any = f.default
            else:
                default = f.default_factory() if f.default_factory is not dataclasses.MISSING else dataclasses.MISSING
            if default is dataclasses.MISSING or code(item) != code(default):
                shown.append(code(item) if len(shown) == i else f"{f.name}={code(item)}")
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {code(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(code(v) for v in value) + (",)" if len(value) == 1 else ")")
    if isinstance(value, list):
        return "[" + ", ".join(code(v) for v in value) + "]"
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f"float({str(value)!r})"
    return repr(value)
