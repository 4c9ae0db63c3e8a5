"""Compares parts of a call's results with the reference of the same parts (see `Block`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.core.dispatch import activated
from hal.core.op import Op, Tol
from hal.errors import HalError

from .. import hints
from ..calls import Outcome, backward, map_tensors, run, to_double
from ..checks import wrong_choices
from ..comparison import Expected
from ..reference import Reference
from .blocks import Block


class Wrong(AssertionError):
    """A result that is outside its tolerance, or an exception, in words. tolerances: the error."""

    def __init__(self, text: str, tolerances: float = math.inf) -> None:
        super().__init__(text)
        self.tolerances = tolerances


@dataclass
class Judge:
    """Compares the results of one implementation in one dtype. worst: the largest error so far, in tolerances.

    waiver: how many tolerances the implementation is allowed.
    """

    op: Op[Any, Any]
    dtype: torch.dtype
    tol: Tol
    waiver: float = 1.0
    worst: float = 0.0

    def prescribed(self, block: Block, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The choice of the implementation, as an argument of the reference; {} for an op that chooses nothing.

        Raises Wrong if rounding does not explain it.
        """
        choice = self.op.choice
        if choice is None:
            return {}
        label, pick = block.outputs[f"output {choice.output}"]
        chosen = pick(outputs[label].detach()).cpu()
        (part,) = block.parts()
        rows = wrong_choices(self.op, choice, to_double(part.arguments), chosen)
        if rows.numel():
            values = chosen[rows[0]].tolist()
            raise Wrong(f"{label}, {block.name}: {values} in row {int(rows[0])} is not the choice of the reference")
        return {choice.parameter: chosen}

    def expected(
        self, block: Block, dys: Sequence[Tensor], with_grad: bool, prescribed: Mapping[str, Tensor] | None = None
    ) -> tuple[Outcome, Outcome]:
        """The block by the reference in float64, and in the dtype under test.

        dys: the upstream gradients of the whole call. prescribed: replaces arguments.
        """
        replaced = prescribed or {}

        def in_double(arguments: Mapping[str, Any]) -> dict[str, Any]:
            return to_double({**arguments, **replaced})

        def as_it_is(arguments: Mapping[str, Any]) -> dict[str, Any]:
            return map_tensors({**arguments, **replaced}, lambda x: x.detach().cpu().clone())

        with activated(Reference()):
            exact = self._reference(block, dys, with_grad, in_double)
            return exact, self._reference(block, dys, with_grad, as_it_is)

    def _reference(
        self, block: Block, dys: Sequence[Tensor], with_grad: bool, convert: Callable[[Any], dict[str, Any]]
    ) -> Outcome:
        """The reference's results, of arguments that `convert` has made; gradients of parts are added in float64."""
        op, total = self.op, None
        for part in block.parts():
            outcome = run(op, op.reference, convert(part.arguments), with_grad)
            if with_grad:
                upstream = [part.upstream(dy).cpu() for dy in dys]
                outcome.gradients = backward(
                    outcome, [dy.to(y.dtype) for dy, y in zip(upstream, outcome.differentiable)]
                )
            if total is None:
                total = outcome
                continue
            for name in block.gradients:
                terms = [x.double() for x in (total.gradients.get(name), outcome.gradients.get(name)) if x is not None]
                total.gradients[name] = sum(terms[1:], start=terms[0]) if terms else None
        assert total is not None
        return total

    def compare(self, block: Block, outcome: Outcome, exact: Outcome, native: Outcome) -> None:
        """Compares the outputs and gradients that `outcome` has with those of the reference. Raises Wrong."""
        pairs: list[tuple[str, Tensor, Expected]] = []
        try:
            for of_part, (label, pick) in block.outputs.items() if outcome.outputs else ():
                y = pick(outcome.outputs[label].detach()).cpu()
                pairs.append((label, y, self._expected(exact.outputs[of_part], native.outputs[of_part])))
            for name in [name for name in block.gradients if name in outcome.gradients]:
                got, right, rounded = outcome.gradients[name], exact.gradients[name], native.gradients[name]
                if got is None or right is None or rounded is None:
                    raise Wrong(f"{block.name}: the gradient of {name} is missing (None)")
                if got.shape != outcome.leaves[name].shape or got.dtype != outcome.leaves[name].dtype:
                    raise Wrong(f"the gradient of {name} is {got.dtype} {tuple(got.shape)}")
                y = block.gradients[name](got).cpu()
                summands = block.summands.get(name, 1)
                pairs.append(
                    (f"the gradient of {name}", y, self._expected(right, rounded.to(got.dtype), True, summands))
                )
        except RuntimeError as error:  # errors of asynchronous work surface when its results are read
            raise Wrong(f"{block.name}: reading the results raised {type(error).__name__}: {error}") from error
        if not pairs and outcome.gradients:
            raise HalError(f"{self.op.name}: nothing of {block.name} was compared")
        for label, y, expected in pairs:
            result = expected.measure(y)
            self.worst = max(self.worst, result.tolerances)
            if result.tolerances > self.waiver:
                wrong = expected.errors(y) > self.waiver
                text = f"{label}, {block.name}: {result.text} (allowed: {self.waiver:g})"
                raise Wrong(text + hints.as_text(hints.pattern(wrong, y, expected.exact)), result.tolerances)

    def _expected(self, exact: Tensor, native: Tensor, gradient: bool = False, summands: int = 1) -> Expected:
        return Expected(exact, native, self.tol, self.dtype, gradient, summands)
