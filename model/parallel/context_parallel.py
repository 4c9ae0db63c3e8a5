"""Attention over a sequence that is split over context-parallel ranks, by Ulysses or in a ring.

Ulysses exchanges sequence shards for head shards; a ring passes keys and values from rank to rank. Both give the
results of a single process, including windows, dropout, grouped heads and rows without visible keys. The layout is
SBND; q, k and v are the rank's rows (`Parallel.context_rows`). Shape letters as in attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal import Comm, Message, Rng, ops

from .document_mask import Documents

mappings = ops.mappings


def ulysses(q: Tensor, k: Tensor, v: Tensor, comm: Comm, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """DeepSpeed-Ulysses (arXiv 2309.14509): all-to-all exchanges give each rank all rows of a share of the heads.

    attend: (q, k, v) [s, b, n/ranks, d] -> [s, b, n/ranks * d] over full sequences. Returns [s/ranks, b, n*d]. The
    heads of v, and so those of the result, may have another size than those of q and k. Heads of keys and values that
    several ranks need are copied (Config.key_copies).
    """
    copies = comm.size // math.gcd(comm.size, k.shape[2])
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    q, k, v = (mappings.all_to_all_in_region(x, comm, split=2, concatenate=0) for x in (q, k, v))
    s, b, n, _ = q.shape
    out = attend(q, k, v).view(s, b, n, v.shape[-1])
    return mappings.all_to_all_in_region(out, comm, split=0, concatenate=2).flatten(2)


@dataclass(frozen=True)
class Ring:
    """The parameters of a ring attention besides q, k and v.

    window: (pre_tokens, next_tokens) over the full sequence. draw(q_start, k_start) gives the dropout stream of a block
    of probabilities; p is its probability. documents: of full sequences, between which there is no attention. scale:
    of the scores; default 1/sqrt(head size).
    """

    comm: Comm
    window: tuple[int | None, int | None]
    p: float = 0.0
    draw: Callable[[int, int], Rng] | None = None
    documents: Documents | None = None
    scale: float | None = None

    def chunks(self, rank: int) -> tuple[int, int]:
        """Numbers of the two chunks of the sequence that `rank` holds (see SequenceShard.zigzag)."""
        return rank, 2 * self.comm.size - 1 - rank

    def pairs(self, source: int, c: int) -> Iterator[tuple[slice, slice, int, int, dict[str, Any]]]:
        """(rows of q, rows of k, first position of each, arguments) of every pair of chunks that is not entirely
        masked, for this rank's queries and the keys of rank `source`; c is the length of a chunk."""
        pre, next_ = self.window
        for i, a in enumerate(self.chunks(self.comm.rank)):
            for j, b in enumerate(self.chunks(source)):
                distance = (a - b) * c  # from key row 0 to query row 0
                # The window's edges are diagonals, so the corners of the block decide. There, (query - key) ranges from
                # distance - (c - 1) to distance + (c - 1).
                if (next_ is not None and distance + c - 1 + next_ < 0) or (pre is not None and distance - c + 1 > pre):
                    continue
                # An edge outside the block has no effect on it.
                window: dict[str, Any] = {
                    "scale": self.scale,
                    "pre_tokens": None if pre is None or distance + c - 1 <= pre else pre - distance,
                    "next_tokens": None if next_ is None or distance - c + 1 + next_ >= 0 else next_ + distance,
                }
                if self.documents is not None:  # a mask of this block only, never one of full sequences
                    window["mask"] = self.documents.mask(slice(a * c, a * c + c), slice(b * c, b * c + c))
                yield slice(i * c, i * c + c), slice(j * c, j * c + c), a * c, b * c, window

    def dropout(self, q_start: int, k_start: int) -> dict[str, Any]:
        """The dropout arguments of a block of probabilities."""
        return {} if self.draw is None else {"dropout_p": self.p, "rng": self.draw(q_start, k_start)}

    def ring_step(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts sending `tensors` to the next rank; the returned function waits for those of the previous rank."""
        to, source = (self.comm.rank + 1) % self.comm.size, (self.comm.rank - 1) % self.comm.size
        return self.comm.exchange_start([Message(to, t) for t in tensors], [Message(source, t) for t in tensors])


def _attend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """q [c, b, n, d], k [c, b, g, d], v [c, b, g, e] of two chunks -> (out [c, b, n, e], log-sum-exp [b, n, c])."""
    out, lse = ops.flash_attention(q, k, v, layout="SBND", return_lse=True, **how)
    return out, lse


class _RingAttention(torch.autograd.Function):
    """Ring attention (Liu et al., arXiv 2310.01889): keys and values are sent round the ring, and partial results are
    merged by their log-sum-exp. The backward pass recomputes each block; see `_block_gradients`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        """q [2c, b, n, d], k [2c, b, g, d], v [2c, b, g, e] -> [2c, b, n, e]."""
        c, size, rank = q.shape[0] // 2, ring.comm.size, ring.comm.rank
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32, device=q.device)
        lse = torch.full((*q.shape[1:3], 2 * c), -math.inf, dtype=torch.float32, device=q.device)
        kv = [k.contiguous(), v.contiguous()]
        for step in range(size):
            # The transfer of the next step's keys and values overlaps with the computation of this step.
            arriving = ring.ring_step(kv) if step + 1 < size else None
            for at_q, at_k, q_start, k_start, window in ring.pairs((rank - step) % size, c):
                part = _attend(q[at_q], kv[0][at_k], kv[1][at_k], **window, **ring.dropout(q_start, k_start))
                out[at_q], lse[..., at_q] = ops.merge_attention(out[at_q], lse[..., at_q], *part)
            if arriving is not None:
                kv = arriving()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """dq, dk and dv from dout [2c, b, n, e]."""
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        c, size, rank = q.shape[0] // 2, ring.comm.size, ring.comm.rank
        dq = torch.zeros_like(q, dtype=torch.float32)
        kv = [k.contiguous(), v.contiguous()]
        dkv = [torch.zeros_like(x, dtype=torch.float32) for x in kv]
        for step in range(size):
            arriving = ring.ring_step(kv) if step + 1 < size else None
            for at_q, at_k, q_start, k_start, window in ring.pairs((rank - step) % size, c):
                block = (q[at_q], kv[0][at_k], kv[1][at_k])
                rest = (out[at_q], lse[..., at_q], dout[at_q])
                grads = _block_gradients(block, rest, window, ring.dropout(q_start, k_start))
                for total, at, grad in zip((dq, *dkv), (at_q, at_k, at_k), grads):
                    total[at] += grad
            # The gradients travel with their keys. One more transfer after the last step returns them to their rank.
            dkv = ring.ring_step(dkv)()
            if arriving is not None:
                kv = arriving()
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None


