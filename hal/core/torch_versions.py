"""What HAL uses of torch that older releases lack, each marked with the first release that has it.

The supported releases are those of setup.cfg. `.ci/aarch64` installs the oldest. On releases before 2.11 the features
of torch.compile and torch.export that need a newer torch are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch


def tags(*names: str) -> tuple[torch.Tag, ...]:
    """The tags of these names that this torch knows (needs_exact_strides: 2.7; cudagraph_unsafe: 2.9).

    Without the latter, torch.compile may record ops that read random streams on the host into a CUDA graph; the `cuda`
    extra requires a release that has it.
    """
    return tuple(getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name))


def is_exporting() -> bool:
    """Whether torch.export traces; False before 2.7, which cannot tell.

    What torch.compiler.is_exporting() returns, except that torch.compile of 2.11 takes that call for True.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def skip_frame(code: CodeType) -> None:
    """torch.compile never looks into functions with this code, nor into what they call.

    The effect of torch.compiler.disable without its wrapper, which costs 1 us per call. Before 2.7 the functions that
    they call are looked into.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameAction"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    else:
        frames.skip_code(code)


def given_dtypes(dtypes: Sequence[Any]) -> list[torch.dtype]:
    """The dtypes that a torch op was given as a ScalarType[], which torch 2.6 passes to the op's fake as numbers."""
    numbers = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}  # c10/core/ScalarType.h
    return [dtype if isinstance(dtype, torch.dtype) else numbers[dtype] for dtype in dtypes]


def gradient_edge(tensor: torch.Tensor) -> tuple[Any, Any]:
    """torch.autograd.graph.get_gradient_edge(tensor), and what keeps the edge's node alive.

    The edge of a Python function refers to its node weakly. torch 2.6 does not add an owner to the edge, and crashes
    when it uses an edge whose node is gone.
    """
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    if hasattr(edge, "ownership_token"):
        return edge, None
    with torch.enable_grad():
        return edge, tensor.view_as(tensor).grad_fn


def accelerator() -> str | None:
    """The device type of torch's accelerator, or None if this torch or this machine has none (2.6 raises then)."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:
        return None
    return None if found is None else found.type
