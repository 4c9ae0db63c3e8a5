"""What the op modules share: names of element types in the kernels, refusals, and launch shapes.

A kernel reads addresses: whatever it is given must be contiguous (or come with strides) and stay referenced until the
launch has been queued; torch's allocator keeps memory that the current stream still uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import address

from . import launch

TYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
LANES = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}
"""Elements in 16 bytes."""


def reasons(*tensors: Tensor | None) -> Sequence[str]:
    """Why the kernels cannot take these tensors."""
    where = launch.device_type()
    for t in tensors:
        if t is None or (t.is_meta and t.dtype in TYPE):
            continue
        if t.dtype not in TYPE or t.device.type != where or launch.elsewhere(t.device):
            return _reasons(tensors, where)
    return ()


def _reasons(tensors: Sequence[Tensor | None], where: str) -> Sequence[str]:
    found = []
    for t in tensors:
        if t is not None and t.dtype not in TYPE:
            found.append(f"dtype {t.dtype} (the CUDA kernels take float32, bfloat16 and float16)")
        if t is not None and t.device.type != where and not t.is_meta:
            found.append(f"a tensor on {t.device} (this backend's tensors are on {where})")
        elif t is not None and not t.is_meta and launch.elsewhere(t.device):
            found.append(launch.elsewhere(t.device))
    return list(dict.fromkeys(found))


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all of them start on a 16-byte boundary. Raises what hal.address does."""
    places = [address(t) for t in tensors]
    return all(at % 16 == 0 for at in places)


def rows_of(x: Tensor) -> int:
    """How many rows x has when its last dimension is a row."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def threads_for(items: int) -> int:
    """Threads of a block that shares out `items`: whole warps, at most the kernels' limit."""
    return max(32, min(launch.MAX_THREADS, -(-items // 32) * 32))


def threads_of_row(width: int, lanes: int) -> int:
    """Threads of a block that reduces a row and goes over it again, `lanes` columns at a time.

    Four of those to a thread: a block's reduction takes as many instructions for every warp as a few columns do.
    """
    return threads_for(-(-width // (4 * lanes)))


def grid_for(rows: int, width: int, lanes: int) -> tuple[tuple[int, int], int]:
    """(grid, threads) for kernels that share out columns along x and rows along y, `lanes` columns to a thread.

    About 8 blocks per multiprocessor: enough to hide latency, few enough for rows to share what is loaded per column.
    """
    packs = -(-width // lanes)
    threads = threads_for(packs)
    blocks = launch.multiprocessors() * 8
    across = max(1, min(-(-packs // threads), 1 << 20 if rows == 1 else blocks))
    if rows == 1:
        across = min(across, blocks * 4)
    return (across, max(1, min(rows, -(-blocks // across), 65535))), threads


def column_sum(partial: Tensor, pieces: int, out: Tensor) -> None:
    """out = partial [pieces, out.numel()] float32 summed over pieces, in out's dtype."""
    width = out.numel()
    launch.run(
        f"column_sum<{TYPE[out.dtype]}>", (-(-width // 32), 1), 256, partial.data_ptr(), out.data_ptr(), pieces, width
    )
