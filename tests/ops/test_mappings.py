"""Tensor- and sequence-parallel mappings: Megatron's unit values, and gradients against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hal
from hal import Comm, ops
from hal.comm.threads import run_threads, threads
from hal.ops import mappings

WORLD, TP = 8, 4


def tp_groups(size: int) -> list[Comm]:
    """For each of 8 ranks, its tensor-parallel communicator: consecutive ranks, as in Megatron's order."""
    return [comm for start in range(0, WORLD, size) for comm in threads(size, name=f"tp {start}", timeout=20)]


def on_ranks(groups: list[Comm], function) -> list:
    """function(global rank, its group's comm) on 8 threads."""
    return run_threads(WORLD, lambda world: function(world.rank, groups[world.rank]), timeout=20)


def test_copy_sums_gradients_of_tp4_pp2() -> None:
    """Megatron's test_mappings: with TP 4 and PP 2, ranks sum to 6 in the first group and 22 in the second."""

    def run(rank: int, comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.full((2, 3), 5.0, requires_grad=True)
        y = mappings.copy_to_region(x, comm)
        dy = torch.full((2, 3), float(rank))
        y.backward(dy)
        return y.detach(), x.grad, dy

    for rank, (y, dx, dy) in enumerate(on_ranks(tp_groups(TP), run)):
        assert torch.equal(y, torch.full((2, 3), 5.0))
        assert torch.equal(dx, torch.full((2, 3), 6.0 if rank < 4 else 22.0))
        assert torch.equal(dy, torch.full((2, 3), float(rank))), "the incoming gradient was mutated"


def test_reduce_sums_values_of_tp4_pp2() -> None:
    def run(rank: int, comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.full((2,), float(rank), requires_grad=True)
        y = mappings.reduce_from_region(x, comm)
        y.backward(torch.full((2,), 7.0))
        return x.detach(), y.detach(), x.grad

    for rank, (x, y, dx) in enumerate(on_ranks(tp_groups(TP), run)):
        assert x.tolist() == [rank] * 2 and y.tolist() == [6.0 if rank < 4 else 22.0] * 2 and dx.tolist() == [7.0] * 2


def test_gather_of_1d_splits_joins_tp_pairs_only() -> None:
    def run(rank: int, comm: Comm) -> list[float]:
        return mappings.gather_from_region(torch.tensor([2.0 * rank, 2.0 * rank + 1]), comm).tolist()

    for rank, got in enumerate(on_ranks(tp_groups(2), run)):
        first = rank // 2 * 4.0
        assert got == [first, first + 1, first + 2, first + 3]


def test_a_keyed_dict_comes_from_each_tp_groups_source() -> None:
    def run(rank: int, comm: Comm) -> dict[str, Tensor]:
        data = {"tokens": torch.full((2, rank + 2), 2**60 + rank), "eod": torch.tensor(rank), "other": torch.ones(1)}
        mine = data if comm.rank == 0 else None
        return mappings.broadcast_dict(mine, {"tokens": 2, "eod": 0}, comm)

    for rank, got in enumerate(on_ranks(tp_groups(2), run)):
        source = rank // 2 * 2
        assert list(got) == ["tokens", "eod"]
        assert torch.equal(got["tokens"], torch.full((2, source + 2), 2**60 + source)) and int(got["eod"]) == source


def test_broadcast_dict_refuses_other_dtypes() -> None:
    with pytest.raises(hal.ContractError, match="int64 'x'"):
        mappings.broadcast_dict({"x": torch.ones(2)}, {"x": 1}, None)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_and_gather_are_conjugate(dim: int) -> None:
    whole = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(3))

    def run(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = whole.clone().requires_grad_()
        part = mappings.scatter_to_region(x, comm, dim)
        part.backward(part.detach() * 2)
        y = part.detach().clone().requires_grad_()
        again = mappings.gather_from_region(y, comm, dim)
        again.backward(whole * 3)
        return part.detach(), x.grad, again.detach(), y.grad

    for rank, (part, dx, again, dpart) in enumerate(run_threads(4, run)):
        assert torch.equal(part, whole.chunk(4, dim)[rank]) and torch.equal(dx, whole * 2)
        assert torch.equal(again, whole) and torch.equal(dpart, part * 3)


def test_all_to_all_moves_heads_to_sequence_and_back() -> None:
    """Ulysses: [s/4, b, n, d] with all heads becomes [s, b, n/4, d], and the gradient is mapped back."""
    whole = torch.arange(8 * 2 * 4 * 3, dtype=torch.float32).view(8, 2, 4, 3)

    def run(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        x = whole.chunk(4, 0)[comm.rank].clone().requires_grad_()
        y = mappings.all_to_all_in_region(x, comm, split=2, concatenate=0)
        y.backward(y.detach() * 2)
        return x.detach(), y.detach(), x.grad

    for rank, (x, y, dx) in enumerate(run_threads(4, run)):
        assert torch.equal(y, whole.chunk(4, 2)[rank]) and torch.equal(dx, x * 2)


def _mlp(x: Tensor, a: Tensor, b: Tensor, comm: Comm | None, sequence: bool) -> Tensor:
    enter = mappings.all_gather_to_region if sequence else mappings.copy_to_region
    leave = mappings.reduce_scatter_from_region if sequence else mappings.reduce_from_region
    return leave(torch.tanh(enter(x, comm) @ a) @ b, comm)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_column_row_pair_equals_one_process(sequence: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, a, b, dy = (torch.randn(n, dtype=torch.float64, generator=generator) for n in ((8, 6), (6, 12), (12, 6), (8, 6)))
    one = [t.clone().requires_grad_() for t in (x, a, b)]
    y = _mlp(*one, None, sequence)
    y.backward(dy)

    def part(t: Tensor, comm: Comm) -> Tensor:
        return t.chunk(comm.size)[comm.rank] if sequence else t

    def run(comm: Comm) -> list[Tensor]:
        mine = [part(x, comm), a.chunk(4, 1)[comm.rank], b.chunk(4, 0)[comm.rank]]
        leaves = [t.clone().requires_grad_() for t in mine]
        out = _mlp(*leaves, comm, sequence)
        out.backward(part(dy, comm))
        return [out.detach(), *(t.grad for t in leaves)]

    for comm, (out, dx, da, db) in zip(threads(4), run_threads(4, run)):
        torch.testing.assert_close(out, part(y.detach(), comm))
        torch.testing.assert_close(dx, part(one[0].grad, comm))
        torch.testing.assert_close(da, one[1].grad.chunk(4, 1)[comm.rank])
        torch.testing.assert_close(db, one[2].grad.chunk(4, 0)[comm.rank])


def test_what_the_ranks_cannot_divide_is_refused() -> None:
    def run(comm: Comm) -> None:
        with pytest.raises(hal.ContractError, match="3 ranks cannot divide"):
            mappings.scatter_to_region(torch.ones(3, 4), comm)
        with pytest.raises(hal.ContractError, match="dimension 5"):
            mappings.gather_from_region(torch.ones(3), comm, 5)

    run_threads(3, run)


def test_without_a_group_every_region_is_the_identity() -> None:
    x = torch.ones(3, requires_grad=True)
    for f in (mappings.copy_to_region, mappings.reduce_from_region, mappings.scatter_to_region):
        assert f(x, None) is x and f(x, hal.SingleRankComm()) is x


def test_vocabulary_shards_equal_the_whole_vocabulary() -> None:
    """Megatron's sizes: batch 13, length 17, 11 ids per rank, logits scaled by 1000."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(13, 17, 44, generator=generator) * 1000
    target = torch.randint(0, 44, (13, 17), generator=generator)
    table = torch.randn(48, 16, generator=generator)
    ids = torch.randint(0, 48, (17, 23), generator=generator)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")

    def run(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        local = logits.chunk(4, -1)[comm.rank].clone().requires_grad_()
        loss = ops.cross_entropy.reference(local, target, vocab_start=11 * comm.rank, comm=comm)
        loss.sum().backward()
        rows = ops.embedding.reference(table.chunk(4)[comm.rank], ids, vocab_start=12 * comm.rank, comm=comm)
        return loss.detach(), local.grad, rows

    whole = logits.clone().requires_grad_()
    torch.nn.functional.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="sum").backward()
    for rank, (loss, grad, rows) in enumerate(run_threads(4, run)):
        torch.testing.assert_close(loss.flatten(), want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, whole.grad.chunk(4, -1)[rank], rtol=1e-5, atol=1e-6)
        assert torch.equal(rows, torch.nn.functional.embedding(ids, table))
