"""Sums the gradients of replicated parameters over ranks.

Gradients of replicas are summed in buckets, during the backward pass or after it; fully_shard sums its own gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hal import Comm, Work
from hal.mesh import Mesh

from ..config.parallel_layout import ParallelLayout
from ..config.schema import Config
from ..gpt.model import GPT, OUTPUT_LAYER, WORD_EMBEDDING
from .optimizer import Optimizer


def sum_over(comm: Comm, tensors: Sequence[Tensor], op: str = "sum") -> None:
    """Replaces tensors (of one dtype) by their reduction over the ranks, in one message."""
    if tensors and comm.size > 1:
        _scatter(comm.all_reduce(torch.cat([t.reshape(-1) for t in tensors]), op), tensors)


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies flat [n], which has all elements of the tensors one after another, into them."""
    parts: tuple[Tensor, ...] = flat.split([t.numel() for t in tensors])  # type: ignore[no-untyped-call]
    for tensor, part in zip(tensors, parts):
        tensor.copy_(part.view_as(tensor))


class GradientReducer:
    """Sums the gradients `grads()` over `comm`, bucket by bucket, starting with the last parameters.

    overlap: a bucket is sent as soon as all its parameters have their gradient of the `count`-th microbatch, which may
    change between steps.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Mapping[str, nn.Parameter],
        grads: Callable[[], Mapping[str, Tensor]],
        *,
        bucket_size: int,
        overlap: bool,
        count: int,
    ) -> None:
        self.comm, self.grads, self.count = comm, grads, count
        self.buckets = _buckets(parameters, bucket_size)
        self._bucket_of = {name: i for i, bucket in enumerate(self.buckets) for name in bucket}
        self._arrivals = dict.fromkeys(self._bucket_of, 0)
        self._missing = [len(bucket) for bucket in self.buckets]
        self._next = 0
        self._pending: dict[int, Work] = {}
        if overlap:
            for name, parameter in parameters.items():
                hook = functools.partial(self._arrived, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """Called by autograd when `parameter` (any shape) has its gradient of a microbatch."""
        self._arrivals[name] += 1
        if self._arrivals[name] == self.count:
            self._missing[self._bucket_of[name]] -= 1
            # All ranks must issue the same collectives in the same order, even if their gradients arrive in different
            # orders.
            while self._next < len(self.buckets) and self._missing[self._next] == 0:
                self._send(self._next)
                self._next += 1

    def _send(self, bucket: int) -> None:
        grads = self.grads()
        flat = torch.cat([grads[n].reshape(-1) for n in self.buckets[bucket] if n in grads])
        self._pending[bucket] = self.comm.start("all_reduce", flat)

    def finish(self) -> None:
        """Sends the remaining buckets, waits for all of them, and replaces the gradients by the sums."""
        for bucket in range(len(self.buckets)):
            if bucket not in self._pending:
                self._send(bucket)
        grads = self.grads()
        for bucket, pending in self._pending.items():
            _scatter(pending.wait(), [grads[n] for n in self.buckets[bucket] if n in grads])
        self._pending.clear()
        self._arrivals = dict.fromkeys(self._bucket_of, 0)
        self._missing, self._next = [len(bucket) for bucket in self.buckets], 0


def _buckets(parameters: Mapping[str, nn.Parameter], size: int) -> list[list[str]]:
    """Names in reverse order (gradients arrive roughly so), grouped up to `size` elements."""
    buckets: list[list[str]] = [[]]
    filled = 0
    for name, parameter in reversed(list(parameters.items())):
        if buckets[-1] and filled + parameter.numel() > size:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += parameter.numel()
    return buckets


class GradientSums:
    """Sums gradients after a step's last backward pass: those of replicas, of parameters that are replicated over
    sequence-parallel ranks, and of the two copies of a tied weight.

    All ranks must construct it together, because the constructor creates communicators.
    """

    def __init__(
        self, config: Config, layout: ParallelLayout, mesh: Mesh, models: Sequence[GPT], optimizer: Optimizer
    ) -> None:
        self.optimizer, self.tp = optimizer, mesh.comm("tp")
        held_alike = [n for m in models for n, _ in m.named_parameters() if n not in m.shards]
        # For parameters replicated over tensor-parallel ranks, each rank has only the gradient of its sequence rows.
        # Norms of heads are replicated, and each rank has the gradient of its heads. (The norms of latent attention
        # come before the heads, so that every rank has their complete gradient.)
        norms = [n for n in held_alike if any(f".{kind}." in n for kind in ("q_layernorm", "k_layernorm", "out_norm"))]
        of_heads = [] if config.multi_latent_attention else norms
        self._partial = held_alike if config.sequence_parallel else of_heads
        self._tied = models[0].tied and layout.stages > 1
        self._tied_ends = self._make_tied_ends(layout, mesh) if self._tied else None
        # The weights of experts have fewer replicas than others, since different ranks hold different experts.
        experts = {n for m in models for n, shard in m.shards.items() if shard.experts}
        others = {n: p for n, p in optimizer.model.items() if n not in experts}
        of_experts = {n: p for n, p in optimizer.model.items() if n in experts}
        groups = [(mesh.comm("dp", "cp"), others)]
        if config.num_experts is not None:
            groups.append((mesh.comm("edp"), of_experts))
        self._reducers = [
            GradientReducer(
                replicas,
                parameters,
                optimizer.grads,
                bucket_size=config.ddp_bucket_size,
                overlap=config.overlap_grad_reduce,
                count=layout.microbatches,
            )
            for replicas, parameters in groups
            if parameters and replicas.size > 1 and not layout.zero
        ]

    @staticmethod
    def _make_tied_ends(layout: ParallelLayout, mesh: Mesh) -> Comm | None:
        """The communicator of the two ranks with copies of a tied weight, if there are two and this is one of them."""
        ends = {layout.rank_of(0), layout.rank_of(layout.stages - 1)}
        if len(ends) == 1 or mesh.at["pp"] not in ends:
            return None
        return mesh.comm_of(tuple(sorted(mesh.layout.rank(**{**mesh.at, "pp": pp}) for pp in ends)))

    def expect(self, microbatches: int) -> None:
        """Sets the number of microbatches of the next step."""
        for reducer in self._reducers:
            reducer.count = microbatches

    def finish(self) -> None:
        """Replaces the gradients by the sums. All ranks call it after the last microbatch's backward pass."""
        for reducer in self._reducers:
            reducer.finish()
        if not (self._partial or self._tied):
            return
        grads = self.optimizer.grads()
        sum_over(self.tp, [grads[n] for n in self._partial if n in grads])
        if self._tied:
            copies = [grads[n] for n in (WORD_EMBEDDING, OUTPUT_LAYER) if n in grads]
            if self._tied_ends is not None:
                sum_over(self._tied_ends, copies)
            elif len(copies) == 2:  # one rank holds both ends of the pipeline
                copies[0] += copies[1]
                copies[1].copy_(copies[0])
