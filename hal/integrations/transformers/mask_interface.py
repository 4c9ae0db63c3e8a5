"""transformers' mask interface: masks that ops.flash_attention needs, without s x s tensors where it can compute them.

transformers describes a mask by a function of (batch, head, query, key), composed of named parts. The parts that
causality and the layer's window express need no tensor; padding needs one value per key, packing one per sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

_WINDOWS = {"causal_mask_function", "sliding_window_overlay"}
_PACKED = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask interface: what `attention` needs beyond causality and the window of the layer, in little memory.

    None: nothing. bool [b,1,1,kv]: padding, True = a token. int32 [1,1,1,n+1]: where packed sequences begin in the
    flattened batch, and its end. Other patterns (chunks, images, static caches) are bool [b,1,q,kv], True = visible.
    """
    parts = _parts(mask_function)
    names = {part.__qualname__.split(".")[0] for part in parts}
    tokens = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    traced = tokens is not None and is_tracing(tokens)
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    causal = allow_is_causal_skip and aligned and names <= _WINDOWS
    both = allow_is_bidirectional_skip and names == {"bidirectional_mask_function"}
    if causal or both:
        here = None if tokens is None else tokens[:, kv_offset : kv_offset + kv_length]
        if here is None or (not traced and bool(here.all())):
            return None
        if q_length > 1 or both:
            return here[:, None, None, :]
    if names == _PACKED and not traced and aligned:
        ids, inner = (_captured(part) for part in parts)
        sequence: Tensor = ids["packed_sequence_mask"]
        plain = {part.__qualname__.split(".")[0] for part in _parts(inner["mask_function"])}
        if plain <= _WINDOWS and q_length == kv_length:
            first = torch.ones_like(sequence[:, :1], dtype=torch.bool)
            starts = torch.cat([first, sequence.diff(dim=1) != 0], dim=1).flatten().nonzero().flatten()
            return torch.nn.functional.pad(starts, (0, 1), value=sequence.numel()).int()[None, None, None]
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a closure has captured, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells))) if code else {}


def _parts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions whose conjunction a mask function is."""
    if getattr(function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        return [part for f in _captured(function)["mask_functions"] for part in _parts(f)]
    return [function]
