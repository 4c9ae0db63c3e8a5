"""Shared by the op modules: dtype codes of the kernels, and tensors in the form that kernels read.

Kernels take addresses, so tensors must be contiguous and stay referenced until the kernel returns. Tensors that are not
contiguous are copied (`.contiguous()`), except where a module says that it passes strides. Addresses are written as
`t.data_ptr() or address(t)`: hal.address explains why, and calling it only for null pointers saves 50 ns per tensor.
Most backward passes, and ops that are never as short as that matters, pass `*addresses(t, ...)`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hal import address
from hal.backend_tools import host_tensor_reasons, why_not_tensors

CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
REAL = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}
"""The dtype of arithmetic and statistics for each dtype of data (`real` in the kernels)."""


reasons = host_tensor_reasons(
    CODE, "kernels exist for float32, bfloat16, float16, float64", "cpu_ref takes CPU tensors"
)
"""Reasons why the kernels, which need CPU memory and one of four dtypes, cannot take these tensors."""

refuses = partial(why_not_tensors, reasons=reasons, by_metadata=True)
"""refuses(op, *parameters): a why_not that applies `reasons` to the op's tensors, see why_not_tensors."""


def parameter(t: Tensor, real: torch.dtype) -> Tensor:
    """A weight or bias as kernels read it: contiguous and in the dtype of arithmetic; copied only if needed."""
    return t if t.dtype is real and t.is_contiguous() else t.to(real).contiguous()


def addresses(*tensors: Tensor | None) -> list[int]:
    """The addresses of the tensors, 0 for None; to be unpacked among the arguments of a kernel."""
    return [address(t) for t in tensors]
