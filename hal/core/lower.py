"""One torch.library op per HAL op, for torch.compile and opcheck. Never on the eager path.

`hal.lower(op)` defines `hal::NAME` with a schema derived from the op's signature: tensors and plain values as they are,
an `Rng` as its integers. It runs the dispatcher; its fake is the reference on fake tensors; its gradient is a second
op, `hal::NAME_backward`, that calls the dispatcher again with autograd enabled and differentiates that call. This costs
one extra forward, but avoids saved tensors, whose number and shapes differ between backends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import ContractError
from ..rng import Rng
from .op import Op
from .refused_tensors import refuse_tangents
from .signature import Parameter


@dataclass(frozen=True)
class _Value:
    """A parameter that is one argument of the torch op: a tensor, a sequence or a plain value."""

    parameter: Parameter
    mutable: bool
    """The op writes to it."""
    count = 1
    """The number of arguments of the torch op that represent the parameter."""

    def declare(self, position: int) -> list[str]:
        """The arguments in a torch.library schema; `position` makes alias names unique."""
        alias = f"Tensor(a{position}!)" if self.mutable else "Tensor"
        return [f"{self.parameter.torch_type.replace('Tensor', alias)} {self.parameter.name}"]

    def flatten(self, value: Any) -> list[Any]:
        """The torch op's arguments for a value of the parameter."""
        return [list(value) if isinstance(value, tuple) else value]

    def restore(self, flat: Sequence[Any]) -> Any:
        """The parameter's value from the torch op's arguments."""
        return flat[0]


@dataclass(frozen=True)
class _RngFields:
    """An Rng as four arguments; all four are None if the Rng is absent."""

    parameter: Parameter
    count = 4

    def declare(self, position: int) -> list[str]:
        fields = (("int?", "seed"), ("int?", "offset"), ("SymInt[]?", "full"), ("SymInt[]?", "start"))
        return [f"{type} {self.parameter.name}_{field}" for type, field in fields]

    def flatten(self, value: Rng | None) -> list[Any]:
        if value is None:
            return [None] * self.count
        # torch's int is signed, so each unsigned value is passed as the signed integer with the same 64 bits.
        seed, offset = (v - (1 << 64) if v >= 1 << 63 else v for v in (value.seed, value.offset))
        return [seed, offset, *(None if t is None else list(t) for t in (value.full_shape, value.start))]

    def restore(self, flat: Sequence[Any]) -> Rng | None:
        seed, offset, full, start = flat
        if seed is None:
            return None
        rng = Rng(seed % (1 << 64), offset % (1 << 64))
        return rng if full is None else rng.block(full, start)


@dataclass(frozen=True)
class _Constant:
    """A parameter that the torch op does not have, because a lowered op always runs with the same value of it.

    This applies to a Comm, which must have one rank (None), and to a hint, which keeps its default: compiled code
    decides by itself which memory is reused, so permissions to overwrite are not passed on.
    """

    parameter: Parameter
    op: str
    value: Any
    count = 0

    def declare(self, position: int) -> list[str]:
        return []

    def flatten(self, value: Any) -> list[Any]:
        if self.parameter.kind == "comm" and value is not None and value.size > 1:
            raise ContractError(
                f"{self.op}: a lowered op takes no communicator; found {self.parameter.name} of {value.size} ranks. "
                f"Call hal.ops.{self.op} outside of the compiled region"
            )
        return []

    def restore(self, flat: Sequence[Any]) -> Any:
        return self.value


def _argument(op: Op[Any, Any], parameter: Parameter) -> _Value | _RngFields | _Constant:
    """The representation of a parameter of the op in its torch op."""
    if parameter.kind == "comm":
        return _Constant(parameter, op.name, None)
    if parameter.name in op.hints:
        return _Constant(parameter, op.name, op.signature.parameters[parameter.name].default)
    if parameter.kind == "rng":
        return _RngFields(parameter)
    return _Value(parameter, parameter.name in op.mutates)


