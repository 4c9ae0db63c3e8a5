"""linear through torch, which calls cuBLAS: sums in float32 whatever the dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ops

from .device import Cuda
from .tensors import reasons


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, weight, bias)


@Cuda.impl(ops.linear, id="cuda/torch", why_not=_why_not)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)
