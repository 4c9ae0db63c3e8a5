"""A mixture of experts on one rank of a layout: parameters, rows, activations, traffic and floating-point operations.

The terms are those of model/gpt/moe.py. t tokens of this rank choose k of e experts each, of which this rank holds
`local`; the experts of a layer are on E = ep etp ranks. With balanced routing a rank multiplies t k etp rows: each of
its etp shards of an expert gets every row of the expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hal.mesh import Layout

from ...config.experts import coefficients
from ...config.schema import Config

INTEGER, STATISTIC = 8, 4
"""Bytes of an index of an expert or of a row, and of a float32 score."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer on a rank.

    tokens: of a microbatch that this rank routes. all_tokens: those that its shared expert multiplies, which are more
    with tensor parallelism. local, ffn, shared: experts of this rank, their channels, and those of the shared expert,
    on this rank. imbalance: the largest number of rows of a rank, in multiples of the mean.
    """

    config: Config
    layout: Layout
    tokens: int
    all_tokens: int
    local: int
    ffn: int
    shared: int
    gate: int
    element: int
    imbalance: float

    @staticmethod
    def of(c: Config, layout: Layout, hidden_rows: int, rows: int, gate: int, imbalance: float) -> Experts | None:
        """The experts of a config; None if it has none."""
        if c.num_experts is None:
            return None
        b = c.micro_batch_size
        return Experts(
            config=c,
            layout=layout,
            tokens=hidden_rows * b,
            all_tokens=rows * b,
            local=c.num_experts // layout.ep,
            ffn=c.moe_ffn_hidden_size // layout.etp,
            shared=(c.moe_shared_expert_intermediate_size or 0) // layout.tp,
            gate=gate,
            element=c.params_dtype.itemsize,
            imbalance=imbalance,
        )

    @property
    def ranks(self) -> int:
        """E, the ranks that share the experts of a layer."""
        return self.layout.ep * self.layout.etp

    @property
    def count(self) -> int:
        """e, the experts of a layer."""
        return self.config.expert_count

    @property
    def gathers(self) -> bool:
        """Whether the ranks exchange all tokens (--moe-token-dispatcher-type allgather)."""
        return self.ranks > 1 and self.config.moe_token_dispatcher_type == "allgather"

    @property
    def assignments(self) -> int:
        """Rows that this rank's tokens fill: t k, or with padding the capacities of all experts."""
        c, t = self.config, self.tokens * self.config.moe_router_topk
        if not c.moe_pad_expert_input_to_capacity:
            return t
        assert c.moe_expert_capacity_factor is not None
        # The capacity counts the micro-batch over the tensor- and context-parallel ranks that share it.
        sharing = self.layout.cp * (self.layout.tp if c.sequence_parallel else 1)
        return self.count * math.ceil(t * sharing / self.count * c.moe_expert_capacity_factor)

    @property
    def rows(self) -> float:
        """Rows that this rank's experts multiply, on the rank with the most."""
        mean = self.assignments * self.layout.etp
        if self.config.moe_pad_expert_input_to_capacity:
            return mean
        factor = self.config.moe_expert_capacity_factor
        largest = self.imbalance if self.layout.ep > 1 else 1.0
        return mean * (largest if factor is None else min(largest, factor))

    @property
    def allocated(self) -> float:
        """Rows for which memory is allocated. When tokens are gathered, every rank has a row for each assignment."""
        return self.assignments * self.ranks if self.gathers else self.rows

    @property
    def _router(self) -> int:
        """Bytes of a logit."""
        return {"fp32": 4, "fp64": 8}.get(self.config.moe_router_dtype or "", self.element)

    @property
    def _weight(self) -> int:
        """Bytes of the probability of a row."""
        return min(4, self._router)

    def parameters(self) -> int:
        """Parameters of this rank's experts."""
        return self.local * self.config.hidden_size * self.ffn * (self.gate + 1)

    def replicated_parameters(self) -> int:
        """Parameters of the router and the shared expert, which expert-parallel ranks hold alike."""
        return self.config.hidden_size * (self.count + self.shared * (self.gate + 1))

    def keeps_input(self) -> bool:
        """Whether the layer's input is kept for the backward pass, besides copies of it."""
        return self._router == self.element or self.shared > 0

    def activations(self) -> float:
        """Bytes that a microbatch keeps between its forward and backward pass, without the layer's input."""
        c, t, k, h = self.config, self.tokens, self.config.moe_router_topk, self.config.hidden_size
        router = t * self.count * self._router + t * k * INTEGER
        if self._router != self.element:  # the product in another dtype has copies of both operands
            router += (t + self.count) * h * self._router
        score = max(STATISTIC, self._router)
        if coefficients(c):
            router += t * score * (self.count + (c.moe_router_score_function == "sigmoid"))
        if c.moe_z_loss_coeff is not None:
            router += t * score * (1 + self.count * (self._router < STATISTIC))
        ranks = self.ranks if self.gathers else 1
        maps: float = ranks * t * k * INTEGER
        if self.ranks > 1 and not self.gathers:  # the second permutation, of received rows
            maps += self.rows * INTEGER
        activated = 2 if not c.swiglu else 1  # other activations are multiplied by the probabilities afterwards
        per_row = (h + self.ffn * (self.gate + activated)) * self.element + self._weight
        shared = self.all_tokens * self.shared * (self.gate + 1) * self.element
        return router + maps + self.allocated * per_row + shared

    def working(self) -> float:
        """Bytes of the gradients of the widest activations of a backward pass: of the rows, and inside an expert."""
        inner = self.ffn * (self.gate + 1) + self.config.hidden_size
        return self.allocated * inner * self.element

    def sent_forward(self) -> float:
        """Bytes that this rank sends in one forward pass of a layer and microbatch, if it has the most rows."""
        h, t, k = self.config.hidden_size * self.element, self.tokens, self.config.moe_router_topk
        if self.ranks == 1:
            return 0.0
        if self.gathers:  # tokens, probabilities and indices are gathered, results reduced and scattered
            return float((self.ranks - 1) * t * (2 * h + k * (self._weight + INTEGER)))
        sizes = 0 if self.config.moe_pad_expert_input_to_capacity else (self.ranks - 1) * self.count * INTEGER
        return self._rows_to_others() * (h + self._weight) + self._rows_back() * h + sizes

    def sent_backward(self) -> float:
        """The same for a backward pass: the gradients of the results go to the experts, those of the rows back."""
        h, t, k = self.config.hidden_size * self.element, self.tokens, self.config.moe_router_topk
        if self.ranks == 1:
            return 0.0
        if self.gathers:
            return float((self.ranks - 1) * t * (2 * h + k * self._weight))
        return self._rows_to_others() * h + self._rows_back() * (h + self._weight)

    def _rows_to_others(self) -> float:
        """Of the rows that this rank sends, every expert's to each of its etp shards, those for other ranks."""
        return self.assignments * (self.ranks - 1) / self.layout.ep

    def _rows_back(self) -> float:
        """Of the rows that this rank's experts multiply, those of other ranks."""
        return self.rows * (self.ranks - 1) / self.ranks

    def products(self) -> float:
        """FLOP of the matrix products of one forward pass of a microbatch."""
        h, per_row = self.config.hidden_size, self.gate + 1
        experts = self.rows * self.ffn * per_row
        return 2.0 * h * (experts + self.all_tokens * self.shared * per_row + self.tokens * self.count)

    def moved(self) -> float:
        """Bytes that the other operations of a forward pass read and write: permutations, activations, and sums."""
        h, t = self.config.hidden_size, self.tokens
        permuted = t * h + self.assignments * h  # read once, written k times; and the reverse
        received = 2 * self.rows * h if self.ranks > 1 and not self.gathers else 0.0
        inside = self.rows * self.ffn * (self.gate + 1) + self.all_tokens * self.shared * (self.gate + 1)
        return (2 * (permuted + received) + inside) * self.element
