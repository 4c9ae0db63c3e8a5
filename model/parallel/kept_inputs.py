"""Where the inputs of recomputed layers stay until the backward pass: on the device, on the host, or divided over the
tensor-parallel ranks, which hold the same activations without sequence parallelism (DeepSpeed's options)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import hal

from ..config.schema import Config
from .tensor_sharding import Parallel

Packed = tuple[Tensor, torch.Size, torch.device, bool]
"""What is kept of a tensor, its shape and device, and whether the other ranks have the rest."""


def kept_inputs(config: Config, parallel: Parallel) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which autograd keeps tensors as --checkpoint-in-cpu and --partition-activations say.

    All tensor-parallel ranks must read divided tensors in the same order, as they do in the backward pass.
    """
    tp, on_host = parallel.tp, config.checkpoint_in_cpu
    divides = config.partition_activations and tp.size > 1 and not parallel.sequence
    if not (divides or on_host):
        return nullcontext

    def pack(x: Tensor) -> Packed:
        shape, device, divided = x.shape, x.device, divides and x.numel() % tp.size == 0
        if divided:  # a copy, since a view would keep the whole tensor in memory
            x = x.flatten().chunk(tp.size)[tp.rank].clone()
        return x.cpu() if on_host else x, shape, device, divided

    def unpack(packed: Packed) -> Tensor:
        x, shape, device, divided = packed
        x = hal.to_device(x, device)
        return tp.all_gather(x).view(shape) if divided else x

    return lambda: saved_tensors_hooks(pack, unpack)
