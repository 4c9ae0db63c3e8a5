"""Random streams whose integers are values of a graph, and how a stream enters one.

An `Rng` is two Python integers. A graph that was traced with them would repeat the numbers of the step at which it was
traced. In torch ops, a stream is therefore a tensor, and where a graph outlives the call, only a `TensorRng`, which
holds such a tensor from the start, is accepted.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor

from ..errors import ContractError
from ..rng import Rng
from .torch_versions import is_exporting

_U64 = 1 << 64
_FORK = "rng_fork"


class TensorRng:
    """An `Rng` whose seed and offset are in a tensor: for code that torch.compile, torch.export or make_fx traces.

    state: int64 [2] on the CPU, the seed and the offset, each as the signed integer with the same 64 bits; `of` makes
    it. `fork` and `block` are those of Rng and give the same numbers; a traced fork is computed when the graph runs. A
    new state gives new numbers without a new graph. Ops take it wherever they take an Rng; read by an implementation
    outside of a graph, it costs a few microseconds more.

    >>> TensorRng.of(Rng(7)).fork("dropout", 0).seed == Rng(7).fork("dropout", 0).seed
    True
    """

    def __init__(
        self, state: Tensor, full_shape: tuple[int, ...] | None = None, start: tuple[int, ...] | None = None
    ) -> None:
        if state.shape != (2,) or state.dtype is not torch.int64 or not (state.is_cpu or state.is_meta):
            raise ContractError(
                f"TensorRng: expected state int64 [2] on the CPU; found {state.dtype} {list(state.shape)} on "
                f"{state.device}. TensorRng.of(rng) makes one"
            )
        self.state, self.full_shape, self.start = state, full_shape, start

    @classmethod
    def of(cls, rng: Rng) -> TensorRng:
        """The same stream as `rng`, and the same block of it."""
        return cls(_words(rng.seed, rng.offset), rng.full_shape, rng.start)

    @property
    def seed(self) -> int:
        return int(self.state[0]) % _U64

    @property
    def offset(self) -> int:
        return int(self.state[1]) % _U64

    def fork(self, *names: str | int) -> TensorRng:
        """As `Rng.fork`."""
        if not names:
            raise ContractError("TensorRng.fork needs at least one name, e.g. rng.fork('dropout', layer)")
        return TensorRng(torch.ops.hal.rng_fork(self.state, repr(names)))

    def block(self, full_shape: Sequence[int], start: Sequence[int]) -> TensorRng:
        """As `Rng.block`."""
        if len(full_shape) != len(start):
            raise ContractError(f"TensorRng.block: start {start} does not lie in a draw of shape {full_shape}")
        return TensorRng(self.state, tuple(full_shape), tuple(start))

    def plain(self) -> Rng:
        """The stream as an Rng. Reads the state, so it cannot be traced."""
        rng = Rng(self.seed, self.offset)
        return rng if self.full_shape is None or self.start is None else rng.block(self.full_shape, self.start)

    def indexing(self, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """As `Rng.indexing`."""
        return self.plain().indexing(shape)

    def __repr__(self) -> str:
        return f"TensorRng({self.state!r}, {self.full_shape}, {self.start})"


def state_of(rng: Rng | TensorRng) -> Tensor:
    """The state of a stream as int64 [2]. Raises ContractError for an Rng where a graph would keep its integers.

    torch.compile guards them instead: a call with others is compiled again.
    """
    if isinstance(rng, TensorRng):
        return rng.state
    if is_exporting() or (not torch.compiler.is_dynamo_compiling() and recording()):
        raise ContractError(
            "an Rng would become a constant of the graph that is being traced, which would repeat the same random "
            "numbers in every call; pass hal.TensorRng(state), with the state an input of the graph, or trace without "
            "dropout (evaluation mode)"
        )
    return _words(rng.seed, rng.offset)


def recording() -> bool:
    """Whether calls are recorded in a graph, by torch.jit.trace, make_fx or torch.export."""
    return torch._C._get_tracing_state() is not None or proxy_tensor.get_proxy_mode() is not None


def _words(seed: int, offset: int) -> Tensor:
    signed = [v - _U64 if v >= 1 << 63 else v for v in (seed, offset)]
    return torch.tensor(signed, dtype=torch.int64, device="cpu")


def _fork(state: Tensor, names: str) -> Tensor:
    """state int64 [2] -> the state of the forked stream, int64 [2]."""
    forked = TensorRng(state).plain().fork(*ast.literal_eval(names))
    return _words(forked.seed, forked.offset)


def _fork_batched(info: Any, in_dims: Any, state: Tensor, names: str) -> tuple[Tensor, int]:
    """The rule for vmap over states."""
    states = state.movedim(in_dims[0], 0)
    return torch.stack([torch.ops.hal.rng_fork(s, names) for s in states.unbind(0)]), 0


_library: Any = torch.library.Library("hal", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"{_FORK}(Tensor state, str names) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl(_FORK, _fork, "CPU")
torch.library.register_fake(f"hal::{_FORK}", lambda state, names: torch.empty_like(state), lib=_library)
torch.library.register_vmap(f"hal::{_FORK}", _fork_batched, lib=_library)
