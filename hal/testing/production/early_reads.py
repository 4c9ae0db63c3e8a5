"""Whether results were complete when the call returned them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from ..calls import Outcome
from ..comparison import equal_bits
from .block_comparison import Wrong
from .blocks import Block

PATIENCE = 1.0
"""Seconds in which the results of a wrong call are read again, because late work may finish."""


class EarlyReads:
    """Copies of parts of results, read as a model reads them: without synchronising the device.

    Of every output and gradient the part of the last block is read, because the last rows are computed last. Outputs
    are read when this is made, directly after the call.
    """

    def __init__(self, blocks: Sequence[Block], outcome: Outcome) -> None:
        self._reads: list[tuple[str, Callable[[], Tensor], Tensor]] = []
        last = {label: pick for block in blocks for label, pick in block.outputs.values()}
        for label, pick in last.items():
            value = outcome.outputs.get(label)
            if isinstance(value, Tensor):
                self._read(label, lambda x=value.detach(), pick=pick: pick(x))  # type: ignore[misc]

    def read_gradients(self, blocks: Sequence[Block], outcome: Outcome) -> None:
        """Reads the gradients; to be called directly after the backward pass."""
        last = {name: pick for block in blocks for name, pick in block.gradients.items()}
        for name, pick in last.items():
            value = outcome.gradients.get(name)
            if value is not None and value.shape == outcome.leaves[name].shape:
                self._read(f"the gradient of {name}", lambda x=value, pick=pick: pick(x))  # type: ignore[misc]

    def _read(self, label: str, part: Callable[[], Tensor]) -> None:
        self._reads.append((label, part, part().cpu().clone()))

    def require_unchanged(self, wait: bool = False) -> None:
        """Raises Wrong if a result has changed since it was read. wait: whether a change is waited for."""
        until = time.monotonic() + (PATIENCE if wait else 0.0)
        while True:
            for label, part, copy in self._reads:
                if not equal_bits(part().cpu(), copy):
                    raise Wrong(
                        f"results were read before the work was done: {label} changed after the call had returned. "
                        "Work must be ordered on the backend's current stream, where later operations of torch wait"
                    )
            if time.monotonic() >= until:
                return
            time.sleep(0.02)
