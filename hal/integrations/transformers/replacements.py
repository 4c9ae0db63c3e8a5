"""Rules of hal.nn.convert for the classes of transformers: norms, activations, gated MLPs and rotary embedding.

transformers has hundreds of model files with a class each. A class is recognised by what it computes, not by its name:
it is run once beside the op that it might be, on random numbers, and replaced only where the results agree.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

import hal
from hal import ops
from hal.nn.functional import low_precision

_GELUS = ("none", "tanh", "fast")


def _replaced(cls: type[Module], form: str, forward: Callable[..., Any]) -> type[Module]:
    """A subclass of `cls` with another forward. It keeps the name, by which transformers recognises its classes."""
    named = {
        "forward": forward,
        "_hal_replaced": True,
        "__module__": __name__,
        "__qualname__": f"{cls.__name__}:{form}",
    }
    return type(cls.__name__, (cls,), named)


def _agrees(result: Tensor, expected: Any, tolerance: float = 1e-4) -> bool:
    """Whether two results are equal up to rounding, relative to the largest number."""
    if not isinstance(expected, Tensor) or result.shape != expected.shape:
        return False
    return bool((result - expected).abs().max() <= tolerance * expected.abs().max())


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same normal numbers at each call, on the active device. Leaves torch's generators as they are."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator).to(hal.device(), dtype)


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
    x = _draw(3, weight.shape[-1])
    with torch.no_grad():
        kept = weight.data
        weight.data = 1.0 + 0.3 * _draw(*kept.shape)  # distinguishes the two forms, whatever the weights are
        try:
            expected = module(x)
            for form, forward in (("rms_norm", _rms), ("rms_norm of 1 + weight", _rms_plus_one)):
                if _agrees(forward(module, x), expected):
                    return _replaced(type(module), form, forward)
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
        return next((a for a in _GELUS if _agrees(ops.bias_gelu(x, None, a), expected, 2e-6)), None)


def activation(module: Module) -> type[Module] | str | None:
    """gelu in any of its three forms."""
    if "GELU" not in type(module).__name__ or isinstance(module, torch.nn.GELU):
        return None
    form = _gelu_of(module)
    if form is None:
        return "is none of the three forms of ops.bias_gelu"
    return _replaced(type(module), f"bias_gelu({form})", lambda self, x: ops.bias_gelu(x, None, form))


def conv1d(module: Module) -> type[Module] | str | None:
    """GPT-2's linear layer, whose weight is [in, out]."""
    if type(module) is not Conv1D:
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        x, weight, bias = low_precision(x, self.weight, self.bias)  # type: ignore[assignment]
        return ops.linear(x, weight.t(), bias)  # type: ignore[union-attr]

    return _replaced(Conv1D, "linear", forward)


def gated_mlp(module: Module) -> type[Module] | str | None:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)) with silu or gelu."""
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    act = getattr(module, "act_fn", None)
    if not all(isinstance(part, torch.nn.Linear) for part in parts) or not isinstance(act, Module):
        return None
    x = torch.linspace(-6.0, 6.0, 97, device=hal.device())
    if _agrees(torch.nn.functional.silu(x), act(x), 1e-6):
        gate: Callable[[Tensor], Tensor] = ops.swiglu
        form = "swiglu"
    elif (gelu := _gelu_of(act)) is not None:
        gate, form = (lambda both: ops.geglu(both, None, gelu)), f"geglu({gelu})"
    else:
        return f"its activation {type(act).__name__} has no gated op"

    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(gate(torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)))
        return result

    probe = _draw(3, parts[0].in_features, dtype=parts[0].weight.dtype)
    with torch.no_grad():
        if not _agrees(forward(module, probe), module(probe), 3e-2 if probe.dtype.itemsize == 2 else 1e-4):
            return "does not compute down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    return _replaced(type(module), form, forward)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb: q, k [b,n,s,d] (unsqueeze_dim 1) or [b,s,n,d] (2); cos, sin [b or 1, s, r]."""
    layout, half = {1: "BNSD", 2: "BSND"}[unsqueeze_dim], cos.shape[-1] // 2
    c, s = (t[..., :half].float().contiguous() for t in (cos, sin))
    if c.shape[0] == 1:
        c, s = c[0], s[0]
    return ops.rotary(q, c, s, layout=layout), ops.rotary(k, c, s, layout=layout)


def rotary(module: Module) -> type[Module] | str | None:
    """An attention whose forward calls its file's apply_rotary_pos_emb; ops.rotary replaces this function."""
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or "apply_rotary_pos_emb" not in code.co_names:
        return None
    theirs = forward.__globals__["apply_rotary_pos_emb"]
    angles = _draw(1, 3, 4).repeat(1, 1, 2)
    arguments = (_draw(1, 2, 3, 8), _draw(1, 1, 3, 8), angles.cos(), angles.sin())
    try:
        expected = theirs(*arguments)
    except (TypeError, RuntimeError) as error:
        return f"its rotary embedding is called in another way ({error})"
    if not all(_agrees(a, b) for a, b in zip(_rotary(*arguments), expected)):
        return "its rotary embedding does not pair channel i with i + r/2"
    # The same code with one global name replaced, so that only this model's layers change and not the module.
    names = {**forward.__globals__, "apply_rotary_pos_emb": _rotary}
    changed = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return _replaced(type(module), "rotary", changed)


RULES = (norm, activation, conv1d, gated_mlp, rotary)
"""For `hal.nn.convert(rules=...)`."""
