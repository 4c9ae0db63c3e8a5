"""What every implementation asks of its tensors, and what several of them do."""

from __future__ import annotations

import torch
from torch import Tensor

REAL = (torch.float32, torch.float16, torch.bfloat16)


def reasons(*tensors: Tensor | None) -> list[str]:
    """Why Ascend's operators refuse these tensors; empty = they take them."""
    found = sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t is not None and t.dtype not in REAL})
    return [f"dtype {', '.join(found)} (Ascend's operators compute in float32, float16 and bfloat16)"] if found else []


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias in float32 (x itself without a bias): a sum rounded to 16 bits would lose what the operator keeps."""
    return x if bias is None else x.float() + bias.float()


def bias_gradient(dx: Tensor, bias: Tensor | None) -> Tensor | None:
    """The gradient of a bias of shape [h] from that of x [..., h], summed in float32."""
    return None if bias is None else dx.float().reshape(-1, bias.shape[0]).sum(0).to(bias.dtype)
