"""Random numbers as values.

An `Rng` is an immutable pair of integers; a new stream is created by forking it under a name. Therefore the order of
calls does not matter, recomputation needs no saved device state, and a checkpoint that stores `(seed, offset)` gives
the same numbers on every backend and for every world size.

Element e of a draw is word e % 4 of Philox4x32-10 with key `seed` and counter `offset + e // 4` (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). The ops that draw are in `hal.ops`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ContractError

_U64 = 1 << 64
_MAX_ELEMENTS = 1 << 62


@dataclass(frozen=True, slots=True)
class Rng:
    """A position in a Philox stream, or a block of a larger draw at that position.

    seed, offset: unsigned 64-bit. `full_shape` and `start` are set by `block` only.
    """

    seed: int
    offset: int = 0
    full_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("seed", self.seed), ("offset", self.offset)):
            if not isinstance(value, int) or not 0 <= value < _U64:
                raise ContractError(f"Rng {name} must be an integer in [0, 2**64), got {value!r}")

    def fork(self, *names: str | int) -> Rng:
        """An independent stream that is determined by this one and by `names` (in order).

        >>> Rng(1).fork("dropout", 3) == Rng(1).fork("dropout", 3)
        True
        """
        if not names:
            raise ContractError("Rng.fork needs at least one name, e.g. rng.fork('dropout', layer)")
        # blake2b, because Python's hash() of strings differs between processes.
        text = repr((self.seed, self.offset, names))
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"hal.rng").digest()
        return Rng(int.from_bytes(digest, "little"))

    def block(self, full_shape: Sequence[int], start: Sequence[int]) -> Rng:
        """This stream, restricted to a block of a draw of `full_shape` whose first element is at `start`.

        A tensor of shape s drawn from it equals `full[start[0]:start[0]+s[0], ...]`: a rank that stores a shard of a
        tensor draws exactly the numbers that a single process with the full tensor would draw for that shard.
        """
        full, first = tuple(int(n) for n in full_shape), tuple(int(n) for n in start)
        if len(full) != len(first) or any(not 0 <= i <= n for i, n in zip(first, full)):
            raise ContractError(f"Rng.block: start {first} does not lie in a draw of shape {full}")
        return Rng(self.seed, self.offset, full, first)

    def indexing(self, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """`(index0, strides)`: element index of coordinate c of a draw of `shape` is index0 + sum(strides * c).

        The last stride is always 1. Raises ContractError if `shape` does not fit the block, or the draw is too large.
        """
        full = tuple(shape) if self.full_shape is None else self.full_shape
        start = (0,) * len(full) if self.start is None else self.start
        if len(full) != len(shape) or any(i + n > m for i, n, m in zip(start, shape, full)):
            raise ContractError(
                f"a draw of shape {tuple(shape)} at {start} does not fit the block's draw of shape {full}"
            )
        strides = tuple(math.prod(full[d + 1 :]) for d in range(len(full)))
        # Backends compute the index of an element in 64-bit integers.
        if full and max(*full, *strides, full[0] * strides[0]) > _MAX_ELEMENTS:
            raise ContractError(f"a draw has at most 2**62 elements, not the shape {full}")
        return sum(i * s for i, s in zip(start, strides)), strides

    def state(self) -> tuple[int, int]:
        """The two integers a checkpoint stores; `Rng(*state)` restores them."""
        return self.seed, self.offset


def dropout_threshold(p: float) -> int:
    """Dropout keeps an element iff `(bits >> 8) >= dropout_threshold(p)`: one exact integer on every backend."""
    return math.ceil(p * (1 << 24))
