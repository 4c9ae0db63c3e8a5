"""What the op modules share: dtype codes of the kernels, and tensors in the form a kernel reads.

A kernel reads addresses, so whatever it is given must be contiguous and stay referenced until it returns. Tensors that
are not contiguous are copied once (`.contiguous()`), except where a module says that it passes strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
REAL = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}
"""The dtype of arithmetic and statistics for each dtype of data (`real` in the kernels)."""


def reasons(*tensors: Tensor | None) -> Sequence[str]:
    """Why the kernels cannot take these tensors: they need CPU memory and one of four dtypes."""
    for t in tensors:
        if t is not None and (t.dtype not in CODE or not (t.is_cpu or t.is_meta)):
            return _reasons(tensors)
    return ()


def _reasons(tensors: Sequence[Tensor | None]) -> Sequence[str]:
    found = []
    for t in tensors:
        if t is not None and t.dtype not in CODE:
            found.append(f"dtype {t.dtype} (kernels exist for float32, bfloat16, float16, float64)")
        if t is not None and not (t.is_cpu or t.is_meta):
            found.append(f"a tensor on {t.device} (cpu_ref takes CPU tensors)")
    return list(dict.fromkeys(found))


def parameter(t: Tensor, real: torch.dtype) -> Tensor:
    """A weight or bias as kernels read it: contiguous, in the dtype of arithmetic (a copy only if it is not)."""
    return t if t.dtype is real and t.is_contiguous() else t.to(real).contiguous()


def rows_of(x: Tensor) -> int:
    """How many rows x has when its last dimension is a row."""
    width = x.shape[-1]
    return x.numel() // width if width else 0
