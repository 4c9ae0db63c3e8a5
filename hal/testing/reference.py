"""A backend whose every implementation is the op's reference, on the CPU. Composite ops run as compositions.

Golden losses are computed on it, the kit's oracle runs in it, and it is the smallest complete backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hal.comm.contract import Comm, SingleRankComm
from hal.core.adapters import refusing
from hal.core.backend import Backend, Impl, Probe
from hal.core.capabilities import Capabilities
from hal.core.op import OPS
from hal.errors import BackendUnavailable


class Reference(Backend):
    """Runs every op that is defined when the instance is created on that op's reference, on the CPU.

    Composite ops have no separate implementation, so that 16-bit results are rounded as on a backend that composes
    them.
    """

    name = "reference"

    def __init__(self) -> None:
        self.impls = {  # type: ignore[misc]
            op.name: [Impl(op, "reference", op.reference, refusing(op, None, ()), op.reference, None, {})]
            for op in OPS.values()
            if op.decompose is None
        }

    def probe(self) -> Probe:
        return Probe(True, 1, "the references run wherever torch runs")

    def device(self, index: int = 0) -> torch.device:
        if index:
            raise BackendUnavailable(f"the reference backend has one device, cpu; asked for number {index}")
        return torch.device("cpu")

    def capabilities(self) -> Capabilities:
        stored = {torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
        return Capabilities(dtypes=Capabilities().dtypes | stored, host_visible=True)

    def synchronize(self) -> None:
        return None

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> Comm:
        return SingleRankComm("reference")
