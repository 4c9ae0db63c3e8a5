"""vmap over lowered ops: one call per slice, whose results are stacked.

Every implementation accepts slices, but few accept another dimension, so only this rule is valid for all ops. The
residuals of the slices share one token, whose record is the list of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedOp
from . import residuals
from .torch_versions import tags

if TYPE_CHECKING:
    from .lower import Lowered


def register(lowered: Lowered, library: Any) -> None:
    """Registers the rules of the torch ops of `lowered`."""
    op = lowered.op

    def call(info: Any, in_dims: Sequence[Any], *flat: Any) -> tuple[Any, Any]:
        _require_functional(lowered)
        _require_randomness(lowered, info, in_dims, flat)
        return _stacked([lowered.torch_op(*slice) for slice in _slices(info, in_dims, flat)])

    def forward(info: Any, in_dims: Sequence[Any], *flat: Any) -> tuple[Any, Any]:
        _require_randomness(lowered, info, in_dims, flat)
        results = [lowered.torch_forward(*slice) for slice in _slices(info, in_dims, flat)]
        stacked, dims = _stacked([r[:-1] for r in results])
        return [*stacked, torch.ops.hal.join_tokens([r[-1] for r in results])], [*dims, 0]

    def backward(info: Any, in_dims: Sequence[Any], *flat: Any) -> tuple[Any, Any]:
        slices = _slices(info, [None, *in_dims[1:]], flat)
        if in_dims[0] is not None:  # the forward was batched, too; in jacrev it is not
            tokens = flat[0].movedim(in_dims[0], 0)
            slices = [[torch.ops.hal.token_at(tokens, i), *slice[1:]] for i, slice in enumerate(slices)]
        return _stacked([lowered.torch_backward(*slice) for slice in slices])

    rules = {op.name: call}
    if op.grads:
        rules |= {f"{op.name}_forward": forward, f"{op.name}_backward": backward}
    for name, rule in rules.items():
        torch.library.register_vmap(f"hal::{name}", rule, lib=library)


def _require_functional(lowered: Lowered) -> None:
    if lowered.op.mutates:
        raise UnsupportedOp(
            f"{lowered.op.name} under vmap: it writes to {', '.join(lowered.op.mutates)}; call it outside of vmap"
        )


def _require_randomness(lowered: Lowered, info: Any, in_dims: Sequence[Any], flat: Sequence[Any]) -> None:
    """Refuses draws that would be the same in every slice, unless the caller permits this."""
    for name, parameter in lowered.op.schema.parameters.items():
        state = flat[lowered.position(name)] if parameter.kind == "rng" else None
        if state is not None and in_dims[lowered.position(name)] is None and info.randomness != "same":
            raise UnsupportedOp(
                f"{lowered.op.name} under vmap: every slice would draw the same numbers from {name}; pass a batch of "
                f"streams (vmap over the state of a hal.TensorRng), or vmap(..., randomness='same')"
            )


def _slices(info: Any, in_dims: Sequence[Any], flat: Sequence[Any]) -> list[list[Any]]:
    """The flat arguments of each slice."""
    if info.batch_size == 0:
        raise UnsupportedOp("HAL's ops under vmap: the batch is empty, so the shapes of the results are unknown")
    return [[_at(v, d, i) for v, d in zip(flat, in_dims)] for i in range(info.batch_size)]


def _at(value: Any, dim: Any, i: int) -> Any:
    if isinstance(value, Tensor):
        return value if dim is None else value.select(dim, i)
    if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_at(v, d, i) for v, d in zip(value, dim)]
    return value


def _stacked(results: Sequence[Any]) -> tuple[Any, Any]:
    """The results of the slices, stacked along dimension 0, and these dimensions."""
    if isinstance(results[0], Tensor):
        return torch.stack(list(results)), 0
    return [torch.stack(list(ys)) for ys in zip(*results)], [0] * len(results[0])


def _join(tokens: Sequence[Tensor]) -> Tensor:
    return residuals.token_of([residuals.record_of(t) for t in tokens], len(tokens))


def _at_index(tokens: Tensor, i: int) -> Tensor:
    return residuals.token_of(residuals.record_of(tokens)[i])


def _nested(info: Any, in_dims: Any, *args: Any) -> Any:
    raise UnsupportedOp(
        "gradients of HAL's ops inside of two nested vmaps are not supported; flatten the two dimensions into one"
    )


def _define(name: str, schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """An op on tokens, whose result is a token."""
    _library.define(name + schema, tags=tags("pt2_compliant_tag", "cudagraph_unsafe"))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hal::{name}", fake, lib=_library)
    torch.library.register_vmap(f"hal::{name}", _nested, lib=_library)


_library: Any = torch.library.Library("hal", "FRAGMENT")  # type: ignore[no-untyped-call]
_define("join_tokens", "(Tensor[] tokens) -> Tensor", _join, lambda tokens: tokens[0].new_empty((len(tokens), 1)))
_define("token_at", "(Tensor tokens, int i) -> Tensor", _at_index, lambda tokens, i: tokens.new_empty(1))
