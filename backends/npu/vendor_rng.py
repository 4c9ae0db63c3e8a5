"""The vendor's random numbers for dropout, an opt-in (`hal.use("npu", rng="vendor")`, `hal train --rng vendor`).

The library draws a mask from a seed and an offset, and its fused attention draws it again in the backward pass. Both
are derived from HAL's Rng, so that a run repeats, resumes and recomputes its own numbers. They are not those of other
backends, and a shard draws from a stream of its own, so they depend on the layout.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hal import Rng

SUFFIX = "vendor_rng"
"""How the ids of implementations end that draw the vendor's numbers."""
_POSITIVE = (1 << 63) - 1  # the library's seed and offset are int64


def seed_and_offset(rng: Rng) -> tuple[int, int]:
    """The library's seed and offset for a draw; blocks of one draw with different starts have different ones."""
    own = Rng(rng.seed, rng.offset)
    if rng.start is not None and any(rng.start):
        own = own.fork("block", *rng.start)
    return own.seed & _POSITIVE, own.offset & _POSITIVE


def mask(like: Tensor, count: int, p: float, seed: int, offset: int) -> Tensor:
    """Keep bits of `count` elements, uint8, the first in the lowest bit, padded to 128 bits; `like` gives the device.

    npu_fusion_attention_grad draws with the probability 1 - keep_prob in float32 (op-plugin,
    FlashAttentionKernelNpuOpApi.cpp: dropout_gen_mask_impl), and so does this: 1 - 0.9 in float64 is another threshold.
    """
    dropped = ctypes.c_float(1.0 - ctypes.c_float(1.0 - p).value).value
    # On the current stream (parallel=False), so that no other has to be waited for.
    bits: Tensor = torch.ops.npu._npu_dropout_gen_mask(like, [count], dropped, seed, offset, parallel=False)
    return bits


def dropped(x: Tensor, p: float, rng: Rng) -> Tensor:
    """dropout(x) with probability p > 0, in new memory; the same elements for equal p and rng."""
    if not x.numel():
        return x.clone()
    x = x.contiguous()
    # torch_npu has no forward function that takes a mask, and this one applies it to any tensor (aclnnDropoutDoMask).
    y: Tensor = torch.ops.npu.npu_dropout_backward(x, mask(x, x.numel(), p, *seed_and_offset(rng)), p)
    return y