class Lowered:
    """A HAL op as a torch op; callable with the HAL op's own parameters. Made by `hal.lower`.

    `torch_op` is `torch.ops.hal.NAME`. Raises ContractError when given a communicator of several ranks.

    Its arguments are called "flat" below: those of the HAL op, in order, each converted as `_argument` specifies.
    """

    def __init__(self, op: Op[Any, Any]) -> None:
        self.op = op
        self._arguments = [_argument(op, p) for p in op.schema.parameters.values()]
        # An op that returns one tensor or several, depending on an argument, returns a list to torch.
        returns = {"none": "()", "tensor": "Tensor", "tensors": "Tensor[]"}[op.schema.returns]
        declared = ", ".join(text for n, a in enumerate(self._arguments) for text in a.declare(n))
        forward = torch.library.custom_op(
            f"hal::{op.name}", self._forward, mutates_args=op.mutates, schema=f"({declared}) -> {returns}"
        )
        forward.register_fake(self._fake)
        self.torch_op = getattr(torch.ops.hal, op.name)
        if op.grads:
            backward = torch.library.custom_op(
                f"hal::{op.name}_backward",
                self._backward,
                mutates_args=(),
                schema=f"({declared}, Tensor[] upstream) -> Tensor[]",
            )
            backward.register_fake(self._fake_backward)
            self._torch_backward = getattr(torch.ops.hal, f"{op.name}_backward")
            forward.register_autograd(self._gradients, setup_context=self._save)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(self.op, None, self.op.signature.bind(*args, **kwargs).arguments)
        result = self.torch_op(*self.flatten(*args, **kwargs))
        if self.op.schema.returns != "tensors":
            return result
        parts = [y.detach() if i in self.op.nondiff_outputs else y for i, y in enumerate(result)]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def flatten(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The positional arguments of `torch_op` for a call of the HAL op."""
        bound = self.op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return [v for a in self._arguments for v in a.flatten(bound.arguments[a.parameter.name])]

    def _restore(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The arguments of the HAL op by name; the inverse of `flatten`."""
        given, position = {}, 0
        for a in self._arguments:
            given[a.parameter.name] = a.restore(flat[position : position + a.count])
            position += a.count
        return given

    def _invoke(self, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """Calls `function`, which has the op's signature, with the arguments of these names."""
        bound = self.op.signature.bind_partial()
        bound.arguments.update(given)
        return function(*bound.args, **bound.kwargs)

    # The forward op. Results are contiguous, here and in the fake, because a compiled graph relies on strides.

    def _forward(self, *flat: Any) -> Any:
        owned = _Owned(flat)
        return self._pack(self._invoke(self.op, self._restore(flat)), owned.take)

    def _fake(self, *flat: Any) -> Any:
        result = self._invoke(self.op.reference, self._restore(flat))
        return self._pack(result, lambda y: torch.empty_like(y, memory_format=torch.contiguous_format))

    def _pack(self, result: Any, prepare: Callable[[Tensor], Tensor]) -> Any:
        """What the torch op returns for a result of the HAL op, each tensor passed through `prepare`."""
        if self.op.schema.returns == "none":
            return None
        if self.op.schema.returns == "tensor":
            return prepare(result)
        return [prepare(y) for y in (result if isinstance(result, tuple) else (result,))]

    # The backward op takes the forward's arguments and the gradients of the differentiable outputs ("upstream"). It
    # returns the gradients of the arguments in `op.grads` that are not None, each in the shape of its argument.

    def _backward(self, *flat: Any) -> list[Tensor]:
        *inputs, upstream = flat
        given = self._restore(inputs)
        leaves = {name: given[name].detach().requires_grad_() for name in self._differentiated(given)}
        with torch.enable_grad(), _autograd_keys():
            result = self._invoke(self.op, {**given, **leaves})
            outputs = self._differentiable(result if isinstance(result, tuple) else (result,))
            pairs = [(y, dy) for y, dy in zip(outputs, upstream) if y.requires_grad]
            grads: Sequence[Tensor | None] = [None] * len(leaves)
            if pairs:
                ys, dys = zip(*pairs)
                grads = torch.autograd.grad(ys, list(leaves.values()), dys, allow_unused=True)
        owned = _Owned(flat)
        return [
            torch.zeros_like(x, memory_format=torch.contiguous_format) if g is None else owned.take(g)
            for x, g in zip(leaves.values(), grads)
        ]

    def _fake_backward(self, *flat: Any) -> list[Tensor]:
        given = self._restore(flat[:-1])
        return [
            torch.empty_like(given[name], memory_format=torch.contiguous_format) for name in self._differentiated(given)
        ]

    def _differentiated(self, given: Mapping[str, Any]) -> list[str]:
        return [name for name in self.op.grads if given[name] is not None]

    def _differentiable(self, outputs: Sequence[Any]) -> list[Any]:
        return [y for i, y in enumerate(outputs) if i not in self.op.nondiff_outputs]

    # Callbacks that torch.library calls to set up and run the backward pass.

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves the forward's arguments, and the output metadata needed to create zeros for absent gradients."""
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, Tensor)))
        ctx.plain = tuple(_SAVED_TENSOR if isinstance(v, Tensor) else v for v in inputs)
        outputs = self._differentiable(output if isinstance(output, list) else (output,))
        ctx.outputs = [(y.shape, y.dtype, y.device) for y in outputs]

    def _gradients(self, ctx: Any, *output_grads: Any) -> tuple[Any, ...]:
        """One gradient per argument of the torch op, from the backward op."""
        tensors = iter(ctx.saved_tensors)
        flat = [next(tensors) if v is _SAVED_TENSOR else v for v in ctx.plain]
        arrived = self._differentiable(output_grads[0] if isinstance(output_grads[0], list) else output_grads)
        upstream = [
            torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy
            for dy, (shape, dtype, device) in zip(arrived, ctx.outputs)
        ]
        grads = dict(zip(self._differentiated(self._restore(flat)), self._torch_backward(*flat, upstream)))
        # Parameters that become several arguments (an Rng) or none (a Comm, a hint) are never in `op.grads`.
        return tuple(g for a in self._arguments for g in [grads.get(a.parameter.name)] * a.count)


@functools.cache
def lower(op: Op[Any, Any]) -> Lowered:
    """The torch op of a HAL op, callable with the HAL op's own parameters, for use inside torch.compile.

    Defined on the first call; the same object afterwards.

    >>> layer_norm = hal.lower(hal.ops.layer_norm)                                        # doctest: +SKIP
    >>> torch.compile(lambda x, w, b: layer_norm(x, w, b) * 2, fullgraph=True)(x, w, b)   # doctest: +SKIP
    """
    return Lowered(op)


class _Owned:
    """Makes results what torch.library requires: contiguous, sharing memory with no argument and no other result."""

    def __init__(self, flat: Sequence[Any]) -> None:
        tensors = [t for v in flat for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]
        self.taken = {t.untyped_storage().data_ptr() for t in tensors}

    def take(self, y: Tensor) -> Tensor:
        """`y` (any shape), or a contiguous copy with memory of its own."""
        y = y.contiguous()
        if y.untyped_storage().data_ptr() in self.taken:
            y = y.clone(memory_format=torch.contiguous_format)
        self.taken.add(y.untyped_storage().data_ptr())
        return y


@contextmanager
def _autograd_keys() -> Iterator[None]:
    """Lets autograd record: torch runs the kernel of a custom op with autograd's dispatch keys excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


_SAVED_TENSOR = object()
"""Stands in a tuple of plain values for a tensor that autograd saves."""
