"""cpu_ref's flash attention against a dense float64 oracle, and properties that a comparison cannot show:
the dropout bits, bit-equal repetition and the size of the workspace."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from attention_oracle import TOLERANCE, check, check_drawn, close, draw, oracle, visible
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal import ContractError, Rng, ops
from hal.backends.cpu_ref import build


@settings(max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_call_equals_the_dense_oracle(data: st.DataObject) -> None:
    g, group, b = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    sq, sk = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 220))
    sizes = data.draw(st.sampled_from([(sq, sk), (sk, sk)]))
    n = g * group
    shapes = [(b, n, *sizes), (1, 1, *sizes), (b, 1, 1, sizes[1]), (n, sizes[0], 1)]
    check_drawn(data, b, (n, g), sizes, st.integers(1, 80), shapes, [0.1, 0.6, 0.97], [None, None, 0.5, -0.25, 0.0])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("d", [1, 2, 3, 15, 16, 31, 33, 64, 65, 80, 96, 127, 128, 192, 255, 256])
def test_every_head_size(d: int, dtype: torch.dtype) -> None:
    check("SBH", 1, (2, 1), (50, 101), d, dtype, next=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("sk", [1, 15, 16, 17, 95, 96, 97, 193])
@pytest.mark.parametrize("sq", [1, 16, 17, 47, 48, 49, 97])
def test_sizes_around_the_tiles(sq: int, sk: int, dtype: torch.dtype) -> None:
    check("BNSD", 1, (1, 1), (sq, sk), 20, dtype, next=0)
    check("BNSD", 1, (1, 1), (sq, sk), 20, dtype, pre=33, next=14)


@pytest.mark.parametrize("window", [(0, 0), (16, 15), (17, -3), (-5, 30), (-2, 1), (3, -4), (-200, 300), (300, -200)])
def test_windows_on_both_sides_and_dead_rows(window: tuple[int, int]) -> None:
    for sizes in ((100, 100), (60, 150), (150, 60)):
        check("BSND", 1, (2, 2), sizes, 16, pre=window[0], next=window[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("edge", [*range(0, 20, 3), 46, 47])
def test_edges_of_a_window_within_a_tile(edge: int, dtype: torch.dtype) -> None:
    """A tile of keys whose last keys the first queries do not see is computed in another way than one that all see.

    Queries 96 ... see the keys up to 96 + edge of the tile 96 ... 103; queries 48 ... those up to 240 + edge of the
    tile 192 ... 287.
    """
    check("BNSD", 1, (1, 1), (144, 104), 16, dtype, next=40 + edge)
    check("BNSD", 1, (1, 1), (96, 300), 16, dtype, next=edge - 12)


@pytest.mark.parametrize("window", [(8, 0), (0, 5), (90, 60), (30, -20), (-400, 0)])
def test_a_window_over_many_times_as_many_keys(window: tuple[int, int]) -> None:
    """The backward pass keeps the gradients of the keys near the window only; some keys no query sees."""
    for sizes in ((1900, 1900), (300, 1900), (1900, 300)):
        check("BNSD", 1, (4, 2), sizes, 16, pre=window[0], next=window[1])


def test_a_mask_that_hides_whole_blocks() -> None:
    i, j = torch.arange(200)[:, None], torch.arange(200)
    check("BNSD", 1, (2, 2), (200, 200), 16, mask=j > i)
    check("BNSD", 1, (1, 1), (200, 200), 16, mask=(j // 16 + i // 16) % 2 == 0)  # holes between visible blocks
    check("BNSD", 1, (1, 1), (200, 200), 16, mask=(i // 16 == 1) | (i > 150), pre=70)


@pytest.mark.parametrize("empty", ["b", "sq", "sk"])
def test_empty_tensors(empty: str) -> None:
    b, sq, sk = (0 if empty == name else 3 for name in ("b", "sq", "sk"))
    check("SBND", b, (2, 1), (sq, sk), 8)


def test_no_heads_give_gradients_of_zero() -> None:
    """The memory of the gradients has other values before."""
    q, k, v = torch.empty(1, 0, 5, 8), torch.ones(1, 2, 7, 8), torch.ones(1, 2, 7, 8)
    for x in (q, k, v):
        x.requires_grad_()
    for _ in range(3):
        torch.full((1, 2, 7, 8), 3.0)
        dk, dv = torch.autograd.grad(ops.flash_attention(q, k, v, layout="BNSD").sum(), (k, v))
        assert not dk.any() and not dv.any()


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (20, 5)])
@pytest.mark.parametrize(
    "lengths", [([3, 0, 61, 100, 5], [7, 9, 61, 130, 0]), ([1, 1, 4, 8, 9], [200, 1, 97, 333, 8])], ids=["any", "few"]
)
def test_packed_sequences_are_independent(
    lengths: tuple[list[int], list[int]], window: tuple[int | None, int | None], dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    (q_lengths, k_lengths), n, g, d = lengths, 4, 2, 24
    q, k, v = (torch.randn(sum(s), h, d, dtype=torch.float64).to(dtype) for s, h in
               ((q_lengths, n), (k_lengths, g), (k_lengths, g)))  # fmt: skip
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ops.flash_attention(
        q, k, v, layout="TND", cu_seqlens_q=packed(q_lengths), cu_seqlens_k=packed(k_lengths),
        pre_tokens=window[0], next_tokens=window[1], return_lse=True,
    )  # fmt: skip
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    outs, lses = [], []
    for a, b, c in zip(exact[0].split(q_lengths), exact[1].split(k_lengths), exact[2].split(k_lengths)):
        parts = [x.transpose(0, 1)[None] for x in (a, b, c)]
        o, s = oracle(*parts, visible(len(a), len(b), *window), 1 / math.sqrt(d))
        outs.append(o[0].transpose(0, 1))
        lses.append(s[0])
    want = torch.cat(outs)
    close(out, want, "out", TOLERANCE[dtype])
    close(lse, torch.cat(lses, 1), "lse", 1e-5)
    dout = torch.randn_like(out)
    for name, got, right in zip(
        ("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, exact, dout.double())
    ):
        close(got, right, name, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("cu", [[1, 5], [0, 4], [0, 6], [0, 3, 2, 5], [0, -1, 5]])
def test_cu_seqlens_that_do_not_fit_are_refused(cu: list[int]) -> None:
    x, good = torch.randn(5, 1, 4), torch.linspace(0, 5, len(cu)).to(torch.int32)
    bad = torch.tensor(cu, dtype=torch.int32)
    for cu_q, cu_k in ((bad, good), (good, bad)):
        with pytest.raises(ContractError, match="cu_seqlens rising from 0"):
            ops.flash_attention(x, x, x, layout="TND", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def philox_word(seed: int, offset: int, element: int) -> int:
    """Word element % 4 of Philox4x32-10 (Salmon et al., 2011) with counter offset + element // 4, in plain integers."""
    counter = (offset + element // 4) % 2**64
    c = [counter % 2**32, counter >> 32, 0, 0]
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c[element % 4]


def test_dropout_keeps_the_elements_that_philox_says() -> None:
    # With q = k = 0 and v = identity, out[i, j] is the probability of key j: 0 if dropped, else 1 / (keys (1 - p)).
    p, b, n, sq, sk = 0.3, 2, 3, 53, 113
    threshold = math.ceil(p * 2**24)
    rng = Rng(0x123456789ABCDEF0, 2**64 - 5)  # the counter wraps around
    blocks = [
        (rng, (b, n, sq, sk), (0, 0, 0, 0)),
        (rng.block((4, 5, 70, 131), (1, 2, 9, 3)), (4, 5, 70, 131), (1, 2, 9, 3)),
    ]
    for source, full, start in blocks:
        eye = torch.eye(sk).expand(b, n, sk, sk)
        zero = torch.zeros(b, n, sq, sk)
        out = ops.flash_attention(zero, torch.zeros(b, n, sk, sk), eye, layout="BNSD", dropout_p=p, rng=source)
        assert set(out.unique().tolist()) <= {
            0.0,
            *(x for x in out.unique().tolist() if abs(x * sk * (1 - p) - 1) < 1e-5),
        }
        rows = [(0, 0, 0), (0, 2, 52), (1, 0, 16), (1, 2, 47), (1, 1, 48)]
        for i, h, row in rows:
            first = (((i + start[0]) * full[1] + h + start[1]) * full[2] + row + start[2]) * full[3] + start[3]
            bits = [philox_word(rng.seed, rng.offset, first + j) >> 8 >= threshold for j in range(sk)]
            assert (out[i, h, row] != 0).tolist() == bits


def test_dropout_of_packed_sequences_counts_packed_tokens() -> None:
    p, rng, cu, d = 0.5, Rng(9, 1), packed([7, 20]), 27
    eye = torch.eye(27).unsqueeze(1).repeat(1, 2, 1)
    zero = torch.zeros(27, 2, d)
    out = ops.flash_attention(zero, zero, eye, layout="TND", cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=p, rng=rng)
    for h in range(2):
        for i in range(27):
            keys = range(7) if i < 7 else range(7, 27)
            bits = [philox_word(9, 1, (h * 27 + i) * 27 + j) >> 8 >= 2**23 for j in keys]
            assert (out[i, h, keys.start : keys.stop] != 0).tolist() == bits


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
def test_dropout_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    p, rng, (b, n, g, sq, sk, d) = 0.4, Rng(5, 6), (1, 2, 1, 70, 300, 12)
    q, k, v = (draw("BNSD", b, h, s, d, dtype).requires_grad_() for h, s in ((n, sq), (g, sk), (g, sk)))
    out = ops.flash_attention(q, k, v, layout="BNSD", next_tokens=3, dropout_p=p, rng=rng)
    kept = [philox_word(5, 6, e) >> 8 >= math.ceil(p * 2**24) for e in range(b * n * sq * sk)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, _ = oracle(*exact, visible(sq, sk, None, 3), 1 / math.sqrt(d), torch.tensor(kept).view(b, n, sq, sk), p)
    close(out, want, "out", TOLERANCE[dtype])
    dout = torch.randn_like(out)
    for name, got, right in zip(
        ("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, exact, dout.double())
    ):
        close(got, right, name, 3 * TOLERANCE[dtype])


def test_inputs_of_any_strides_give_the_same_bits() -> None:
    torch.manual_seed(2)
    q = torch.randn(2, 3, 60, 20)
    k, v = torch.randn(2, 1, 1, 90, 20)[0].expand(2, 3, 90, 20), torch.randn(2, 3, 20, 90).mT
    views, copies = (q, k, v), (q.clone(), k.contiguous(), v.contiguous())
    results = []
    for tensors in (views, copies):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = ops.flash_attention(*leaves, layout="BNSD", next_tokens=0)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])  # the gradient of out has strides 0
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("team", [1, 2, 3])
def test_repetition_is_bit_equal(dtype: torch.dtype, team: int, threads: Any) -> None:
    """Also with fewer heads than threads, where dK and dV are summed over parts of a head."""
    threads(team)
    torch.manual_seed(4)
    for n, g, s in ((1, 1, 700), (4, 2, 300), (5, 5, 200)):
        q, k, v = (draw("SBND", 1, h, s, 32, dtype).requires_grad_() for h in (n, g, g))
        dout, runs = torch.randn_like(q), []
        for _ in range(4):
            out = ops.flash_attention(q, k, v, layout="SBND", next_tokens=0)
            runs.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


def test_a_cut_head_equals_a_whole_one(threads: Any) -> None:
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, h, 500, 24, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    dout, results = torch.randn_like(q), []
    for team in (1, 2, 5):
        threads(team)
        out = ops.flash_attention(q, k, v, layout="BNSD", pre_tokens=200, next_tokens=30)
        results.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_thread_that_takes_over_earlier_queries_packs_their_keys(threads: Any) -> None:
    """The mask hides all keys from the second half of the queries, so the thread of that half helps with the first."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 1, 4000, 20) for _ in range(3))  # 20 channels are not used in place
    mask = (torch.arange(4000) >= 2000)[:, None].expand(4000, 4000).contiguous()
    outs = []
    for team in (1, *[2] * 10):
        threads(team)
        outs.append(ops.flash_attention(q, k, v, layout="BNSD", mask=mask, pre_tokens=200, next_tokens=0))
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_reaches_those_who_see_it(poison: float, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    q, k, v = (torch.randn(1, 1, 100, 16).abs().to(dtype) for _ in range(3))
    clean = ops.flash_attention(q, k, v, layout="BNSD", next_tokens=0)
    bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
    bad_q[0, 0, 30, 5] = bad_k[0, 0, 30, 5] = bad_v[0, 0, 30, 5] = poison
    row = ops.flash_attention(bad_q, k, v, layout="BNSD", next_tokens=0)[0, 0]
    assert row[30].isnan().all() and torch.equal(
        torch.cat([row[:30], row[31:]]), torch.cat([clean[0, 0, :30], clean[0, 0, 31:]])
    )
    column = ops.flash_attention(q, bad_k, v, layout="BNSD", next_tokens=0)[0, 0]
    assert column[30:].isnan().all() and torch.equal(column[:30], clean[0, 0, :30])
    value = ops.flash_attention(q, k, bad_v, layout="BNSD", next_tokens=0)[0, 0]
    assert not value[30:, 5].isfinite().any() and value[:, :5].isfinite().all()


def test_overflowing_scores_stay_finite() -> None:
    x = torch.full((1, 1, 5, 4), 1e4)
    torch.testing.assert_close(ops.flash_attention(x, x, torch.ones_like(x), layout="BNSD"), torch.ones_like(x))


def test_the_workspace_is_kept_small_and_can_be_given_back(threads: Any) -> None:
    threads(2)
    n, s, d = 8, 4096, 64
    q = torch.randn(1, n, s, d, requires_grad=True)
    sizes = []
    build.lib().hal_flash_attention_trim()
    for _ in range(2):
        out = ops.flash_attention(q, q, q, layout="BNSD", pre_tokens=64, next_tokens=0)
        out.sum().backward()
        sizes.append(build.lib().hal_flash_attention_trim())
    assert sizes[0] == sizes[1] > 0
    assert 50 * sizes[0] <= 4 * n * s * s  # the full score matrix, which must never be materialised
    assert build.lib().hal_flash_attention_trim() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [230, 5])
def test_scores_of_any_size_choose_the_largest(dtype: torch.dtype, masked: bool, queries: int) -> None:
    """Beyond 2^30, the float32 rounding error of a score is too large for exp."""
    generator = torch.Generator().manual_seed(3)
    size = 1e9 if dtype == torch.float64 else 7e4
    q, k, v = (torch.randn(1, 2, 230, 16, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    q, k = q * size, k * size
    k[:, :, 5] = k[:, :, 4]  # equal keys get equal probabilities
    mask = torch.zeros(1, 1, 230, 230, dtype=torch.bool)
    mask[..., 7] = masked
    parts = [
        ops.flash_attention(x, k, v, layout="BNSD", mask=m if masked else None, return_lse=True)
        for x, m in zip(q.split(queries, 2), mask.split(queries, 2))
    ]
    out, lse = (torch.cat(x, 2) for x in zip(*parts))
    scores = (q.double() @ k.double().mT).masked_fill(mask, -math.inf)
    clear = scores.topk(3, -1).values
    sure = (clear[..., 0] - clear[..., 2] > 1e-5 * clear[..., 0].abs()) & (
        (clear[..., 0] == clear[..., 1]) | (clear[..., 0] - clear[..., 1] > 1e-5 * clear[..., 0].abs())
    )
    assert sure.sum() > 120 and lse.isfinite().all()
    want = torch.softmax(scores / 4, -1) @ v.double()
    torch.testing.assert_close(out[sure].double(), want[sure], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("growth", [-300.0, -50.0, 8.0, 50.0, 70.0, 130.0])
def test_later_keys_may_outgrow_the_first_ones(growth: float, dtype: torch.dtype) -> None:
    """The keys from 150 on have larger scores by `growth` (in base 2), most of them in tiles that all queries see."""
    torch.manual_seed(8)
    q, k, v = (torch.randn(1, 2, s, 64, dtype=torch.float64) for s in (100, 400, 400))
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :, 150:, 0] = growth * math.log(2) * 8 / 4
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, lse = ops.flash_attention(q, k, v, layout="BNSD", return_lse=True)
    scores = q.double() @ k.double().mT / 8
    close(out, torch.softmax(scores, -1) @ v.double(), "out", TOLERANCE[dtype])
    close(lse, torch.logsumexp(scores, -1), "lse", 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_in_keys_that_all_queries_see(poison: float, dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, 2, s, 64).abs().to(dtype) for s in (100, 400, 400))
    mask = torch.zeros(100, 400, dtype=torch.bool)
    mask[:, 150] = True
    clean = ops.flash_attention(q, k, v, layout="BNSD", mask=mask)
    k[0, 1, 150, 5] = poison
    out = ops.flash_attention(q, k, v, layout="BNSD")
    assert out[0, 0].isfinite().all()
    if poison == -math.inf:  # scores of -inf, which is the same as hidden
        close(out[0, 1], clean[0, 1].double(), "out", TOLERANCE[dtype])
    else:
        assert out[0, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equal_keys_of_two_tiles_get_equal_probabilities_at_any_size(dtype: torch.dtype) -> None:
    """All queries of a head are equal, so that the rounding error of their shifts is, too."""
    torch.manual_seed(10)
    q, k, v = (torch.rand(1, 8, s, 16, dtype=torch.float64) for s in (1, 400, 400))
    q = q.expand(-1, -1, 100, -1)
    size = 1e9 if dtype == torch.float64 else 7e4
    k[:, :, 4] = k[:, :, 300] = 10.0
    q, k, v = (q * size).to(dtype), (k * size).to(dtype), v.to(dtype)
    out = ops.flash_attention(q, k, v, layout="BNSD")
    want = (v[:, :, 4] + v[:, :, 300]).double() / 2
    close(out, want[:, :, None].expand(-1, -1, 100, -1), "out", TOLERANCE[dtype])


_FEWER_THREADS = """
import torch, hal
from hal import ops
hal.use("cpu_ref")
torch.set_num_threads(4)
torch.manual_seed(0)
q, k, v, upstream = (torch.randn(1, 6, 200, 64, requires_grad=i < 3) for i in range(4))
out = ops.flash_attention(q, k, v, layout="BNSD", num_heads=6, num_kv_heads=6, pre_tokens=None, next_tokens=0)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
for a, b in zip((out, *torch.autograd.grad(out, (q, k, v), upstream)),
                (expected, *torch.autograd.grad(expected, (q, k, v), upstream))):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


def test_segments_of_threads_that_the_system_does_not_grant_are_run_by_others() -> None:
    """The work is divided for four threads, and the parallel region gets one."""
    env = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", _FEWER_THREADS], env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