def _share(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total) [c, b, n, 1] of log-sum-exps [b, n, c]; 0 for rows without visible keys."""
    share = torch.where(total == -math.inf, torch.zeros_like(total), torch.exp(part - total))
    return share.permute(2, 0, 1)[..., None]


def _block_gradients(
    block: tuple[Tensor, Tensor, Tensor],
    rest: tuple[Tensor, Tensor, Tensor],
    window: dict[str, Any],
    dropout: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of one block of keys, given the full row's output, log-sum-exp and output gradient.

    block: q [c, b, n, d], k [c, b, g, d] and v [c, b, g, e]. rest: out and dout [c, b, n, e], log-sum-exp [b, n, c].

    Let w be the block's share of the row, P the softmax within the block and O_b its output. Then dv is the value
    gradient of the block for the output gradient w dO. The gradient of the scores is wP (dP - rowsum(dO O)), but the
    backward pass of the block alone gives wP (dP - rowsum(dO O_b)). The difference is P times
    g = w rowsum(dO (O_b - O)), one number per row. It adds scale * g * (P k) to dq, where P k is attention with the
    keys as values, and scale * P^T (g q) to dk, which is the value gradient of that attention.
    """
    out, lse, dout = rest
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in block)
        part, part_lse = _attend(q, k, v, **window, **dropout)
        w = _share(part_lse, lse)
        dq, dk, dv = torch.autograd.grad(part, (q, k, v), (w * dout).to(part.dtype))
        g = w * (dout.float() * (part.detach().float() - out.float())).sum(-1, keepdim=True)
        values = block[1].detach().requires_grad_()
        keys_seen, _ = _attend(block[0].detach(), block[1].detach(), values, **window)
        scale = window["scale"] or 1.0 / math.sqrt(q.shape[-1])
        (dk_rest,) = torch.autograd.grad(keys_seen, values, (scale * g * block[0]).to(q.dtype))
    return dq + scale * g * keys_seen.detach(), dk + dk_rest, dv


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """q [2c, b, n, d], k [2c, b, g, d], v [2c, b, g, e]: the rank's two chunks -> [2c, b, n*e]."""
    out: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return out.flatten(2)
