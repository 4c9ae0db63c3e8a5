"""Turns the modules of a model into those of hal.nn, in place, and reports what was replaced and what was left.

A module becomes its counterpart by changing its class: parameters, buffers, hooks and names stay, so optimizers that
hold the parameters, tied weights and checkpoints are unaffected. Only a module of exactly torch's class is changed; a
subclass may define another forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import Module

import hal

from . import layers

Rule = Callable[[Module], "type[Module] | str | None"]
"""Returns the class that a module gets (a subclass of its present class), the reason why it is left unchanged, or None
if the rule does not apply to it."""

_LAYERS: dict[type[Module], type[layers._Checked]] = {
    torch.nn.Linear: layers.Linear,
    torch.nn.Embedding: layers.Embedding,
    torch.nn.LayerNorm: layers.LayerNorm,
    torch.nn.RMSNorm: layers.RMSNorm,
    torch.nn.GELU: layers.GELU,
    torch.nn.CrossEntropyLoss: layers.CrossEntropyLoss,
}


@dataclass
class Conversion:
    """The result of `convert`. replaced, left: description -> how many modules; left's descriptions contain the
    reason."""

    replaced: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"replaced {count:4} {what}" for what, count in self.replaced.items()]
        lines += [f"left     {count:4} {what}" for what, count in self.left.items()]
        return "\n".join(lines) or "nothing to replace: the model has no modules that compute anything themselves"


def _torch_layer(module: Module) -> type[Module] | str | None:
    """The rule for torch's own layers."""
    cls = _LAYERS.get(type(module))
    if cls is not None:
        reasons = cls.why_not(module)
        return "; ".join(reasons) if reasons else cls  # type: ignore[return-value]  # each is a Module
    base = next((base for base in _LAYERS if isinstance(module, base)), None)
    if base is not None:
        return f"is a subclass of torch.nn.{base.__name__} that may define another forward"
    return None


def convert(
    model: Module, *, backend: str | None = None, rules: Sequence[Rule] = (), verbose: bool = True
) -> Conversion:
    """Replaces the modules of `model` by those that run on HAL's ops. Changes the model and returns a report.

    backend: activated first (`hal.use`), else the active one; the model moves to its device. rules: applied before the
    rule for torch's layers. verbose: print the result. Modules that contain others are not listed unless a rule names
    them, nor are modules that a previous call has replaced. Functions that the model calls, such as
    `torch.nn.functional.scaled_dot_product_attention`, are not modules and stay torch's: call hal.nn's instead.
    """
    if backend is not None:
        hal.use(backend)
    model.to(hal.device())
    done = Conversion()
    for module in model.modules():
        name = type(module).__qualname__
        if isinstance(module, layers._Checked) or getattr(module, "_hal_replaced", False):
            continue
        answers = (rule(module) for rule in (*rules, _torch_layer))
        answer = next((a for a in answers if a is not None), None)
        if isinstance(answer, type):
            module.__class__ = answer
            done.replaced[f"{name} by {answer.__module__}.{answer.__qualname__}"] += 1
        elif answer is not None:
            done.left[f"{name}: {answer}"] += 1
        elif not any(True for _ in module.children()) and not isinstance(module, torch.nn.Identity):
            done.left[f"{name}: no rule for it"] += 1
    if verbose:
        print(done)
    return done
