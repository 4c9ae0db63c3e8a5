"""Shared by the op modules: names of element types in the kernels, refusals, and launch shapes.

Kernels take addresses, so tensors must be contiguous (or be passed with strides) and stay referenced until the launch
is queued; after that, torch's allocator keeps memory that the current stream still uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hal import address
from hal.backend_tools import why_not_tensors

from . import launch

TYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
LANES = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}
"""Elements in 16 bytes."""


def reasons(*tensors: Tensor | None) -> Sequence[str]:
    """Reasons why the kernels cannot take these tensors."""
    where, first = launch.device_type(), None
    for t in tensors:
        if t is None or (t.is_meta and t.dtype in TYPE):
            continue
        device = t.device
        first = device if first is None else first
        if t.dtype not in TYPE or device.type != where or device != first:
            return _reasons(tensors, where)
    return ()


def _reasons(tensors: Sequence[Tensor | None], where: str) -> Sequence[str]:
    texts = []
    for t in tensors:
        if t is not None and t.dtype not in TYPE:
            texts.append(f"dtype {t.dtype} (the CUDA kernels take float32, bfloat16 and float16)")
        if t is not None and t.device.type != where and not t.is_meta:
            texts.append(f"a tensor on {t.device} (this backend's tensors are on {where})")
    texts += different_devices(tensors)
    return list(dict.fromkeys(texts))


def different_devices(tensors: Sequence[Tensor | None]) -> list[str]:
    """The reason why one kernel cannot take these tensors together; none if they are on one device."""
    devices = sorted({str(t.device) for t in tensors if t is not None and not t.is_meta})
    return [f"tensors on {' and '.join(devices)} (a kernel runs on one device)"] if len(devices) > 1 else []


refuses = partial(why_not_tensors, reasons=reasons)
"""refuses(op, *parameters): a why_not that applies `reasons` to the op's tensors, see why_not_tensors."""


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all of them start on a 16-byte boundary. Raises ContractError like hal.address."""
    addresses = [address(t) for t in tensors]
    return all(at % 16 == 0 for at in addresses)


def dense(t: Tensor) -> Tensor:
    """t, contiguous and on a 16-byte boundary."""
    t = t.contiguous()
    return t if aligned(t) else t.clone()


def threads_for(items: int) -> int:
    """Threads of a block that divides `items` among them: a multiple of the warp size, at most MAX_THREADS."""
    return max(32, min(launch.MAX_THREADS, -(-items // 32) * 32))


def threads_of_row(width: int, lanes: int) -> int:
    """Threads of a block that reduces a row and then iterates over it again, `lanes` columns at a time.

    Each thread gets four such steps, because the block's reduction costs every warp as much as a few columns.
    """
    return threads_for(-(-width // (4 * lanes)))


def grid_for(rows: int, width: int, lanes: int, per_multiprocessor: int = 16) -> tuple[tuple[int, int], int]:
    """(grid, threads) for kernels that divide columns along x and rows along y, with `lanes` columns per thread.

    More blocks per multiprocessor than are resident balance the load, and each thread still reuses its per-column data
    for many rows: on an H100, 16 are 2 to 8 % faster than 8. Where every block of rows adds partial sums, fewer are.
    """
    packs = -(-width // lanes)
    threads = threads_for(packs)
    blocks = launch.multiprocessors() * per_multiprocessor
    across = launch.blocks(-(-packs // threads), blocks)
    return (across, launch.blocks(rows, -(-blocks // across), 65535)), threads


def column_sum(partial: Tensor, pieces: int, out: Tensor) -> None:
    """out [width] = the sum over pieces of partial [pieces, width] (float32), in out's dtype."""
    width = out.numel()
    launch.run(f"column_sum<{TYPE[out.dtype]}>", (launch.blocks(-(-width // 32)), 1), 256, partial, out, pieces, width)
