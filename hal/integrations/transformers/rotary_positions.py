"""The rule of hal.nn.convert for rotary embedding, which is a function in each model file of transformers."""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor
from torch.nn import Module

from hal import ops

from .recognition import agrees, draw, replaced


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
    angles = draw(1, 3, 4).repeat(1, 1, 2)
    arguments = (draw(1, 2, 3, 8), draw(1, 1, 3, 8), angles.cos(), angles.sin())
    try:
        expected = theirs(*arguments)
    except (TypeError, RuntimeError) as error:
        return f"its rotary embedding is called in another way ({error})"
    if not all(agrees(a, b) for a, b in zip(_rotary(*arguments), expected)):
        return "its rotary embedding does not pair channel i with i + r/2"
    # The same code with one global name replaced, so that only this model's layers change and not the module.
    names = {**forward.__globals__, "apply_rotary_pos_emb": _rotary}
    changed = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return replaced(type(module), "rotary", changed)
