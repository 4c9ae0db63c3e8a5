"""Attention calls described for kernels: sizes, strides, windows, packed sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import Rng, backend_tools, ops

Q, K = torch.empty(2, 5, 4, 8), torch.empty(2, 9, 2, 8)  # BSND


def spec(layout: str, q: Tensor, k: Tensor, **given: Any) -> backend_tools.AttentionSpec:
    return backend_tools.attention_spec(ops.flash_attention.Call(q, k, k, layout=layout, **given))


@pytest.mark.parametrize("layout", ops.layouts.LAYOUTS[:-1])
def test_a_spec_says_the_same_of_every_dense_layout(layout: str) -> None:
    q, k = (ops.layouts.from_bnsd(x.transpose(1, 2), layout) for x in (Q, K))
    heads = {"num_heads": 4, "num_kv_heads": 2} if layout.endswith("H") else {}
    s = spec(layout, q, k, next_tokens=0, **heads)
    assert s == (layout, 2, 4, 2, 5, 9, 8, None, 0, 1 / math.sqrt(8), 0.0, None, 8, None, False, ())
    assert (s.group, s.causal, s.unbounded, s.packed) == (2, True, False, False)
    assert hash(s) == hash(spec(layout, q, k, next_tokens=0, **heads))


def test_a_spec_of_packed_sequences_counts_tokens() -> None:
    s = spec("TND", torch.empty(11, 4, 8), torch.empty(7, 1, 8), scale=2, pre_tokens=3)
    assert (s.batch, s.heads, s.kv_heads, s.sq, s.skv, s.scale, s.packed) == (1, 4, 1, 11, 7, 2.0, True)
    assert type(s.scale) is float and not s.causal and not s.unbounded


def test_dropout_needs_a_probability_and_a_stream() -> None:
    assert spec("BSND", Q, K, dropout_p=0.5).dropout_p == 0.0
    assert spec("BSND", Q, K, rng=Rng(1)).rng is None
    both = spec("BSND", Q, K, dropout_p=0.5, rng=Rng(1))
    assert (both.dropout_p, both.rng) == (0.5, Rng(1))


def test_a_spec_names_what_a_kernel_must_know() -> None:
    wide = torch.empty(2, 9, 2, 12)
    every = {"softcap": 2.0, "alibi_slopes": torch.ones(4), "bias": torch.ones(9), "sinks": torch.ones(4)}
    call = ops.flash_attention.Call(Q, K, wide, layout="BSND", top_left=True, next_tokens=0, **every)
    s = backend_tools.attention_spec(call)
    assert (s.d, s.dv, s.softcap, s.top_left, s.extras) == (8, 12, 2.0, True, backend_tools.EXTRAS)
    assert s.refusals("x", ("softcap", "bias", "sinks", "top_left")) == [
        "heads of 12 channels in v and 8 in k (x has none)",
        "alibi_slopes (x has none)",
    ]
    assert not s.refusals("x", backend_tools.EXTRAS)


def test_a_dense_window_at_the_top_left_is_a_shifted_one() -> None:
    s = spec("BSND", Q, K, pre_tokens=3, next_tokens=1, top_left=True)
    assert (s.pre, s.next, s.top_left, s.extras) == (3 + 4, 1 - 4, False, ())
    q, k = torch.empty(11, 4, 8), torch.empty(7, 1, 8)
    assert spec("TND", q, k, next_tokens=0, top_left=True).extras == ("top_left",)
    assert spec("TND", q, k, top_left=True).extras == ()


@pytest.mark.parametrize("layout", ops.layouts.LAYOUTS)
def test_attention_strides_find_batch_token_and_head(layout: str) -> None:
    x = torch.arange(6 * 4 * 3 * 8).view(2, 4, 9, 8)  # [b, n, s, d]
    given = x[0].transpose(0, 1).contiguous() if layout == "TND" else ops.layouts.from_bnsd(x, layout).contiguous()
    b, s, n = backend_tools.attention_strides(layout, given.stride(), 8)
    flat = given.flatten()
    assert torch.equal(flat[s * 5 + n * 3 :][:8], x[0, 3, 5])
    if layout != "TND":
        assert torch.equal(flat[b + s * 5 + n * 3 :][:8], x[1, 3, 5])


def test_a_window_without_a_side_is_a_number_that_reaches_everything() -> None:
    assert backend_tools.bounded(None) == backend_tools.bounded(1 << 60) == backend_tools.UNBOUNDED
    assert (backend_tools.bounded(-7), backend_tools.bounded(-(1 << 60))) == (-7, -backend_tools.UNBOUNDED)


def test_starts_of_packed_sequences_are_checked() -> None:
    q, k = torch.empty(5, 1, 8), torch.empty(6, 1, 8)
    good = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 0, 6], dtype=torch.int32)

    def starts(*cu: Tensor | None) -> backend_tools.CuSeqlens:
        call = ops.flash_attention.Call(q, k, k, layout="TND", cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
        return backend_tools.packed_starts(call)

    assert starts(*good) == ([0, 2, 5], [0, 0, 6])
    assert starts(None, None) is None
    for wrong in ([1, 2, 6], [0, 2, 5], [0, 7, 6]):
        with pytest.raises(hal.ContractError, match="cu_seqlens_k rising from 0 to 6"):
            starts(good[0], torch.tensor(wrong, dtype=torch.int32))
