"""--verify-ops: a share of the calls of a run is compared with the float64 reference (hal.testing.verification)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hal import Comm

from ..config.schema import Config

if TYPE_CHECKING:
    from hal.testing.verification import Verifier


class VerifiedCalls:
    """What this rank has compared, and whether any rank has found a wrong result. Does nothing at a rate of 0."""

    def __init__(self, config: Config, world: Comm) -> None:
        self._world, self._known, self._verifier = world, 0, _verifier(config, world.rank)

    def watching(self, folder: Path) -> AbstractContextManager[None]:
        """Compares calls within a `with` block. folder: for the tensors of wrong ones."""
        if self._verifier is None:
            return contextlib.nullcontext()
        self._verifier.folder = folder
        return self._verifier.watching()

    def wrong(self) -> str:
        """The wrong results since the last call, in words; "" if no rank has found one. Every rank must call it."""
        if self._verifier is None:
            return ""
        new = self._verifier.violations[self._known :]
        self._known += len(new)
        text = "; ".join(map(str, new)).encode()
        longest = torch.tensor([len(text)], device=self._world.device)
        size = int(self._world.all_reduce(longest, "max").item())
        if not size:
            return ""
        # Every rank returns the findings of all ranks, because only rank 0 writes the log.
        encoded = torch.zeros(self._world.size, size, dtype=torch.int64, device=self._world.device)
        encoded[self._world.rank, : len(text)] = torch.tensor(list(text), dtype=torch.int64)
        rows = self._world.all_reduce(encoded).tolist()
        return "; ".join(bytes(row).rstrip(b"\0").decode() for row in rows if any(row))

    def line(self) -> str:
        """A line for the log, "" at a rate of 0."""
        return "" if self._verifier is None else f" {self._verifier}"

    def report(self) -> dict[str, Any] | None:
        """The results of this rank for run.json, None at a rate of 0."""
        return None if self._verifier is None else self._verifier.report()


def _verifier(config: Config, rank: int) -> Verifier | None:
    if not config.verify_ops:
        return None
    from hal.testing.verification import Verifier

    return Verifier(config.verify_ops, seed=config.seed, rank=rank)
