"""Computes suspect steps again, to attribute each to a transient fault, a persistent fault or its batch.

A step is a function of (config, iteration, samples), so a second execution gives the same bits unless something has
failed. If it does give the same bits, the ops' references decide whether the batch or an implementation is the cause.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import hal
from hal import ops

OUTLIER = 10.0
"""A loss above this many times the largest of the last WINDOW is suspect (Megatron-LM's rerun state machine)."""
WINDOW = 100


class Gradients(NamedTuple):
    """What a forward and backward pass of the global batch gave: the mean loss, and the norm of the gradients (None if
    they overflowed in float16)."""

    loss: float
    norm: float | None

    def same(self, other: Gradients) -> bool:
        """Whether both are equal, a NaN being equal to itself."""
        pairs = zip((self.loss, self.norm or 0.0), (other.loss, other.norm or 0.0))
        return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


class Verdict(NamedTuple):
    """cause: "transient", "persistent" or "input"; text: what was observed; repeated: the second result, which every
    further execution must give too."""

    cause: str
    text: str
    repeated: Gradients


class RerunCheck:
    """Finds suspect steps and their causes. Every rank calls it with the same numbers.

    losses: those of the last WINDOW steps that were not suspect. A checkpoint has them, because a resumed run must
    skip the same batches as an uninterrupted one.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.losses = deque(losses, maxlen=WINDOW)

    def suspicion(self, gradients: Gradients) -> str:
        """Why a step is suspect, or ""; a step that is not suspect is recorded for later comparisons."""
        if not math.isfinite(gradients.loss):
            return f"the loss is {gradients.loss}"
        if gradients.norm is not None and not math.isfinite(gradients.norm):
            return f"the gradient norm is {gradients.norm}"
        if self.losses and gradients.loss > OUTLIER * max(self.losses):
            return (
                f"the loss {gradients.loss:.6g} is more than {OUTLIER:g} times the largest of the last "
                f"{len(self.losses)}"
            )
        self.losses.append(gradients.loss)
        return ""

    def verdict_of_check(self, first: Gradients, why: str, again: Callable[[], Gradients]) -> Verdict:
        """As `verdict`, of a step in which the result of a call was wrong (--verify-ops)."""
        second = again()
        if second.same(first):
            return Verdict("persistent", f"{why}; the same step computed again has the same result", second)
        text = f"{why}; the same step computed again gave a loss of {second.loss:.6g}: a transient fault"
        return Verdict("transient", text, second)

    def verdict(self, first: Gradients, why: str, again: Callable[[], Gradients]) -> Verdict:
        """The cause of a suspect step. again: computes the step once more; its gradients are those of the last call."""
        second = again()
        if not second.same(first):
            text = f"{why}, and the same step computed again gave a loss of {second.loss:.6g}: a transient fault"
            return Verdict("transient", text, second)
        with hal.policy(pin={name: "reference" for name, op in vars(ops).items() if isinstance(op, hal.Op)}):
            reference = again()
        if _contradicts(reference, first):
            text = (
                f"{why} each time, but the ops' references give a loss of {reference.loss:.6g} and a gradient norm of "
                f"{reference.norm or math.nan:.6g}: an implementation or the device computes wrong results (`hal "
                "parity` finds the op)"
            )
            return Verdict("persistent", text, second)
        text = f"{why} each time, also with the ops' references: the batch or the model's state causes it"
        return Verdict("input", text, second)


def _contradicts(reference: Gradients, first: Gradients) -> bool:
    """Whether the references give another result: another loss, or a finite gradient norm in place of one that is not.

    A backward pass can be wrong after a right loss.
    """
    if math.isfinite(reference.loss) and not math.isclose(reference.loss, first.loss, rel_tol=0.1):
        return True
    infinite = first.norm is not None and not math.isfinite(first.norm)
    return infinite and reference.norm is not None and math.isfinite(reference.norm)
