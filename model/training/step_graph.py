"""The gradients of a step as one recorded graph, which the device repeats without the host (--cuda-graphs)."""

from __future__ import annotations

from collections.abc import Callable

import hal

from .microbatches import Microbatch
from .step_result import DeviceGradients


class StepGraph:
    """`compute`, recorded in the first step and repeated in all later ones.

    A graph repeats the numbers that the host had at the recording, on the same memory: so the tensors of the first
    step's microbatches receive those of later steps, and the gradients stay where the first step has put them. What
    changes otherwise from step to step must not be part of it, and is refused (validation.py). The optimizer, whose
    learning rate and step count are numbers of the host, runs after it.
    """

    def __init__(self, compute: Callable[[list[Microbatch]], DeviceGradients]) -> None:
        self._compute = compute
        self._microbatches: list[Microbatch] = []
        self._repeat: Callable[[], DeviceGradients] | None = None

    def __call__(self, microbatches: list[Microbatch]) -> DeviceGradients:
        """The gradients of these microbatches. Loss and norm are in the same tensors in every step."""
        if self._repeat is None:
            self._microbatches = microbatches
            self._repeat = hal.backend().capture(lambda: self._compute(microbatches))
        for to, given in zip(self._microbatches, microbatches):
            to.tokens.copy_(given.tokens)
            to.labels.copy_(given.labels)
        return self._repeat()
