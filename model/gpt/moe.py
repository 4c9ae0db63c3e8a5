"""A mixture of experts in place of a layer's MLP (--num-experts): router, auxiliary losses, experts and their dispatch.

The semantics are megatron-core 0.16.1's (megatron/core/transformer/moe), except that capacities and auxiliary losses
count a micro-batch across the ranks that share it, so that every layout of the ranks gives the same numbers.
Shapes: t tokens of this rank, h channels, e experts in the model and l on this rank, k experts per token, n rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hal import ops
from hal.nn.float8_products import EXACT, ExactProducts

from ..config.experts import coefficients
from ..config.schema import Config
from ..parallel.expert_exchange import Exchange, Route, start_exchange
from ..parallel.sharded_products import linear
from ..parallel.tensor_sharding import Shard
from .attention import output_std
from .layers import Init
from .mlp import MLP

mappings = ops.mappings

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
"""The losses that a router adds to the loss, in the order of `Router.sums`."""


class MoE(nn.Module):
    """hidden [s, b, h] -> [s, b, h]: each token's experts, weighted by the router, plus the shared expert if there is
    one."""

    bias: None = None

    def __init__(self, config: Config, init: Init, name: str, layer: int) -> None:
        super().__init__()
        self.layer, self.router = layer, Router(config, init, f"{name}.router")
        self.experts = Experts(config, init, f"{name}.experts")
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(config, init, f"{name}.shared_experts", shared) if shared else None
        self.shared_expert_gate: nn.Parameter | None = None
        if shared and config.moe_shared_expert_gate:
            shape = 1, config.hidden_size
            self.shared_expert_gate = init.weight(f"{name}.shared_expert_gate", shape, config.init_method_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        probs, indices, capacity = self.router(tokens, x.shape[1])
        shared: list[Tensor] = []

        def meanwhile() -> None:
            if self.shared_experts is not None:
                y, gate = self.shared_experts(x), self.shared_expert_gate
                shared.append(y if gate is None else y * torch.sigmoid(linear(x, gate)))

        y: Tensor = self.experts(tokens, probs, indices, capacity, meanwhile).view(x.shape)
        return y + shared[0] if shared else y


class Router(nn.Module):
    """Chooses k experts for each token; adds the auxiliary losses; sums the statistics from which they and the
    log are computed.

    loss_scale: the factor of the gradient of an auxiliary loss, set for each step: the scale of the main loss,
    divided by the number of microbatches of the global batch. The losses change the gradients only, so that the
    reported loss is that of the model without experts.
    sums: of this rank's microbatches since `start_step`, counted in the backward pass, which unlike the forward pass
    runs once even if activations are recomputed: [assignments [e], scores [e], LOSSES [4], microbatches]. float32.
    """

    expert_bias: Tensor | None

    def __init__(self, config: Config, init: Init, name: str) -> None:
        super().__init__()
        self.config, self.parallel, self.size = config, init.parallel, config.expert_count
        self.weight = init.weight(f"{name}.weight", (self.size, config.hidden_size), config.init_method_std)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": init.device}
        bias = torch.zeros(self.size, **floats) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.k, self.score_function = config.moe_router_topk, config.moe_router_score_function
        self.sinkhorn = "sinkhorn" in config.moe_router_load_balancing_type
        self.coefficients = coefficients(config)
        self.loss_scale = 1.0
        self.sums = torch.zeros(2 * self.size + len(LOSSES) + 1, **floats)
        self._earlier = torch.zeros(self.size + 1, **floats)  # assignments and microbatches of the step, on all ranks
        self._orders: dict[int, tuple[Tensor, Tensor]] = {}

    def start_step(self, loss_scale: float) -> None:
        """Resets the sums. Called before the first microbatch of each step."""
        self.loss_scale = loss_scale
        self.sums.zero_()
        self._earlier.zero_()

    def forward(self, x: Tensor, sequences: int) -> tuple[Tensor, Tensor, int | None]:
        """(probabilities [t, k], experts [t, k] int64, capacity) of tokens x [t, h], which are [s, sequences] in order;
        -1 in place of dropped experts. The capacity is given if every expert gets that number of rows."""
        dtype = _DTYPES.get(self.config.moe_router_dtype or "", x.dtype)
        logits = linear(x, self.weight) if dtype == x.dtype else ops.linear(x.to(dtype), self.weight.to(dtype))
        probs, indices = self._choose(logits)
        capacity, kept = None, indices
        if self.config.moe_expert_capacity_factor is not None:
            tokens = len(x) * self.parallel.microbatch.size
            capacity = math.ceil(tokens * self.k / self.size * self.config.moe_expert_capacity_factor)
            kept = self._drop(probs, indices, capacity, sequences)
        if torch.is_grad_enabled():
            probs = self._add_losses(probs, logits, indices, kept, sequences)
        # The experts multiply in float32 at least; float64 is for the choice only.
        probs = probs.float() if probs.dtype == torch.float64 else probs
        return probs, kept, capacity if self.config.moe_pad_expert_input_to_capacity else None

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The router's probabilities and experts, both [t, k], for logits [t, e]."""
        c, k = self.config, self.k
        if self.sinkhorn:
            # Outside of training Sinkhorn's algorithm is not used, since it depends on all tokens of the batch.
            function, pre = ("sigmoid", False) if k == 1 else ("softmax", True)
            if not torch.is_grad_enabled():
                return ops.moe_router(logits, k, score_function=function, pre_softmax=pre)
            comm = self.parallel.microbatch
            _, indices = ops.moe_router(comm.all_gather(logits.detach()), k, score_function="sinkhorn")
            mine = indices.chunk(comm.size)[comm.rank].contiguous()
            return ops.moe_router(logits, k, score_function=function, pre_softmax=pre, indices=mine)
        return ops.moe_router(
            logits,
            k,
            score_function=self.score_function,
            pre_softmax=c.moe_router_pre_softmax and self.score_function == "softmax",
            num_groups=None if c.moe_router_group_topk is None else c.moe_router_num_groups,
            group_topk=c.moe_router_group_topk,
            scaling_factor=c.moe_router_topk_scaling_factor or 1.0,
            expert_bias=self.expert_bias,
        )

    def _drop(self, probs: Tensor, indices: Tensor, capacity: int, sequences: int) -> Tensor:
        """indices [t, k] with -1 where an expert has more than `capacity` tokens of the micro-batch."""
        e, policy, comm = self.size, self.config.moe_token_drop_policy, self.parallel.microbatch
        probs = probs.detach().float()
        if comm.size == 1:
            return ops.moe_drop(probs, indices, e, capacity, policy=policy)
        # Of equal tokens the first are kept, so the order of the ranks' tokens must be that of a single process.
        order, own = self._order(len(probs) // sequences)
        shape = (-1, sequences, self.k)
        probs, indices = (comm.all_gather(x.view(shape))[order].view(-1, self.k) for x in (probs, indices))
        return ops.moe_drop(probs, indices, e, capacity, policy=policy).view(shape)[own].view(-1, self.k)

    def _order(self, rows: int) -> tuple[Tensor, Tensor]:
        """(the order of the positions of all ranks of a micro-batch, the positions of this rank's `rows`)."""
        if rows not in self._orders:
            own = self.parallel.hidden_rows(self.parallel.full_length(rows)).positions(self.weight.device)
            self._orders[rows] = self.parallel.microbatch.all_gather(own).argsort(), own
        return self._orders[rows]

    def _add_losses(self, probs: Tensor, logits: Tensor, chosen: Tensor, kept: Tensor, sequences: int) -> Tensor:
        """probs [t, k], whose gradient will include that of the auxiliary losses of the logits [t, e].

        chosen: the experts [t, k]; kept: those that were not dropped.
        """
        c, e, k = self.coefficients, self.size, self.k
        if c and (self.expert_bias is not None or self.config.moe_router_num_groups):
            # As in megatron-core, auxiliary losses count the k largest scores, whatever the router makes of them.
            _, chosen = ops.moe_router(logits.detach(), k, score_function=self.score_function)
        scores, counts, z = ops.moe_balance_sums(
            logits, chosen, score_function=self.score_function, sequences=sequences
        )
        comm = self.parallel.microbatch
        tokens = len(logits) * comm.size
        losses = dict.fromkeys(LOSSES, scores.new_zeros(()))
        if c:
            # Products of this rank's scores and all ranks' counts: the sum over the ranks is the loss.
            together = comm.all_reduce(counts).to(scores.dtype)
            total = together.sum(0)
            if "aux_loss" in c:
                losses["aux_loss"] = c["aux_loss"] * e / (k * tokens**2) * (scores.sum(0) * total).sum()
            if "seq_aux_loss" in c:
                length = tokens // sequences
                losses["seq_aux_loss"] = c["seq_aux_loss"] * e / (k * length**2) * (scores * together).sum() / sequences
            if "global_aux_loss" in c:
                replicas = self.parallel.replicas
                self._earlier[:e] += replicas.all_reduce(total)
                self._earlier[e] += 1
                share = self._earlier[:e] / (self._earlier[e] * tokens * replicas.size)
                losses["global_aux_loss"] = c["global_aux_loss"] * e / (k * tokens) * (scores.sum(0) * share).sum()
        if self.config.moe_z_loss_coeff is not None:
            losses["z_loss"] = self.config.moe_z_loss_coeff / tokens * z.sum()
        parts = torch.stack(list(losses.values()))
        assigned = (kept[..., None] == torch.arange(e, device=kept.device)).sum((0, 1))
        one = parts.new_ones(1)
        counted = torch.cat([assigned, scores.detach().sum(0), parts.detach(), one / comm.size]).float()
        y: Tensor = _AddLoss.apply(probs, parts.sum(), self, counted)  # type: ignore[no-untyped-call]
        return y


class _AddLoss(torch.autograd.Function):
    """probs, unchanged. The backward pass adds the gradient of router.loss_scale * loss, and counts the microbatch."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, loss: Tensor, router: Router, counted: Tensor) -> Tensor:
        ctx.router, ctx.counted, ctx.loss = router, counted, loss.new_full((), router.loss_scale)
        return probs.view_as(probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.router.sums += ctx.counted
        return dprobs, ctx.loss, None, None


class GroupedLinear(nn.Module):
    """The weights [l, out, in] of this rank's experts in one of their linear layers."""

    products: ExactProducts = EXACT

    def __init__(self, init: Init, name: str, shape: tuple[int, int, int], std: float, shard: Shard) -> None:
        super().__init__()
        ep, etp = init.parallel.ep, init.parallel.etp
        self.parallel, self.shard = init.parallel, shard
        count = shape[0] // ep.size
        # Each expert is drawn on its own, so that a rank draws no more than its own experts.
        drawn = [
            shard.of_expert().slice(init.draw(f"{name}.weight{n}", shape[1:], std), etp.rank, etp.size)
            for n in range(ep.rank * count, (ep.rank + 1) * count)
        ]
        self.weight = nn.Parameter(torch.stack(drawn).to(device=init.device, dtype=init.dtype))
        init.shards[f"{name}.weight"] = shard

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x [n, in] in groups of `sizes` [l] -> [n, out]. The weight's gradient is added to its `main_grad`, if any."""
        main_grad: Tensor | None = getattr(self.weight, "main_grad", None)
        if self.products is not EXACT:
            return self._one_by_one(x, sizes, main_grad)
        if main_grad is None:
            return ops.grouped_linear(x, self.weight, sizes)
        y: Tensor = _AccumulatingGroupedLinear.apply(x, self.weight, sizes, main_grad)  # type: ignore[no-untyped-call]
        return y

    def _one_by_one(self, x: Tensor, sizes: Tensor, main_grad: Tensor | None) -> Tensor:
        """The same by a product per expert, since there is no grouped one in float8. Reads `sizes` on the host."""
        weights = self.weight.unbind()
        counts: list[int] = sizes.tolist()
        *groups, rest = torch.split_with_sizes(x, [*counts, len(x) - sum(counts)])
        results = []
        for n, rows in enumerate(groups):
            weights[n].main_grad = None if main_grad is None else main_grad[n]  # type: ignore[attr-defined]
            results.append(linear(rows, weights[n], products=self.products))
        return torch.cat(
            [*results, (rest[:, :1] * 0.0).expand(-1, self.weight.shape[1])]
        )  # rest: rows without an expert


class _AccumulatingGroupedLinear(torch.autograd.Function):
    """ops.grouped_linear whose backward pass adds the weight's gradient to `main_grad` instead of returning it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, sizes)
        ctx.main_grad = main_grad
        return ops.grouped_linear(x, weight, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        dx = ops.grouped_linear(dy, weight.transpose(1, 2), sizes)
        ops.grouped_linear_wgrad(x, dy, sizes, ctx.main_grad)
        return dx, None, None, None


class Experts(nn.Module):
    """This rank's experts, which the tokens of all ranks of `Parallel.experts` reach by a dispatcher."""

    def __init__(self, config: Config, init: Init, name: str) -> None:
        super().__init__()
        self.parallel, e = init.parallel, config.expert_count
        self.size, self.local = e, e // init.parallel.ep.size
        h, ffn = config.hidden_size, config.moe_ffn_hidden_size
        parts = 2 if config.swiglu or config.geglu else 1
        first, second = Shard(1, parts, experts=True), Shard(2, experts=True)
        self.linear_fc1 = GroupedLinear(init, f"{name}.linear_fc1", (e, parts * ffn, h), config.init_method_std, first)
        self.linear_fc2 = GroupedLinear(init, f"{name}.linear_fc2", (e, h, ffn), output_std(config), second)
        self.config = config
        self.dispatch = self._all_gather if config.moe_token_dispatcher_type == "allgather" else self._all_to_all
        if init.parallel.experts.size == 1:
            self.dispatch = self._local

    def forward(
        self, x: Tensor, probs: Tensor, indices: Tensor, capacity: int | None, meanwhile: Callable[[], None]
    ) -> Tensor:
        """The weighted sum of each token's experts, [t, h].

        capacity: rows of every expert, or None. meanwhile: called while the exchange of tokens is in progress.
        """
        return self.dispatch(x, probs, indices, capacity, meanwhile)

    def _mlp(self, rows: Tensor, probs: Tensor, sizes: Tensor) -> Tensor:
        """The experts of rows [n, h], which are grouped by expert, times their probabilities [n]."""
        c, y = self.config, self.linear_fc1(rows, sizes)
        if c.swiglu:
            y = ops.grouped_swiglu(y, probs)
        else:
            if c.squared_relu:
                y = torch.relu(y).square()
            else:
                y = (ops.geglu if c.geglu else ops.bias_gelu)(y, None, c.gelu_approximate)
            y = (y * probs[:, None]).to(rows.dtype)
        out: Tensor = self.linear_fc2(y, sizes)
        return out

    def _local(
        self, x: Tensor, probs: Tensor, indices: Tensor, capacity: int | None, meanwhile: Callable[[], None]
    ) -> Tensor:
        """All experts are on this rank."""
        meanwhile()
        rows, row_map, sizes, weights = ops.permute(x, indices, self.size, probs=probs, capacity=capacity)
        return ops.unpermute(self._mlp(rows, weights, sizes), row_map)

    def _all_gather(
        self, x: Tensor, probs: Tensor, indices: Tensor, capacity: int | None, meanwhile: Callable[[], None]
    ) -> Tensor:
        """Every rank gets all tokens and computes those of its experts; nothing waits for the device."""
        meanwhile()
        comm = self.parallel.experts
        x, probs = (mappings.all_gather_to_region(y, comm) for y in (x, probs))
        local = comm.all_gather(indices) - self.parallel.ep.rank * self.local
        local = torch.where((local < 0) | (local >= self.local), -1, local)
        rows, row_map, sizes, weights = ops.permute(x, local, self.local, probs=probs)
        return mappings.reduce_scatter_from_region(ops.unpermute(self._mlp(rows, weights, sizes), row_map), comm)

    def _all_to_all(
        self, x: Tensor, probs: Tensor, indices: Tensor, capacity: int | None, meanwhile: Callable[[], None]
    ) -> Tensor:
        """One all-to-all sends every token to the ranks of its experts, a second one returns the results. In the
        backward pass `meanwhile` is computed during the second all-to-all's."""
        rows, row_map, sizes, weights = ops.permute(x, indices, self.size, probs=probs, capacity=capacity)
        comm, ep, etp, length = self.parallel.experts, self.parallel.ep, self.parallel.etp, len(rows)
        if capacity is None:
            # The only synchronisation with the device: the lengths of the messages are needed on the host.
            of_ranks = comm.all_gather(sizes[None]).cpu()
        else:
            of_ranks = torch.full((comm.size, self.size), capacity)
        received = of_ranks[:, ep.rank * self.local : (ep.rank + 1) * self.local]
        sent = of_ranks[comm.rank].view(ep.size, self.local).sum(1).tolist()
        route = Route(comm, etp.size, sent, received.sum(1).tolist())
        spread = [start_exchange(rows, Exchange(route)), start_exchange(weights, Exchange(route))]
        meanwhile()
        rows, weights = (finish() for finish in spread)
        # Received rows are ordered by rank, then by expert; a second permutation orders them by expert.
        expert = torch.arange(self.local).repeat(comm.size).repeat_interleave(received.flatten()).to(x.device)
        rows, back, sizes, weights = ops.permute(rows, expert[:, None], self.local, probs=weights[:, None])
        y = ops.unpermute(self._mlp(rows, weights, sizes), back)
        return ops.unpermute(start_exchange(y, Exchange(route, length))(), row_map)


def routers(model: nn.Module) -> dict[int, Router]:
    """The routers of a model, by the number of the layer."""
    return {m.layer: m.router for m in model.modules() if isinstance(m, MoE)}
