"""HAL's random streams out of megatron-core's: dropout that follows its RNG tracker, recomputation and checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch

import hal
from hal import Rng

from .guards import core
from .place import Place


def next_stream() -> Rng:
    """A stream named by the state of the device's generator, which moves on by one draw.

    So whatever sets that generator (the RNG tracker, recomputation, a loaded checkpoint) decides HAL's dropout, too.
    """
    place = Place(hal.backend())
    state = place.generator().get_state()
    torch.rand(1, device=place.current())
    return Rng(int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little"))


def tracked(config: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, draws differ between tensor-parallel ranks; with sequence parallelism the block has seen to it."""
    if config.sequence_parallel:
        return contextlib.nullcontext()
    forked: contextlib.AbstractContextManager[Any] = core("tensor_parallel").get_cuda_rng_tracker().fork()
    return forked
