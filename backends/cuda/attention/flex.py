"""cuda/flex: torch's flex_attention, compiled by Triton: any mask and any window without a bias in memory.

The block mask of a window depends on sizes only and is cached; of those of mask tensors the last one is.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.backend_tools import AttentionSpec

from .. import launch
from . import stand_ins
from .common import Given, Request, fused, register
from .masks import dense_mask, outside_window

ID = "cuda/flex"
BLOCK = 128
"""Queries and keys per block of a block mask."""
SHAPES = 1024
"""Limit of compilations per process, one for each combination of shape, dtype, window and need for gradients."""


@cache
def _cannot_compile() -> str:
    """The reason why Triton cannot compile here ("" if it can)."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (flex_attention is compiled with it): pip install triton"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "no C compiler (Triton builds what launches its kernels with one): install gcc"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"no {header} (Triton builds what launches its kernels with it): install python3-dev"
    return ""


def _refuse(request: Request) -> list[str]:
    spec = request.spec
    refusals = fused(spec, "flex")
    if not launch.simulated() and _cannot_compile():
        refusals.append(_cannot_compile())
    if spec.packed:
        refusals.append("packed sequences (flex is used for dense batches here; flash takes packed ones)")
    if spec.d < 16 or spec.d > 256:
        refusals.append(f"head size {spec.d} (flex takes 16 to 256)")
    if min(spec.sq, spec.skv) < BLOCK:
        refusals.append(
            f"{spec.sq} queries and {spec.skv} keys (flex compiles for every shape: from {BLOCK} of each on)"
        )
    return refusals


def _keep_what_is_saved() -> None:
    """Keeps torch's compiler from reusing memory saved for the backward pass as scratch space of that pass.

    The compiler decides this at the first backward pass of a shape; later ones with retain_graph=True would then raise.
    The setting is process-wide, because compiled functions read it again in their backward pass.
    """
    from torch._functorch import config

    config.donated_buffer = False
    # torch 2.13 stores settings per thread; the threads of autograd read the default.
    config._config["donated_buffer"].default = False


@cache
def _compiled() -> Callable[..., Any]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    _keep_what_is_saved()
    function, lse = torch.compile(flex_attention, dynamic=False), AuxRequest(lse=True)

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # At torch's default limit of 8 shapes, calls would run uncompiled, and flex_attention raises then.
        with config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            out, aux = function(*args, return_aux=lse, **kwargs)
        return out, aux.lse

    return run


def _visible(spec: AttentionSpec, mask: Tensor | None) -> Callable[..., Tensor]:
    """The mask_mod for flex_attention: True where query i sees key j."""
    delta, pre, next = spec.skv - spec.sq, spec.pre, spec.next
    full = None if mask is None else mask[(None,) * (4 - mask.ndim)]

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        outside = outside_window(i + delta, j, pre, next)
        if full is not None:
            at = [x if n > 1 else 0 for x, n in zip((b, h, i, j), full.shape)]
            hidden = full[at[0], at[1], at[2], at[3]]
            outside = hidden if outside is None else outside | hidden
        return (j >= 0) if outside is None else ~outside

    return mod


@lru_cache(maxsize=64)
def _window_blocks(spec: AttentionSpec, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_visible(spec, None), None, None, spec.sq, spec.skv, device)


def _blocks(spec: AttentionSpec, mask: Tensor | None, device: torch.device) -> Any:
    """The BlockMask of window and mask; None if everything is visible."""

    if mask is None:
        # The blocks of a window are the same for every batch entry.
        return None if spec.unbounded else _window_blocks(spec._replace(batch=1), device)
    return _mask_blocks(spec, mask, None if mask.is_inference() else mask._version, device)


_last_mask: list[Any] = [None]
"""(mask, what else the blocks depend on, blocks) of the last mask."""


def _mask_blocks(spec: AttentionSpec, mask: Tensor, version: int | None, device: torch.device) -> Any:
    """The BlockMask of a mask tensor, which is found by reading all of it.

    The last one is kept, because the layers of a model and their recomputed passes share a mask. Not one per mask: the
    blocks refer to their mask, so that it would never be freed. version: None if the mask has none.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    key, last = (spec.sq, spec.skv, spec.pre, spec.next, version), _last_mask[0]
    if last is not None and version is not None and last[0] is mask and last[1] == key:
        return last[2]
    full = mask[(None,) * (4 - mask.ndim)]
    b, h = (n if n > 1 else None for n in full.shape[:2])
    blocks = create_block_mask(_visible(spec, mask), b, h, spec.sq, spec.skv, device)
    _last_mask[0] = (mask, key, blocks)
    return blocks


def _forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Given
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [b, n, sq, d] and lse [b, n, sq]; torch differentiates them."""
    if launch.simulated():
        hidden = dense_mask(spec, given.mask, q.device)
        hidden = None if hidden is None else hidden.expand(q.shape[0], q.shape[1], spec.sq, spec.skv)
        return (*stand_ins.flex(q, k, v, hidden, spec.scale), ())
    blocks = _blocks(spec, given.mask, q.device)
    out, lse = _compiled()(q, k, v, block_mask=blocks, scale=spec.scale, enable_gqa=spec.group > 1)
    return out, lse, ()


register(ID, refuse=_refuse, forward=_forward, backward=None)
