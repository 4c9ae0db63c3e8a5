"""One torch.library op per HAL op, for torch.compile and opcheck. Never on the eager path.

`hal.lower(op)` defines `hal::NAME` with a schema derived from the op's signature: tensors and plain values as they are,
an `Rng` as its integers. It runs the dispatcher; its fake is the reference on fake tensors; its gradient is a second
op, `hal::NAME_backward`, that calls the dispatcher again with autograd on and differentiates that: it pays a forward
more, and needs nothing saved that only one backend knows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ContractError, HalError
from .op import Op
from .rng import Rng
from .signature import annotation_text

_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "Sequence[Tensor] | None": "Tensor[]?",
    "Sequence[int]": "SymInt[]",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "str": "str",
    "device | None": "Device?",
}

_RNG = (("seed", "int?"), ("offset", "int?"), ("full", "SymInt[]?"), ("start", "SymInt[]?"))


@dataclass(frozen=True)
class _Parameter:
    """How a parameter travels: as one value of schema type `type`, as four (kind "rng"), or not ("comm", "hint").

    Compiled code decides by itself which memory is used again, so permissions to overwrite are not passed on.
    """

    name: str
    kind: str
    type: str
    mutable: bool

    def declaration(self, n: int) -> str:
        if self.kind == "rng":
            return ", ".join(f"{type} {self.name}_{field}" for field, type in _RNG)
        alias = f"Tensor(a{n}!)" if self.mutable else "Tensor"
        return f"{self.type.replace('Tensor', alias)} {self.name}"


class Lowered:
    """A HAL op as a torch op; callable with the HAL op's own parameters. Made by `hal.lower`.

    `torch_op` is `torch.ops.hal.NAME`. Raises ContractError when given a communicator of several ranks.
    """

    def __init__(self, op: Op[Any, Any]) -> None:
        self.op = op
        self.parameters = [_parameter(op, n) for n in op.signature.parameters]
        returns = annotation_text(op.signature.return_annotation)
        # An op that returns one tensor or several, depending on an argument, returns a list to torch.
        self.returns = {"None": "()", "Tensor": "Tensor"}.get(returns, "Tensor[]")
        travelling = [p for p in self.parameters if p.kind not in ("comm", "hint")]
        arguments = ", ".join(p.declaration(n) for n, p in enumerate(travelling))
        forward = torch.library.custom_op(
            f"hal::{op.name}", self._forward, mutates_args=op.mutates, schema=f"({arguments}) -> {self.returns}"
        )
        forward.register_fake(self._fake)
        self.torch_op = getattr(torch.ops.hal, op.name)
        if op.grads:
            backward = torch.library.custom_op(
                f"hal::{op.name}_backward",
                self._backward,
                mutates_args=(),
                schema=f"({arguments}, Tensor[] upstream) -> Tensor[]",
            )
            backward.register_fake(self._fake_backward)
            self.torch_backward = getattr(torch.ops.hal, f"{op.name}_backward")
            forward.register_autograd(self._gradients, setup_context=self._save)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.torch_op(*self.flatten(*args, **kwargs))
        if self.returns != "Tensor[]":
            return result
        parts = [y.detach() if i in self.op.nondiff_outputs else y for i, y in enumerate(result)]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def flatten(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The positional arguments of `torch_op` for a call of the HAL op."""
        bound = self.op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        flat: list[Any] = []
        for p in self.parameters:
            value = bound.arguments[p.name]
            if p.kind == "comm":
                if value is not None and value.size > 1:
                    raise ContractError(
                        f"{self.op.name}: a lowered op takes no communicator; found {p.name} of {value.size} ranks. "
                        f"Call hal.ops.{self.op.name} outside of the compiled region"
                    )
            elif p.kind == "hint":
                continue
            elif p.kind == "rng":
                flat += _rng_to_ints(value)
            else:
                flat.append(list(value) if isinstance(value, tuple) else value)
        return flat

    def _arguments(self, flat: Sequence[Any]) -> dict[str, Any]:
        values = iter(flat)
        return {
            p.name: None
            if p.kind == "comm"
            else self.op.signature.parameters[p.name].default
            if p.kind == "hint"
            else _ints_to_rng([next(values) for _ in _RNG])
            if p.kind == "rng"
            else next(values)
            for p in self.parameters
        }

    def _invoke(self, function: Any, arguments: Mapping[str, Any]) -> Any:
        kinds = self.op.signature.parameters
        args = [v for n, v in arguments.items() if kinds[n].kind is not kinds[n].KEYWORD_ONLY]
        return function(*args, **{n: v for n, v in arguments.items() if kinds[n].kind is kinds[n].KEYWORD_ONLY})

    # The forward op. Results are contiguous, here and in the fake, because a compiled graph relies on strides.

    def _forward(self, *flat: Any) -> Any:
        owned = _Owned(flat)
        return self._pack(self._invoke(self.op, self._arguments(flat)), owned.take)

    def _fake(self, *flat: Any) -> Any:
        result = self._invoke(self.op.reference, self._arguments(flat))
        return self._pack(result, lambda y: torch.empty_like(y, memory_format=torch.contiguous_format))

    def _pack(self, result: Any, prepare: Any) -> Any:
        if self.returns == "()":
            return None
        if self.returns == "Tensor":
            return prepare(result)
        return [prepare(y) for y in (result if isinstance(result, tuple) else (result,))]

    # The backward op.

    def _backward(self, *flat: Any) -> list[Tensor]:
        *flat_inputs, upstream = flat
        arguments = self._arguments(flat_inputs)
        leaves = {n: arguments[n].detach().requires_grad_() for n in self._differentiated(arguments)}
        with torch.enable_grad(), _autograd_keys():
            result = self._invoke(self.op, {**arguments, **leaves})
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
        arguments = self._arguments(flat[:-1])
        return [
            torch.empty_like(arguments[n], memory_format=torch.contiguous_format)
            for n in self._differentiated(arguments)
        ]

    def _differentiated(self, arguments: Mapping[str, Any]) -> list[str]:
        return [n for n in self.op.grads if arguments[n] is not None]

    def _differentiable(self, outputs: Sequence[Any]) -> list[Any]:
        return [y for i, y in enumerate(outputs) if i not in self.op.nondiff_outputs]

    # What torch.library calls around them.

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, Tensor)))
        ctx.plain = tuple(_TENSOR if isinstance(v, Tensor) else v for v in inputs)
        ctx.outputs = self._differentiable(output if isinstance(output, list) else (output,))
        ctx.outputs = [(y.shape, y.dtype, y.device) for y in ctx.outputs]

    def _gradients(self, ctx: Any, *output_grads: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        flat = [next(saved) if v is _TENSOR else v for v in ctx.plain]
        given = self._differentiable(output_grads[0] if isinstance(output_grads[0], list) else output_grads)
        upstream = [
            torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy
            for dy, (shape, dtype, device) in zip(given, ctx.outputs)
        ]
        grads = iter(self.torch_backward(*flat, upstream))
        arguments = self._arguments(flat)
        result: list[Any] = []
        for p in self.parameters:
            if p.kind == "rng":
                result += [None] * len(_RNG)
            elif p.kind != "comm":
                result.append(next(grads) if p.name in self._differentiated(arguments) else None)
        return tuple(result)


@functools.cache
def lower(op: Op[Any, Any]) -> Lowered:
    """The torch op of a HAL op, callable with the HAL op's own parameters, for use inside torch.compile.

    Defined on the first call; the same object afterwards. Raises HalError for a signature torch.library has no types
    for.

    >>> layer_norm = hal.lower(hal.ops.layer_norm)                                        # doctest: +SKIP
    >>> torch.compile(lambda x, w, b: layer_norm(x, w, b) * 2, fullgraph=True)(x, w, b)   # doctest: +SKIP
    """
    return Lowered(op)


def _parameter(op: Op[Any, Any], name: str) -> _Parameter:
    text = annotation_text(op.signature.parameters[name].annotation)
    kind = {"Rng": "rng", "Comm": "comm"}.get(text.removesuffix(" | None"), "plain")
    if name in op.hints:
        kind = "hint"
    if kind == "plain" and text not in _TYPES:
        raise HalError(
            f"op '{op.name}' cannot be lowered: torch.library has no type for its parameter '{name}: {text}'. "
            f"Known: {', '.join(_TYPES)}, Rng, Comm"
        )
    return _Parameter(name, kind, _TYPES.get(text, ""), name in op.mutates)


def _rng_to_ints(rng: Rng | None) -> list[Any]:
    """Seed and offset as the signed integers with their bits, and the block, if any."""
    if rng is None:
        return [None] * len(_RNG)
    signed = [v - (1 << 64) if v >= 1 << 63 else v for v in (rng.seed, rng.offset)]
    block = [None if t is None else list(t) for t in (rng.full_shape, rng.start)]
    return [*signed, *block]


def _ints_to_rng(values: Sequence[Any]) -> Rng | None:
    seed, offset, full, start = values
    if seed is None:
        return None
    rng = Rng(seed % (1 << 64), offset % (1 << 64))
    return rng if full is None else rng.block(full, start)


class _Owned:
    """Results as torch.library wants them: contiguous, sharing memory with no argument and no other result."""

    def __init__(self, flat: Sequence[Any]) -> None:
        tensors = [t for v in flat for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]
        self.taken = {t.untyped_storage().data_ptr() for t in tensors}

    def take(self, y: Tensor) -> Tensor:
        y = y.contiguous()
        if y.untyped_storage().data_ptr() in self.taken:
            y = y.clone(memory_format=torch.contiguous_format)
        self.taken.add(y.untyped_storage().data_ptr())
        return y


@contextmanager
def _autograd_keys() -> Iterator[None]:
    """Autograd records again: torch runs the kernel of a custom op below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


_TENSOR = object()
