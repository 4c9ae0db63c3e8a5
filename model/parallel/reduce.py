"""Sums of gradients over data-parallel ranks, in buckets, while the backward pass runs or after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hal import Comm, Pending


def sum_over(comm: Comm, tensors: Sequence[Tensor], op: str = "sum") -> None:
    """Replaces tensors (of one dtype) by their reduction over the ranks, in one message."""
    if tensors and comm.size > 1:
        _scatter(comm.all_reduce(torch.cat([t.reshape(-1) for t in tensors]), op), tensors)


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))


class GradientReducer:
    """Sums the gradients `grads()` over `comm`, bucket by bucket, last parameters first.

    overlap: a bucket is sent as soon as all its parameters have their gradient of the `count`-th microbatch.
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
        self._seen = dict.fromkeys(self._bucket_of, 0)
        self._missing = [len(bucket) for bucket in self.buckets]
        self._pending: dict[int, Pending] = {}
        if overlap:
            # The ranks must send in one order, whatever order their gradients arrive in.
            self._next = 0
            for name, parameter in parameters.items():
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name))

    def _arrived(self, name: str) -> None:
        self._seen[name] += 1
        if self._seen[name] == self.count:
            self._missing[self._bucket_of[name]] -= 1
            while self._next < len(self.buckets) and self._missing[self._next] == 0:
                self._send(self._next)
                self._next += 1

    def _send(self, bucket: int) -> None:
        grads = self.grads()
        flat = torch.cat([grads[n].reshape(-1) for n in self.buckets[bucket] if n in grads])
        self._pending[bucket] = self.comm.start("all_reduce", flat)

    def finish(self) -> None:
        """Sends what has not been sent, waits, and puts the sums in place of the gradients."""
        for bucket in range(len(self.buckets)):
            if bucket not in self._pending:
                self._send(bucket)
        grads = self.grads()
        for bucket, pending in self._pending.items():
            _scatter(pending.wait(), [grads[n] for n in self.buckets[bucket] if n in grads])
        self._pending.clear()
        self._seen = dict.fromkeys(self._bucket_of, 0)
        self._missing, self._next = [len(bucket) for bucket in self.buckets], 0


def _buckets(parameters: Mapping[str, nn.Parameter], size: int) -> list[list[str]]:
    """Names in reverse order (gradients arrive roughly so), grouped up to `size` elements."""
    buckets: list[list[str]] = [[]]
    filled = 0
    for name, parameter in reversed(parameters.items()):
        if buckets[-1] and filled + parameter.numel() > size:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += parameter.numel()
    return buckets
