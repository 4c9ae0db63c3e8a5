"""Embedding and cross entropy over shards of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import backend_tools, ops
from hal.core.adapters import require_same_signature


class _HalfOfTheVocabulary(hal.SingleRankComm):
    """Rank 1 of 2: adds the other rank's contribution, which a test computes itself."""

    def __init__(self, other: Callable[[Tensor, str], Tensor]) -> None:
        super().__init__()
        self.other, self.size, self.rank = other, 2, 1

    def all_reduce(self, x: Tensor, op: str = "sum", **_: Any) -> Tensor:
        return self.other(x, op)


def test_an_embedding_and_its_gradient_over_shards_are_those_of_the_whole() -> None:
    table, ids, dy = torch.randn(10, 3), torch.tensor([[1, 9], [6, 1]]), torch.randn(2, 2, 3)
    whole, residuals = backend_tools.sharded_embedding(table, ids)
    assert torch.equal(whole, table[ids])
    (expected,) = backend_tools.sharded_embedding_gradient(residuals, dy)
    first, _ = backend_tools.sharded_embedding(table[:5], ids, comm=_HalfOfTheVocabulary(lambda x, op: x))
    assert (first[ids >= 5] == 0.0).all()
    comm = _HalfOfTheVocabulary(lambda x, op: x + first)
    y, residuals = backend_tools.sharded_embedding(table[5:], ids, vocab_start=5, comm=comm)
    assert torch.equal(y, whole)
    assert torch.equal(backend_tools.sharded_embedding_gradient(residuals, dy)[0], expected[5:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_cross_entropy_tells_its_kernels_of_the_whole_vocabulary(ranks: int) -> None:
    calls: list[Any] = []

    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        calls.append(call)
        return torch.ones(4), torch.zeros(2, 4)

    cross_entropy, _ = backend_tools.cross_entropy_from(forward, lambda *call: None)
    require_same_signature(ops.cross_entropy, cross_entropy, "cross_entropy")
    comm = hal.SingleRankComm() if ranks == 1 else _HalfOfTheVocabulary(lambda x, op: x)
    logits = torch.randn(5, 4).t()
    cross_entropy(logits, torch.zeros(4, dtype=torch.int64), label_smoothing=0.1, vocab_start=0, comm=comm)
    ((given, _, smoothing, start, classes, seen_comm),) = calls
    assert given.is_contiguous() and torch.equal(given, logits) and classes == 5 * ranks and start == 0
    assert smoothing == pytest.approx(0.1 * classes / (classes - 1))
    assert seen_comm is (None if ranks == 1 else comm)


@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropys_gradient_goes_over_the_logits_only_if_they_are_given_up(inplace: bool) -> None:
    def backward(logits: Tensor, target: Tensor, stats: Tensor, dloss: Tensor, dlogits: Tensor, *_: Any) -> None:
        assert dloss.is_contiguous()
        dlogits.copy_(dloss[:, None].expand(dlogits.shape))

    cross_entropy, bwd = backend_tools.cross_entropy_from(lambda *call: (torch.ones(4), torch.zeros(2, 4)), backward)
    logits = torch.ones(4, 5)
    _, residuals = cross_entropy(logits, torch.zeros(4, dtype=torch.int64), inplace_backward=inplace)
    version = logits._version
    (dlogits,) = bwd(residuals, torch.full((4, 2), 7.0)[:, 0])
    assert (dlogits == 7.0).all() and (dlogits is logits) == inplace
    assert (logits._version > version) == inplace and (inplace or (logits == 1.0).all())


def test_a_gradient_of_no_rows_runs_no_kernel() -> None:
    def backward(*_: Any) -> None:
        raise AssertionError("a kernel was launched over nothing")

    cross_entropy, bwd = backend_tools.cross_entropy_from(lambda *call: (torch.ones(0), torch.zeros(2, 0)), backward)
    _, residuals = cross_entropy(torch.empty(0, 5), torch.empty(0, dtype=torch.int64))
    assert bwd(residuals, torch.empty(0))[0].shape == (0, 5)
