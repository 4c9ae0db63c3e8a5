"""The ranks' common decision to stop, made without waiting for the step that has just been queued."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal import Comm


class StopVote:
    """Called by every rank once per step. All ranks get the same answers."""

    def __init__(self, world: Comm) -> None:
        self._world = world
        self._sum: Callable[[], torch.Tensor] | None = None

    def __call__(self, asked: bool) -> bool:
        """Whether a rank has asked to stop; with several ranks, in the previous call.

        The previous call's answer needs no wait, or a short one, because the device has since been given another step.
        """
        if self._world.size == 1:
            return asked
        before = self._sum
        # torch.tensor would copy from host memory, for which the host waits.
        flag = torch.full((1,), int(asked), dtype=torch.int64, device=self._world.device)
        self._sum = self._world.start("all_reduce", flag, op="max").wait
        return before is not None and bool(before().item())

    def close(self) -> None:
        """Ends the last call's communication."""
        if self._sum is not None:
            self._sum()
            self._sum = None
