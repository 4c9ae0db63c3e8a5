"""Rules of hal.nn.convert for the classes of transformers: norms, activations, gated MLPs and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

import hal
from hal import ops
from hal.nn import Linear
from hal.nn.functional import low_precision

from .recognition import agrees, draw, replaced
from .rotary_positions import rotary

_GELUS = ("none", "tanh", "fast")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _rms(self: Any, x: Tensor) -> Tensor:
    """x [..., h] -> [..., h]."""
    return ops.rms_norm(x, self.weight, self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps)


def _rms_plus_one(self: Any, x: Tensor) -> Tensor:
    """x [..., h] -> [..., h], with weight + 1 as the weight."""
    weight = 1.0 + self.weight.float()
    return ops.rms_norm(x, weight, self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps)


def norm(module: Module) -> type[Module] | str | None:
    """RMSNorm of Llama's kind, weight * x, or of Gemma's, (1 + weight) * x."""
    if "RMSNorm" not in type(module).__name__ or isinstance(module, torch.nn.RMSNorm):
        return None
    if [name for name, _ in module.named_parameters()] != ["weight"]:
        return "has other parameters than weight"
    weight: Any = module.weight
    x = draw(3, weight.shape[-1])
    with torch.no_grad():
        kept = weight.data
        weight.data = 1.0 + 0.3 * draw(*kept.shape)  # distinguishes the two forms, whatever the weights are
        try:
            expected = module(x)
            for form, forward in (("rms_norm", _rms), ("rms_norm of 1 + weight", _rms_plus_one)):
                if agrees(forward(module, x), expected):
                    return replaced(type(module), form, forward)
        except (TypeError, AttributeError) as error:
            return f"is called in another way ({error})"
        finally:
            weight.data = kept
    return "does not compute ops.rms_norm"


def _gelu_of(module: Module) -> str | None:
    """The form of gelu that an activation computes, or None."""
    x = torch.linspace(-6.0, 6.0, 97, device=hal.device())
    with torch.no_grad():
        expected = module(x)
        return next((a for a in _GELUS if agrees(ops.bias_gelu(x, None, a), expected, 2e-6)), None)


def activation(module: Module) -> type[Module] | str | None:
    """gelu in any of its three forms."""
    if "GELU" not in type(module).__name__ or isinstance(module, torch.nn.GELU):
        return None
    form = _gelu_of(module)
    if form is None:
        return "is none of the three forms of ops.bias_gelu"
    return replaced(type(module), f"bias_gelu({form})", lambda self, x: ops.bias_gelu(x, None, form))


def conv1d(module: Module) -> type[Module] | str | None:
    """GPT-2's linear layer, whose weight is [in, out]."""
    if type(module) is not Conv1D:
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        x, weight, bias = low_precision(x, self.weight, self.bias)  # type: ignore[assignment]
        return ops.linear(x, weight.t(), bias)  # type: ignore[union-attr]

    return replaced(Conv1D, "linear", forward)


def _both(gate: Any, up: Any, x: Tensor) -> Tensor:
    """x [..., h] -> [gate(x) | up(x)] [..., 2 f].

    For more than h rows by one product with both weights, because copying these moves less memory than copying the
    results. Hooks and wrappers (LoRA, parameters gathered for each call) need the calls of both projections.
    """
    plain = all(type(part) is Linear and not any(getattr(part, hooks) for hooks in _HOOKS) for part in (gate, up))
    if not plain or x.numel() <= x.shape[-1] ** 2 or (gate.bias is None) != (up.bias is None):
        return torch.cat([gate(x), up(x)], dim=-1)
    weight = torch.cat([gate.weight, up.weight])
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
    x, weight, bias = low_precision(x, weight, bias)  # type: ignore[assignment]
    return ops.linear(x, weight, bias)


def gated_mlp(module: Module) -> type[Module] | str | None:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)) with silu or gelu."""
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    act = getattr(module, "act_fn", None)
    if not all(isinstance(part, torch.nn.Linear) for part in parts) or not isinstance(act, Module):
        return None
    x = torch.linspace(-6.0, 6.0, 97, device=hal.device())
    if agrees(torch.nn.functional.silu(x), act(x), 1e-6):
        gate: Callable[[Tensor], Tensor] = ops.swiglu
        form = "swiglu"
    elif (gelu := _gelu_of(act)) is not None:
        gate, form = (lambda both: ops.geglu(both, None, gelu)), f"geglu({gelu})"
    else:
        return f"its activation {type(act).__name__} has no gated op"

    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(gate(_both(self.gate_proj, self.up_proj, x)))
        return result

    probe = draw(3, parts[0].in_features, dtype=parts[0].weight.dtype)
    with torch.no_grad():
        if not agrees(forward(module, probe), module(probe), 3e-2 if probe.dtype.itemsize == 2 else 1e-4):
            return "does not compute down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    return replaced(type(module), form, forward)


RULES = (norm, activation, conv1d, gated_mlp, rotary)
"""For `hal.nn.convert(rules=...)`."""
