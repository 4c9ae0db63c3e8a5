"""One torch.library op per HAL op, for everything that traces or transforms code. Never on the eager path.

`hal.lower(op)` defines `hal::NAME` with a schema derived from the op's signature: tensors and plain values as they are,
a random stream as a tensor. It runs the dispatcher; its fake is the reference on fake tensors (or `op.shapes`). Where a
gradient is needed, `hal::NAME_forward` runs in its place, which also returns a token of the implementation's residuals
(see residuals.py), and `hal::NAME_backward` takes the token: no forward is computed twice.

For example, a traced `y = ops.rms_norm(x, w)` of tensors that need gradients becomes

    y, token = hal::rms_norm_forward(x, w, 1e-5, needs=[True, True], kept=[0, 1])
    dx, dw = hal::rms_norm_backward(token, [x, w], kept=[0, 1], [dy], ...shapes and dtypes of x and w)

The implementation's residuals are (x, w, statistics). x and w are sources 0 and 1 of the call, so the graph keeps them
itself and passes them back (`kept`); the statistics, which are not part of the graph, stay in a record under `token`, a
tensor of one integer, until the backward pass has taken them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import HalError
from . import batching, dispatch, gradients, residuals, torch_arguments
from .backend import Impl
from .op import Op
from .torch_versions import given_dtypes, tags

_ALL = range(1 << 30)

LIBRARY: Any = torch.library.Library("hal", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Owns the definitions, which are removed when it is freed."""


