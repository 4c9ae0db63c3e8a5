"""What a backend's devices can do, apart from ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Capabilities:
    """Properties of a backend's devices. `hal info` prints them; the trainer, generation and the kit respect them.

    The defaults describe a device that finishes each call before it returns, repeats its results bit for bit, compiles
    nothing per shape and has neither graphs nor memory pools.

    dtypes: tensors of these can be stored, copied and converted. Which dtypes an op takes is its implementations'
        decision; a dtype such as float8_e4m3fn may be for storage only.
    max_elements: the largest number of elements of one tensor; None if memory is the only limit.
    asynchronous: a call may return before its work is done. Its result is then ordered after its inputs on the
        backend's current stream, and an error of the device may surface at a later synchronising point.
    static_shapes: every new combination of shapes is compiled, so callers should use few of them.
    host_visible: the host can read and write a tensor's memory without a copy.
    deterministic: the same calls in the same order give the same bits.
    graphs: `Backend.capture` records and repeats work.
    memory_pools: `Backend.memory_pool` separates allocations.
    attention_dropout: flash_attention takes dropout_p above 0. False where the vendor's kernel drops only by its own
        random numbers; the kit then lists such calls as declined.
    """

    dtypes: frozenset[torch.dtype] = frozenset(
        {torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
    )
    max_elements: int | None = None
    asynchronous: bool = False
    static_shapes: bool = False
    host_visible: bool = False
    deterministic: bool = True
    graphs: bool = False
    memory_pools: bool = False
    attention_dropout: bool = True
