"""Shared by the op modules: refusals of tensors, and shapes of launches."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from hal.backend_tools import host_tensor_reasons, why_not_tensors

from .engine import SPAN, TYPE, engine
from .memory import KernelCall, Out

reasons = host_tensor_reasons(
    TYPE, "the kernels have float32, bfloat16 and float16, and compute in float32", "opencl takes CPU tensors"
)
"""Reasons why the kernels, which compute in float and access only host memory, cannot take these tensors."""

refuses = partial(why_not_tensors, reasons=reasons)
"""refuses(op, *parameters): a why_not that applies `reasons` to the op's tensors, see why_not_tensors."""


def rows_of(x: Tensor) -> int:
    """The number of rows of x, including rows without elements, which occur in products."""
    return math.prod(x.shape[:-1])


def blocks(width: int) -> int:
    """Work-groups that cover `width` columns if every work-item handles one vector."""
    e = engine()
    return -(-width // (e.lanes * e.group))


def pieces(rows: int) -> int:
    """The number of pieces of rows that kernels sum separately; it depends only on the shape, so sums are
    reproducible."""
    return max(1, min(32, rows // 16))


def spans(rows: int, width: int) -> tuple[int, int]:
    """The grid of a kernel that sums over rows."""
    return -(-width // SPAN), pieces(rows)


def column_sum(call: KernelCall, partial: object, count: int, out: Tensor) -> None:
    """out [width] = the sum over the rows of partial [count, width], in out's dtype."""
    call.run("reduce", "column_sum", {"T": out.dtype}, (blocks(out.numel()),), partial, Out(out), count, out.numel())
