"""A backend whose every implementation is the op's reference, on the CPU.

It is what golden losses are computed on, the oracle's environment inside the kit, and the smallest complete backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hal.backend import Backend, Impl, Probe, _accepts_all
from hal.comm import Comm, Solo
from hal.errors import BackendUnavailable
from hal.op import OPS


class Reference(Backend):
    """Runs every op that is defined when it is made on that op's reference, on the CPU."""

    name = "reference"

    def __init__(self) -> None:
        self.impls = {  # type: ignore[misc]
            op.name: [Impl(op, "reference", op.reference, _accepts_all(op), op.reference, None, {})]
            for op in OPS.values()
        }

    def probe(self) -> Probe:
        return Probe(True, 1, "the references run wherever torch runs")

    def device(self, index: int = 0) -> torch.device:
        if index:
            raise BackendUnavailable(f"the reference backend has one device, cpu; asked for number {index}")
        return torch.device("cpu")

    def synchronize(self) -> None:
        return None

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> Comm:
        return Solo("reference")
