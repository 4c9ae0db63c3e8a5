"""Requirements on tensors, and functions that more than one implementation uses."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hal.backend_tools import why_not_tensors

REAL = (torch.float32, torch.float16, torch.bfloat16)


def reasons(*tensors: Tensor | None) -> list[str]:
    """Reasons why Ascend's operators refuse these tensors; empty if they accept them."""
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t is not None and t.dtype not in REAL})
    return (
        [f"dtype {', '.join(dtypes)} (Ascend's operators compute in float32, float16 and bfloat16)"] if dtypes else []
    )


refuses = partial(why_not_tensors, reasons=reasons)
"""refuses(op, *parameters): a why_not that applies `reasons` to the op's tensors, see why_not_tensors."""


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., h] + bias [h] in float32, so that operators round only their result; x itself without a bias."""
    return x if bias is None else x.float() + bias.float()


def bias_gradient(dx: Tensor, bias: Tensor | None) -> Tensor | None:
    """The gradient of a bias of shape [h] from that of x [..., h], summed in float32."""
    return None if bias is None else dx.float().reshape(-1, bias.shape[0]).sum(0).to(bias.dtype)
