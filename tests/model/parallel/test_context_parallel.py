"""Context-parallel attention equals attention in one process: values and gradients, windows, dropout, grouped heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hal
from hal import Comm, ops
from hal.comm.threads import run_threads, threads
from hal.model.parallel.context_parallel import Ring, ring_attention, ulysses
from hal.model.parallel.sequence_shard import SequenceShard

S, B, N, G, D = 24, 2, 4, 2, 8
RNG = hal.Rng(3, 1)


@pytest.fixture(autouse=True)
def backend():
    hal.use("cpu_ref")


def tensors(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(S, B, N, D), (S, B, G, D), (S, B, G, D), (S, B, N * D)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def one_process(window: tuple[int | None, int | None], p: float) -> list[Tensor]:
    q, k, v, dout = tensors()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    how = {"dropout_p": p, "rng": RNG} if p else {}
    out = ops.flash_attention(q, k, v, layout="SBND", pre_tokens=window[0], next_tokens=window[1], **how).flatten(2)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def check(size: int, window: tuple[int | None, int | None], p: float, run) -> None:
    wants = one_process(window, p)

    def on_rank(comm: Comm) -> list[Tensor]:
        rows, out, leaves = run(comm)
        dout = rows.take(tensors()[3], 0)
        out.backward(dout)
        for got, want in zip([out.detach(), *(x.grad for x in leaves)], wants):
            torch.testing.assert_close(got, rows.take(want, 0), rtol=2e-5, atol=2e-5)
        return []

    run_threads(size, on_rank, timeout=60)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("window", [(None, 0), (7, 0), (2, -1), (None, None), (5, 3)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_ring(size: int, window: tuple[int | None, int | None], p: float) -> None:
    def run(comm: Comm):
        rows = SequenceShard.zigzag(S, comm.rank, size)
        leaves = [rows.take(x, 0).clone().requires_grad_() for x in tensors()[:3]]
        draw = (lambda a, b: RNG.block((B, N, S, S), (0, 0, a, b))) if p else None
        return rows, ring_attention(*leaves, Ring(comm, window, p, draw)), leaves

    check(size, window, p, run)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [(None, 0), (5, 0)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_ulysses(size: int, window: tuple[int | None, int | None], p: float) -> None:
    """Four ranks share two heads of keys."""

    def run(comm: Comm):
        rows = SequenceShard.all_of(S).part(comm.rank, size)
        leaves = [rows.take(x, 0).clone().requires_grad_() for x in tensors()[:3]]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rng = RNG.block((B, N, S, S), (0, comm.rank * q.shape[2], 0, 0))
            how = {"dropout_p": p, "rng": rng} if p else {}
            out = ops.flash_attention(q, k, v, layout="SBND", pre_tokens=window[0], next_tokens=window[1], **how)
            return out.flatten(2)

        return rows, ulysses(*leaves, comm, attend), leaves

    check(size, window, p, run)


@pytest.mark.parametrize("window", [(None, 0), (7, 0)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_ring_of_pairs_that_exchange_heads(window: tuple[int | None, int | None], p: float) -> None:
    rings, pairs = [threads(2) for _ in range(2)], [threads(2) for _ in range(2)]

    def run(comm: Comm):
        at, inside = divmod(comm.rank, 2)
        rows = SequenceShard.zigzag(S, at, 2).part(inside, 2)
        leaves = [rows.take(x, 0).clone().requires_grad_() for x in tensors()[:3]]
        draw = (lambda a, b: RNG.block((B, N, S, S), (0, inside * N // 2, a, b))) if p else None
        ring = Ring(rings[inside][at], window, p, draw)
        return rows, ulysses(*leaves, pairs[at][inside], lambda q, k, v: ring_attention(q, k, v, ring)), leaves

    check(4, window, p, run)


def test_in_bfloat16_the_ring_is_as_close_as_one_process() -> None:
    q, k, v, dout = (x.bfloat16() for x in tensors())
    exact = one_process((None, 0), 0.0)

    def run(comm: Comm) -> None:
        rows = SequenceShard.zigzag(S, comm.rank, 2)
        leaves = [rows.take(x, 0).clone().requires_grad_() for x in (q, k, v)]
        out = ring_attention(*leaves, Ring(comm, (None, 0)))
        out.backward(rows.take(dout, 0))
        for got, want in zip([out, *(x.grad for x in leaves)], exact):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), rows.take(want, 0), rtol=2e-2, atol=3e-2)

    run_threads(2, run)


def test_each_rank_of_a_causal_ring_does_the_same_work() -> None:
    counts = run_threads(4, lambda comm: [len(list(Ring(comm, (None, 0)).pairs(s, 3))) for s in range(4)])
    assert [sum(c) for c in counts] == [9] * 4
