"""What the op modules share: why a tensor is refused, and the shapes of launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .engine import SPAN, TYPE, engine
from .memory import Call, Out


def reasons(*tensors: Tensor | None) -> Sequence[str]:
    """Why the kernels cannot take these tensors: they compute in float and reach host memory only."""
    found = []
    for t in tensors:
        if t is not None and t.dtype not in TYPE:
            found.append(f"dtype {t.dtype} (the kernels have float32, bfloat16 and float16, and compute in float32)")
        if t is not None and not (t.is_cpu or t.is_meta):
            found.append(f"a tensor on {t.device} (opencl takes CPU tensors)")
    return list(dict.fromkeys(found))


def rows_of(x: Tensor) -> int:
    """How many rows x has when its last dimension is a row."""
    return math.prod(x.shape[:-1])


def blocks(width: int) -> int:
    """Groups that cover `width` columns when every work-item takes the engine's lanes."""
    e = engine()
    return -(-width // (e.lanes * e.group))


def pieces(rows: int) -> int:
    """Into how many pieces kernels that sum over rows cut them: from the shape alone, so that sums repeat."""
    return max(1, min(32, rows // 16))


def spans(rows: int, width: int) -> tuple[int, int]:
    """Their grid."""
    return -(-width // SPAN), pieces(rows)


def column_sum(call: Call, partial: object, count: int, out: Tensor) -> None:
    """out[width] = the sum of `count` rows of partial, in out's dtype."""
    call.run("reduce", "column_sum", {"T": out.dtype}, (blocks(out.numel()),), partial, Out(out), count, out.numel())
