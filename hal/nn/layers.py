"""torch's layers with the forward of HAL's ops. Parameters, initialisation and state-dict keys are torch's.

`why_not(module)` of each class returns the reasons for which a torch module of its base class cannot become one:
options of torch that the op does not have. Their constructors raise ContractError with the same reasons.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ContractError, ops

from .functional import full_precision, low_precision


class _Checked:
    """Refuses, when constructed, what `why_not` names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = self.why_not(self)
        if reasons:
            raise ContractError(
                f"hal.nn.{type(self).__name__}: {'; '.join(reasons)}. Use torch.nn.{type(self).__name__} for this layer"
            )

    @staticmethod
    def why_not(module: Any) -> list[str]:
        """The reasons for which `module`, one of torch's, cannot run on HAL's op; empty if it can."""
        return []


class Linear(_Checked, torch.nn.Linear):
    """`torch.nn.Linear` on `ops.linear`: input [..., in_features] -> [..., out_features]."""

    def forward(self, input: Tensor) -> Tensor:
        x, weight, bias = low_precision(input, self.weight, self.bias)
        assert x is not None and weight is not None
        return ops.linear(x, weight, bias)


class Embedding(_Checked, torch.nn.Embedding):
    """`torch.nn.Embedding` on `ops.embedding`: ids [...] -> [..., embedding_dim]. Ids are converted to int64."""

    @staticmethod
    def why_not(module: Any) -> list[str]:
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        return [f"{name}={value} has no counterpart" for name in options if (value := getattr(module, name))]

    def forward(self, input: Tensor) -> Tensor:
        rows = ops.embedding(self.weight, input.long())
        if self.padding_idx is None:
            return rows
        # The row of padding_idx gets no gradient.
        return torch.where((input == self.padding_idx)[..., None], rows.detach(), rows)


class LayerNorm(_Checked, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension on `ops.layer_norm`: [..., h] -> [..., h].

    offset: gamma is weight + offset, in float32; 1 where the weights are stored around 0 (Gemma, Megatron's layernorm
    1p).
    """

    offset = 0.0

    @staticmethod
    def why_not(module: Any) -> list[str]:
        shape = module.normalized_shape
        reasons = [] if len(shape) == 1 else [f"it normalises over {len(shape)} dimensions, the op over the last"]
        return reasons if module.weight is not None else [*reasons, "elementwise_affine=False leaves no weight"]

    def _affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """gamma and beta [h] for an input like x."""
        weight = self.weight.float() + self.offset if self.offset else self.weight.to(x.dtype)
        return weight, torch.zeros_like(weight) if self.bias is None else self.bias.to(x.dtype)

    def forward(self, input: Tensor) -> Tensor:
        x = full_precision(input)
        return ops.layer_norm(x, *self._affine(x), self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual), all [..., h], in one op."""
        x, residual = full_precision(x), full_precision(residual)
        return ops.add_layer_norm(x, residual, *self._affine(x), self.eps)


class RMSNorm(_Checked, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension on `ops.rms_norm`: [..., h] -> [..., h]. offset: as of LayerNorm."""

    offset = 0.0

    @staticmethod
    def why_not(module: Any) -> list[str]:
        return LayerNorm.why_not(module)

    def _gamma_eps(self, x: Tensor) -> tuple[Tensor, float]:
        """gamma [h] and eps for an input like x."""
        # The sum of 1 and a small bfloat16 has too few bits for the latter.
        gamma = self.weight.float() + self.offset if self.offset else self.weight.to(x.dtype)
        # torch's default is the machine epsilon of the dtype in which it computes, float32 for the low precisions.
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return gamma, eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, *self._gamma_eps(x))

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual), all [..., h], in one op."""
        return ops.add_rms_norm(x, residual, *self._gamma_eps(x))


class GELU(_Checked, torch.nn.GELU):
    """`torch.nn.GELU` on `ops.bias_gelu`, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.bias_gelu(input, None, self.approximate)


class CrossEntropyLoss(_Checked, torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` of class ids on `ops.cross_entropy`.

    input [n, c], [n, c, d1, ...] or [c]; target: class ids, input's shape without c. The loss is in input's dtype;
    its sums are in float32. ignore_index, label_smoothing and reduction are torch's.
    """

    @staticmethod
    def why_not(module: Any) -> list[str]:
        return [] if module.weight is None else ["weights per class have no counterpart"]

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            raise ContractError(
                "hal.nn.CrossEntropyLoss: target must be class ids; found probabilities. Use torch.nn.CrossEntropyLoss"
            )
        logits = full_precision(input.movedim(1, -1) if input.ndim > 2 else input)
        kept = target != self.ignore_index
        # Megatron's smoothing e' spreads over the other classes, torch's e over all: e' = e (c - 1) / c.
        classes = logits.shape[-1]
        smoothing = self.label_smoothing * (classes - 1) / classes
        losses = ops.cross_entropy(
            logits.contiguous(), torch.where(kept, target, 0), label_smoothing=smoothing if classes > 1 else 0.0
        )
        losses = torch.where(kept, losses, torch.zeros_like(losses))
        if self.reduction == "mean":
            losses = losses.sum() / kept.sum()
        elif self.reduction == "sum":
            losses = losses.sum()
        return losses.to(logits.dtype)


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding on `ops.rotary`; torch has no layer of this name, torchtune and transformers do.

    dim: rotated channels of each head (even). base: of the angles base^(-2p/dim). interleaved: pairs 2p with 2p+1
    (GPT-J), else p with p + dim/2 (Llama). It has no parameters and an empty state dict.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, base: float = 10000.0, *, interleaved: bool = False) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ContractError(f"hal.nn.RotaryEmbedding: dim must be even and positive; found {dim}")
        self.dim, self.base, self.interleaved = dim, base, interleaved
        frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        self.register_buffer("inv_freq", frequencies.float(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, *, layout: str = "BNSD") -> Tensor:
        """x [b,n,s,d] (in `layout`: BNSD, BSND, SBND or TND) rotated according to position_ids [s] or [b,s], default 0,
        1, ..."""
        length = x.shape[layout.index("T" if layout == "TND" else "S")]
        positions = torch.arange(length, device=x.device) if position_ids is None else position_ids
        angles = positions[..., None].float() * self.inv_freq
        return ops.rotary(x, angles.cos(), angles.sin(), layout=layout, interleaved=self.interleaved)
