"""Sampling the next token from logits: greedy, temperature, top-k, top-p, by inverse transform sampling.

A sample is a function of the logits and of one uniform random number, so a seed gives the same text on every backend
and parallel layout (up to ties that are decided by rounding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.schema import ConfigError

LOWEST = 1e-4
"""The lowest temperature above 0. Logits divided by a lower one may overflow, and the result would be greedy anyway."""


@dataclass(frozen=True)
class Sampling:
    """temperature: divides the logits; 0 is greedy decoding. top_k: keep only the k most likely tokens (0: all).
    top_p: of those, keep the smallest set of most likely tokens whose probabilities sum to at least p (1: all)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"the temperature must be a number of at least 0; found {self.temperature}")
        if 0.0 < self.temperature < LOWEST:
            raise ConfigError(
                f"the temperature must be at least {LOWEST}, or 0 for the most likely token; found {self.temperature}"
            )
        if self.top_k < 0:
            raise ConfigError(f"top-k must be a number of tokens, or 0 for all; found {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top-p must be in (0, 1]; found {self.top_p}")
        if self.temperature == 0.0 and (self.top_k or self.top_p < 1.0):
            raise ConfigError(
                "temperature 0 takes the most likely token, so top-k and top-p would be ignored; remove them"
            )

    @property
    def greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0.0 or self.top_k == 1

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution [v] (float64, CPU) to sample from, given logits [v]."""
        x = logits.detach().cpu().double()
        if self.greedy:
            return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
        p = torch.softmax(x / self.temperature, dim=-1)
        if self.top_k or self.top_p < 1.0:
            # A stable sort keeps the lower ids among equal probabilities, on every platform.
            order = p.argsort(descending=True, stable=True)
            if self.top_k:
                order = order[: self.top_k]
            if self.top_p < 1.0:
                kept = p[order] / p[order].sum()
                # The token at which the cumulative probability reaches top_p belongs to the set, hence + 1.
                order = order[: int((kept.cumsum(0) < self.top_p).sum()) + 1]
            p = torch.zeros_like(p).index_copy_(0, order, p[order])
        return p / p.sum()

    def choose(self, logits: Tensor, uniform: float) -> int:
        """The first id whose cumulative probability exceeds `uniform`, which is in [0, 1)."""
        if self.greedy:
            return int(logits.argmax())
        cumulative = self.probabilities(logits).cumsum(0)
        at = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
        # The product may round up to the sum itself; without `min`, an id of probability 0 could then be selected.
        return min(at, int(torch.searchsorted(cumulative, float(cumulative[-1]))))
