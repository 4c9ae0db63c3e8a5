"""What HAL uses of torch that older releases lack, each marked with the first release that has it.

The supported releases are those of setup.cfg. On older ones, down to 2.6, nothing here fails at import, but they are
not tested: the features of torch.compile and torch.export that need a newer torch are missing there.
"""

from __future__ import annotations

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
    """Whether torch.export traces; False before 2.7, which cannot tell."""
    ask = getattr(torch.compiler, "is_exporting", None)
    return bool(ask()) if ask is not None else False


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
