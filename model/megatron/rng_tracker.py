"""Derives HAL's random streams from megatron-core's, so that its RNG tracker, recomputation and checkpoints apply."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch

import hal
from hal import Rng

from .device_proxy import DeviceProxy
from .guards import core


def next_stream() -> Rng:
    """A stream seeded by the state of the device's generator, which is advanced by one draw.

    Whatever sets that generator (the RNG tracker, recomputation, a loaded checkpoint) therefore determines HAL's
    dropout too.
    """
    proxy = DeviceProxy(hal.backend())
    state = proxy.generator().get_state()
    torch.rand(1, device=proxy.current())
    return Rng(int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little"))


def tracked(config: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which random numbers differ between tensor-parallel ranks. With sequence parallelism megatron-core's
    transformer block has already entered one."""
    if config.sequence_parallel:
        return contextlib.nullcontext()
    forked: contextlib.AbstractContextManager[Any] = core("tensor_parallel").get_cuda_rng_tracker().fork()
    return forked
