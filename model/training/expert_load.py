"""The load of the experts in a step, counted by the routers and summed over the ranks, and the experts' biases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal import Comm

from ..config.experts import coefficients
from ..config.schema import Config
from ..gpt.model import GPT
from ..gpt.moe import LOSSES, routers


@dataclass(frozen=True)
class ExpertReport:
    """The mixture-of-experts layers in one step.

    load: each expert's share of the assignments (their sum is 1, without dropped ones), by layer. entropy: of the mean
    scores of the router, as a share of that of equal scores, by layer. losses: means over layers and microbatches,
    before they are multiplied by their coefficients. dropped: share of the assignments that exceeded a capacity.
    """

    load: dict[int, list[float]]
    entropy: dict[int, float]
    losses: dict[str, float]
    dropped: float

    def imbalance(self) -> dict[int, float]:
        """The largest load of an expert, as a multiple of an even share, by layer."""
        return {layer: max(shares) * len(shares) for layer, shares in self.load.items()}

    def collapsed(self, topk: int) -> list[int]:
        """The layers whose tokens use hardly more experts than a single token does.

        The criterion is the effective number of experts, exp(entropy of the load): less than 1.5 times the experts per
        token although there are at least twice as many.
        """
        return [
            layer
            for layer, shares in self.load.items()
            if len(shares) >= 2 * topk and math.exp(_entropy(shares)) < 1.5 * topk
        ]


def _entropy(shares: Sequence[float]) -> float:
    """In nats."""
    return -sum(p * math.log(p) for p in shares if p > 0.0)


class ExpertLoad:
    """Starts the routers of this rank's `models` in each step, and sums the counts of all ranks."""

    def __init__(self, config: Config, models: Sequence[GPT], world: Comm) -> None:
        self.config, self.world = config, world
        self.routers = {layer: router for model in models for layer, router in routers(model).items()}
        absent = {int(n) for n in config.noop_layers}
        self.layers = [n for n in range(config.num_layers) if config.has_experts(n) and n not in absent]
        self._sums = torch.zeros(0)

    def start(self, loss_scale: float) -> None:
        """Begins a step; see Router."""
        for router in self.routers.values():
            router.start_step(loss_scale)

    def finish(self) -> None:
        """Sums the counts over the ranks. All ranks call it after the last backward pass of the step."""
        if not self.layers:
            return
        width = 2 * self.config.expert_count + len(LOSSES) + 1
        rows = [self.routers[n].sums if n in self.routers else None for n in self.layers]
        blank = torch.zeros(width, device=self.world.device)
        self._sums = self.world.all_reduce(torch.stack([blank if row is None else row for row in rows]))

    def counts(self) -> list[Tensor]:
        """The counts of this step, from which `report` makes its report: one float32 [n], none without experts."""
        return [self._sums.flatten()] if self.layers else []

    def update_biases(self, clip_factor: Tensor) -> None:
        """Raises the bias of experts below the mean load and lowers that of the others, by a constant step (Wang et
        al., arXiv 2408.15664, algorithm 1). Changes nothing if clip_factor (scalar) is not finite, like ops.adamw."""
        for layer, router in self.routers.items():
            if router.expert_bias is not None:
                load = self._sums[self.layers.index(layer), : router.size].to(router.expert_bias.device)
                change = self.config.moe_router_bias_update_rate * torch.sign(load.mean() - load)
                router.expert_bias += torch.where(torch.isfinite(clip_factor), change, 0.0)

    def report(self, counts: Sequence[float]) -> ExpertReport | None:
        """The report of the step with these `counts`, None for a model without experts."""
        if not counts:
            return None
        width = len(counts) // len(self.layers)
        rows = [counts[i : i + width] for i in range(0, len(counts), width)]
        c, e = self.config, self.config.expert_count
        load: dict[int, list[float]] = {}
        entropy: dict[int, float] = {}
        totals, counted, microbatches = [0.0] * len(LOSSES), 0.0, 0.0
        for layer, row in zip(self.layers, rows):
            assigned, scores = row[:e], row[e : 2 * e]
            load[layer] = [n / max(1.0, sum(assigned)) for n in assigned]
            entropy[layer] = _entropy([s / sum(scores) for s in scores]) / math.log(e) if sum(scores) else 0.0
            totals = [total + value for total, value in zip(totals, row[2 * e : -1])]
            counted, microbatches = counted + sum(assigned), microbatches + row[-1]
        scale = {**coefficients(c), "z_loss": c.moe_z_loss_coeff or 0.0}
        losses = {n: v / microbatches / scale[n] for n, v in zip(LOSSES, totals) if microbatches and scale.get(n)}
        all_of_them = microbatches * c.micro_batch_size * c.seq_length * c.moe_router_topk
        return ExpertReport(load, entropy, losses, 1.0 - counted / all_of_them if all_of_them else 0.0)
