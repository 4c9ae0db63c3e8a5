"""cpu_ref's flash attention of up to 8 queries, which has a code path of its own (flash_attention_decode.h)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_oracle import TOLERANCE, check, check_drawn, close, draw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal import ops


@settings(max_examples=200, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_few_queries_equal_the_dense_oracle(data: st.DataObject) -> None:
    g, group, b = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4, 7])), data.draw(st.integers(1, 2))
    sq, sk = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 300))
    n = g * group
    head_sizes = st.sampled_from([1, 5, 16, 40, 64, 72, 80, 96, 128])
    shapes = [(b, n, sq, sk), (1, 1, sq, sk), (b, 1, 1, sk), (n, sq, 1), (sk,)]
    check_drawn(data, b, (n, g), (sq, sk), head_sizes, shapes, [0.1, 0.6, 0.97, 1.0], [None, None, 0.1, -0.1, 0.0])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("sq", [1, 4, 5, 8])
def test_few_queries_of_more_heads_than_a_sweep_takes(sq: int, dtype: torch.dtype) -> None:
    check("BNSD", 1, (60, 1), (sq, 130), 32, dtype, next=0)
    check("SBND", 1, (26, 2), (sq, 97), 20, dtype, pre=50)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
def test_few_queries_give_the_same_bits_for_any_team_and_strides(dtype: torch.dtype, threads: Any) -> None:
    torch.manual_seed(8)
    for d, sq in ((64, 1), (40, 3), (33, 8)):
        q, k, v = (draw("SBND", 2, h, s, d, dtype) for h, s in ((12, sq), (3, 700), (3, 700)))
        runs = []
        for team in (1, 2, 5, 2):
            threads(team)
            runs.append(ops.flash_attention(q, k, v, layout="SBND", next_tokens=0, return_lse=True))
        q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
        out, lse = ops.flash_attention(q, k, v, layout="BNSD", next_tokens=0, return_lse=True)
        runs.append((out.permute(2, 0, 1, 3), lse))
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_reaches_those_of_few_queries_who_see_it(poison: float, dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, 2, s, 16, dtype=torch.float64).abs().to(dtype) for s in (5, 200, 200))
    bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
    bad_q[0, 1, 2, 5] = bad_k[0, 1, 197, 5] = bad_v[0, 1, 50, 5] = poison
    call = {"layout": "BNSD", "next_tokens": 0, "return_lse": True}
    out, lse = ops.flash_attention(q, k, v, **call)
    for tensors, hit in (((bad_q, k, v), [2]), ((q, bad_k, v), [2, 3, 4])):
        bad, bad_lse = ops.flash_attention(*tensors, **call)
        spared = [i for i in range(5) if i not in hit]
        assert bad[0, 1, hit].isnan().all() and bad_lse[0, 1, hit].isnan().all()
        assert torch.equal(bad[0, 0], out[0, 0]) and torch.equal(bad[0, 1, spared], out[0, 1, spared])
        assert torch.equal(bad_lse[0, 1, spared], lse[0, 1, spared])
    bad, _ = ops.flash_attention(q, k, bad_v, **call)
    assert not bad[0, 1, :, 5].isfinite().any() and bad[0, 1, :, :5].isfinite().all() and bad[0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("sq", [1, 4])
def test_what_few_queries_do_not_see_may_hold_anything(sq: int, dtype: torch.dtype) -> None:
    """Keys hidden by a mask or a window, such as the unused end of a cache, may contain NaN."""
    torch.manual_seed(10)
    q, k, v = (torch.randn(1, h, s, 24, dtype=torch.float64).to(dtype) for h, s in ((4, sq), (2, 300), (2, 300)))
    visible_keys = slice(110, 231)
    clean = ops.flash_attention(q, k[:, :, visible_keys], v[:, :, visible_keys], layout="BNSD", return_lse=True)
    mask = torch.ones(300, dtype=torch.bool)
    mask[visible_keys] = False
    k[:, :, mask], v[:, :, mask] = math.nan, math.nan
    for got, want in zip(ops.flash_attention(q, k, v, layout="BNSD", mask=mask, return_lse=True), clean):
        close(got, want.double(), "behind a mask", TOLERANCE[dtype])
    x = ops.flash_attention(q[:, :, :1], k, v, layout="BNSD", pre_tokens=299 - 110, next_tokens=230 - 299)
    close(x, clean[0][:, :, :1].double(), "in a window", TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_one_head_hides_from_few_queries_reaches_it_from_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    q, k, v = (torch.randn(1, h, s, 16, dtype=torch.float64).to(dtype) for h, s in ((3, 4), (1, 96), (1, 96)))
    mask = torch.zeros(1, 3, 4, 96, dtype=torch.bool)
    mask[0, 0, :, 64:], mask[0, 1] = True, True
    clean = ops.flash_attention(q, k, v, layout="BNSD", mask=mask)
    v[0, 0, 80] = math.nan
    spoiled = ops.flash_attention(q, k, v, layout="BNSD", mask=mask)
    assert torch.equal(spoiled[:, 0], clean[:, 0])
    assert not spoiled[:, 1].any() and spoiled[:, 2].isnan().any()