class Lowered:
    """A HAL op as a torch op; callable with the HAL op's own parameters. Made by `hal.lower`.

    `torch_op` is `torch.ops.hal.NAME`. Raises ContractError when given a communicator of several ranks.

    Its arguments are called "flat" below: those of the HAL op, in order, each converted by torch_arguments.py. The
    tensors of a call, first those of its arguments in order, then its results, are its "sources", by number.
    """

    def __init__(self, op: Op[Any, Any]) -> None:
        if op.grads and op.mutates:
            raise HalError(f"op '{op.name}' has gradients and writes to {op.mutates}; such an op has no lowered form")
        self.op = op
        self._arguments = torch_arguments.of(op.schema, op.signature, op.hints, op.mutates)
        starts = itertools.accumulate((a.count for a in self._arguments), initial=0)
        self._places = {a.parameter.name: (start, a.count) for a, start in zip(self._arguments, starts)}
        self.flatten = torch_arguments.flattening(op.name, op.schema, op.signature, self._arguments)
        # An op that returns one tensor or several, depending on an argument, returns a list to torch.
        returns = {"none": "()", "tensor": "Tensor", "tensors": "Tensor[]"}[op.schema.returns]
        declared = ", ".join(text for n, a in enumerate(self._arguments) for text in a.declare(n))
        self._define(op.name, f"({declared}) -> {returns}", self._forward, self._fake)
        self.torch_op = getattr(torch.ops.hal, op.name)
        if op.grads:
            name, kept = f"{op.name}_forward", "bool[] needs, int[] kept"
            self.torch_forward = self._define(
                name, f"({declared}, {kept}) -> Tensor[]", self._recorded, self._fake_recorded
            )
            self.torch_backward = self._define(
                f"{op.name}_backward",
                "(Tensor token, Tensor[] sources, int[] kept, Tensor?[] upstream, SymInt[] sizes, int[] ndims, "
                "ScalarType[] dtypes, Device device) -> Tensor[]",
                self._backward,
                self._fake_backward,
            )
        gradients.register(self, LIBRARY)
        batching.register(self, LIBRARY)

    def _define(self, name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        """Defines a torch op and returns its one overload."""
        unsafe = () if self._graph_safe(name) else ("cudagraph_unsafe",)
        LIBRARY.define(name + schema, tags=tags("pt2_compliant_tag", "needs_exact_strides", *unsafe))
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hal::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.hal, name).default

    def _graph_safe(self, name: str) -> bool:
        """Whether a recording of the torch op on the device may be repeated.

        Residuals and random streams are read on the host, so ops that use them run outside of recorded graphs.
        """
        active = dispatch.chosen_backend()
        draws = any(isinstance(a, torch_arguments.Stream) for a in self._arguments)
        return active is not None and active.capabilities().graphs and name == self.op.name and not draws

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.unpack(self.torch_op(*self.flatten(*args, **kwargs)))

    def unpack(self, result: Any) -> Any:
        """What the HAL op returns for a result of the torch op."""
        if self.op.schema.returns != "tensors":
            return result
        return result[0] if len(result) == 1 else tuple(result)

    def restore(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The arguments of the HAL op by name; the inverse of `flatten`."""
        given, position = {}, 0
        for a in self._arguments:
            given[a.parameter.name] = a.restore(flat[position : position + a.count])
            position += a.count
        return given

    def position(self, name: str) -> int:
        """The index of the parameter's first argument among the flat ones."""
        return self._places[name][0]

    def tensors_of(self, name: str, flat: Sequence[Any]) -> int:
        """The number of tensors among the flat arguments of a parameter."""
        position, count = self._places[name]
        return len(gradients.tensors(flat[position : position + count]))

    def invoke(self, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """Calls `function`, which has the op's signature, with the arguments of these names."""
        bound = self.op.signature.bind_partial()
        bound.arguments.update(given)
        return function(*bound.args, **bound.kwargs)

    # Results are contiguous, in the ops and in their fakes, because a compiled graph relies on strides.

    def _forward(self, *flat: Any) -> Any:
        owned = _Owned(flat)
        result = self.invoke(self.op, self.restore(flat))
        if self.op.schema.returns == "none":
            return None
        if self.op.schema.returns == "tensor":
            return owned.take(result)
        return [owned.take(y) for y in _results(result)]

    def _fake(self, *flat: Any) -> Any:
        given = self.restore(flat)
        call = self.invoke(self.op.verify, given)
        result = self.op.shapes(call) if self.op.shapes else self.invoke(self.op.reference, given)
        if self.op.schema.returns == "none":
            return None
        empty = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in _results(result)]
        return empty[0] if self.op.schema.returns == "tensor" else empty

    def _recorded(self, *flat: Any) -> list[Tensor]:
        """The results, and the token of what the backward pass needs apart from the sources `kept`.

        needs: which arguments of `op.grads` get a gradient.
        """
        *inputs, needs, kept = flat
        outputs, record = self._record(self.op, inputs, needs, kept)
        return [*outputs, residuals.token_of(record)]

    def _record(
        self, run: Callable[..., Any], flat: Sequence[Any], needs: Sequence[bool], kept: Sequence[int]
    ) -> tuple[list[Tensor], residuals.Record]:
        """The results of `run`, which has the op's signature, and the record of its graph."""
        names = [name for name, need in zip(self.op.grads, needs) if need]
        given = self.restore(flat)
        results, record = residuals.record(lambda g: self.invoke(run, g), given, names, self.op.nondiff_outputs)
        owned = _Owned(flat)
        outputs = [owned.take(y) for y in results]  # the same objects, unless they have to be copied
        arguments = gradients.tensors(flat)
        sources = dict(enumerate(arguments))
        # A result that was copied is not part of the graph; only the residuals use its memory.
        sources |= {len(arguments) + i: y for i, y in enumerate(results) if y is outputs[i]}
        record.settle(sources, kept)
        return outputs, record

    def residual_sources(self, impl: Impl, flat: Sequence[Any], needs: Sequence[bool]) -> set[int]:
        """Runs an implementation and returns the numbers of the sources that its residuals share memory with."""
        return self._record(impl.call, flat, needs, _ALL)[1].shelf.used

    def _fake_recorded(self, *flat: Any) -> list[Tensor]:
        result = self._fake(*flat[:-2])
        outputs = result if isinstance(result, list) else [result]
        return [*outputs, torch.empty(1, dtype=torch.int64, device="cpu")]

    def _backward(
        self,
        token: Tensor,
        sources: Sequence[Tensor],
        kept: Sequence[int],
        upstream: Sequence[Tensor | None],
        sizes: Sequence[int],
        ndims: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[Tensor]:
        """The gradients that the forward's `needs` selected, of the given shapes, from those of its results."""
        record = residuals.record_of(token)
        grads = record.backward(dict(zip(kept, sources)), upstream)
        owned = _Owned([*sources, *upstream])
        shapes = _split(sizes, ndims)
        return [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else owned.take(g)
            for g, shape, dtype in zip(grads.values(), shapes, given_dtypes(dtypes))
        ]

    def _fake_backward(
        self, token: Tensor, sources: Any, kept: Any, upstream: Any, sizes: Any, ndims: Any, dtypes: Any, device: Any
    ) -> list[Tensor]:
        shapes = zip(_split(sizes, ndims), given_dtypes(dtypes))
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]


@functools.cache
def lower(op: Op[Any, Any]) -> Lowered:
    """The torch op of a HAL op, callable with the HAL op's own parameters.

    Calling the HAL op inside of torch.compile, torch.export, FakeTensorMode and functorch's transforms, or with meta or
    fake tensors, does the same; this function is for graphs that are built by hand. Defined on the first call; the same
    object afterwards. A process that loads an exported graph has to call it first, for every op in the graph.

    >>> layer_norm = hal.lower(hal.ops.layer_norm)                                        # doctest: +SKIP
    >>> torch.compile(lambda x, w, b: layer_norm(x, w, b) * 2, fullgraph=True)(x, w, b)   # doctest: +SKIP
    """
    return Lowered(op)


def _results(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _split(sizes: Sequence[int], ndims: Sequence[int]) -> list[Sequence[int]]:
    shapes, position = [], 0
    for ndim in ndims:
        shapes.append(sizes[position : position + ndim])
        position += ndim
    return shapes


class _Owned:
    """Makes results what torch.library requires: contiguous, sharing memory with no argument and no other result."""

    def __init__(self, flat: Sequence[Any]) -> None:
        self.taken = {t.untyped_storage().data_ptr() for t in gradients.tensors(flat)}

    def take(self, y: Tensor) -> Tensor:
        """`y` (any shape), or a contiguous copy in separate memory."""
        y = y.contiguous()
        if y.untyped_storage().data_ptr() in self.taken:
            y = y.clone(memory_format=torch.contiguous_format)
        self.taken.add(y.untyped_storage().data_ptr())
        return y
