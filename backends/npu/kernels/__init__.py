"""HAL's own kernels for Ascend's vector cores, written in AscendC: dropout and draws with HAL's bits (philox.cpp), and
the optimizer step over all tensors (adamw.cpp).

`load` builds them and is called when the backend is built. Where that fails, `missing` says why, and the
implementations that need a kernel refuse with that reason.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Rng
from hal.backend_tools import AdamWMember, AdamWScalars, draw_rows

from . import compile_kernels

KINDS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Dtype -> its number in philox.cpp (where 0 is a draw) and in adamw.cpp (where 0 is no copy)."""
_TILE = 2048  # elements of a tile in both

_launches: dict[str, Any] = {}  # kernel -> hal_launch_<kernel>, bound to the address of aclrtlaunch_hal_<kernel>
_missing = ""  # until `load` has failed


def load(simulate: bool) -> None:
    """Builds and loads the kernels for the device or the simulator of this process; `missing` tells whether that
    worked."""
    global _missing
    if _launches:
        return
    try:
        library = ctypes.CDLL(
            str(compile_kernels.simulated() if simulate else compile_kernels.for_device(torch.npu.get_device_name(0)))
        )
        launcher = ctypes.CDLL(str(compile_kernels.launcher()))
    except (hal.HalError, OSError) as error:
        _missing = " ".join(str(error).split())
        return
    pointer, u64, u32, real = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float
    arguments = {
        "philox": [pointer, pointer, *[u64] * 10, u32, real, real],
        "adamw": [pointer, u64, pointer, *[real] * 9],
    }
    for name, types in arguments.items():
        function = getattr(launcher, f"hal_launch_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p, pointer, u32, *types], ctypes.c_int
        kernel = ctypes.cast(getattr(library, f"aclrtlaunch_hal_{name}"), pointer)
        _launches[name] = partial(_launch, function, kernel)
    _missing = ""


def _launch(function: Any, kernel: Any, tiles: int, device: torch.device, *arguments: object) -> None:
    """Queues a kernel on as many vector cores as there are tiles. Raises HalError if torch_npu cannot."""
    error = ctypes.create_string_buffer(256)
    if function(error, kernel, min(_vector_cores(device), tiles), *arguments):
        raise hal.HalError(f"torch_npu did not queue HAL's kernel: {error.value.decode(errors='replace')}")


def missing() -> str:
    """Why the kernels cannot be used; "" if they can."""
    return _missing


def philox(out: Tensor, rng: Rng, width: int, x: Tensor | None = None, p: float = 0.0) -> None:
    """Fills `out` (contiguous): the draw of its shape as float32 in [0, 1); or, with x (contiguous, of the same shape
    and dtype), dropout of x with probability p. width: see `draw_rows`.

    Raises HalError if torch_npu cannot queue the kernel.
    """
    if not out.numel():
        return
    first, sizes, strides = draw_rows(rng, out.shape, width)
    *rows, length = sizes
    steps = list(strides)
    # Rows that follow one another in the draw are one row.
    while rows and (rows[-1] == 1 or steps[-1] == length):
        length *= rows.pop()
        steps.pop()
    rows, steps = [1] * (3 - len(rows)) + rows, [0] * (3 - len(steps)) + steps
    tiles = math.prod(rows) * -(-(length + 3) // _TILE)
    kind = 0 if x is None else KINDS[x.dtype]
    drawn = (rng.seed, rng.offset, first, *steps, *rows, length)
    address = None if x is None else x.data_ptr()
    threshold, scale = float(hal.dropout_threshold(p)), 1.0 / (1.0 - p)
    _launches["philox"](tiles, out.device, address, out.data_ptr(), *drawn, kind, threshold, scale)


def adamw(members: Sequence[AdamWMember], s: AdamWScalars, clip_factor: Tensor | None) -> None:
    """A step of all members, in place, in one launch; all tensors contiguous, gradients and copies of the dtypes of
    KINDS. clip_factor is read by the kernel (see ops.adamw)."""
    listed = [(p, g.contiguous(), m, v, copy) for p, g, m, v, copy in members if p.numel()]
    if not listed:
        return
    rows = [
        (
            *(0 if t is None else t.data_ptr() for t in tensors),
            tensors[0].numel(),
            KINDS[tensors[1].dtype] + (0 if tensors[4] is None else KINDS[tensors[4].dtype] << 8),
        )
        for tensors in listed
    ]
    device = listed[0][0].device
    correction1, correction2 = s.corrections
    factors = (s.grad_scale, s.decay, s.beta1, 1.0 - s.beta1, s.beta2, 1.0 - s.beta2, s.lr / correction1)
    tiles = sum(-(-row[5] // _TILE) for row in rows)
    clip = None if clip_factor is None else clip_factor.data_ptr()
    table = _table(tuple(rows), device)
    _launches["adamw"](tiles, device, table.data_ptr(), len(rows), clip, *factors, 1.0 / correction2, s.eps)


@functools.lru_cache(maxsize=8)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The table of adamw.cpp, int64 [tensors, 7]. A training step has the same addresses as the last one, usually."""
    return hal.to_device(torch.tensor(rows, dtype=torch.int64), device)


def _vector_cores(device: torch.device) -> int:
    index = torch.npu.current_device() if device.index is None else device.index
    if index not in _cores:
        # torch_npu 2.6 cannot say. Fewer blocks than cores are slower, and as right.
        ask = getattr(torch.npu, "get_device_limit", None)
        _cores[index] = _FEWEST_CORES if ask is None else int(ask(index)["vector_core_num"])
    return _cores[index]


_FEWEST_CORES = 40
"""The vector cores of an Ascend 910B3, two for each of its 20 cube cores (device_specs.py)."""

_cores: dict[int, int] = {}
"""Device -> its number of vector cores."""


def dropped(x: Tensor, p: float, rng: Rng) -> Tensor:
    """dropout(x) with probability p > 0 by the kernel, in new memory; any shape, float32, float16 or bfloat16."""
    x = x.contiguous()
    out = torch.empty_like(x)
    philox(out, rng, draw_width(rng, x.shape), x, p)
    return out


def draw_width(rng: Rng, shape: Sequence[int]) -> int:
    """The width of rows of a draw: all elements, or the last dimension of a block."""
    return math.prod(shape) if rng.full_shape is None or not shape else shape[-1]
