"""Scores sequences with a model, in batches distributed over data-parallel replicas, and aggregates the scores.

A score is (negative log-likelihood, wrong labels, counted labels) per sequence. Standard errors treat sequences, not
tokens, as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...inference.engine import Engine


@dataclass(frozen=True)
class Example:
    """tokens: at least two ids. The last `count` of them are scored, each conditioned on all tokens before it."""

    tokens: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Measured:
    """A number and its standard error (None if there is only one sequence)."""

    value: float
    stderr: float | None


def score(
    engine: Engine, examples: Sequence[Example], *, batch: int, on_batch: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Scores float64 [examples, 3], the same on every rank; `batch` sequences at a time."""
    scores = torch.zeros(len(examples), 3, device=engine.device)
    # Sorted by decreasing length, so that a batch that does not fit in memory fails immediately, and padding is small.
    order = sorted(range(len(examples)), key=lambda n: -len(examples[n].tokens))
    for number, first in enumerate(range(0, len(order), batch)):
        if number % engine.replicas == engine.replica:
            members = order[first : first + batch]
            scores[members] = engine.score(*_padded([examples[n] for n in members]))
        on_batch(min(len(order), first + batch))
    return engine.total(scores).double()


def _padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, counted) [b, s], padded on the right, which causal attention does not see."""
    s = max(len(e.tokens) for e in examples) - 1
    tokens, labels = torch.zeros(2, len(examples), s, dtype=torch.int64)
    counted = torch.zeros(len(examples), s, dtype=torch.bool)
    for row, e in enumerate(examples):
        n = len(e.tokens) - 1
        tokens[row, :n], labels[row, :n] = torch.tensor(e.tokens[:-1]), torch.tensor(e.tokens[1:])
        counted[row, n - e.count : n] = True
    return tokens, labels, counted


def mean(values: Tensor) -> Measured:
    """The mean of one value per sequence."""
    n = len(values)
    return Measured(float(values.mean()), float(values.std() / math.sqrt(n)) if n > 1 else None)


def per_token(scores: Tensor) -> Measured:
    """The mean negative log-likelihood per counted token, of sequences with different counts.

    Source of the error: the linearised variance of a ratio of two sums over sequences (Cochran, "Sampling Techniques",
    section 6.3).
    """
    nll, count = scores[:, 0], scores[:, 2]
    value, n = float(nll.sum() / count.sum()), len(scores)
    if n < 2:
        return Measured(value, None)
    residual = nll - value * count
    return Measured(value, math.sqrt(float((residual**2).sum()) * n / (n - 1)) / float(count.sum()))


def perplexity(loss: Measured, factor: float = 1.0) -> Measured:
    """exp(min(20, factor x loss)), with Megatron's cap; the error is propagated to first order."""
    value = math.exp(min(20.0, factor * loss.value))
    return Measured(value, None if loss.stderr is None else value * factor * loss.stderr)
