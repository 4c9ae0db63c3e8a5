"""Activation recomputation: a function's intermediate values are dropped and computed again in the backward pass.

Dropout masks are a function of an Rng value, so no generator state has to be saved, and the result is bit-equal to the
one without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Kept = Callable[[], AbstractContextManager[object]]


def recompute(function: Callable[..., Any], *args: Any, on: bool = True, kept: Kept = nullcontext) -> Any:
    """function(*args), recomputed in the backward pass if `on` (and if there will be one); `kept` keeps tensors among
    the arguments until then."""
    if not on or not torch.is_grad_enabled():
        return function(*args)
    with kept():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
