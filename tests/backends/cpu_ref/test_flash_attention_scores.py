"""cpu_ref's softcap, ALiBi, bias, sinks and head size of v at the sizes where its kernels change their path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hal import Rng, ops

# Error relative to the largest element, as in attention_oracle.py.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float64: 1e-11}


def gradients(function: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> dict[str, Tensor]:
    """The results, and the gradients of everything that has one."""
    leaves = {"q": q, "k": k, "v": v, **{n: how[n] for n in ("bias", "sinks") if n in how}}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    out, lse = function(**{**how, **leaves}, return_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return {"out": out, "lse": lse, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout)))}


def assert_equals_the_reference(*tensors: Tensor, ill_conditioned: bool = False, **how: Any) -> None:
    """ill_conditioned: ten times the error of the reference in the tensors' own dtype is allowed, too."""

    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    actual = gradients(ops.flash_attention, *tensors, **how)
    exact = gradients(ops.flash_attention.reference, *map(double, tensors), **{n: double(x) for n, x in how.items()})
    rounded = gradients(ops.flash_attention.reference, *tensors, **how) if ill_conditioned else exact
    for name, expected in exact.items():
        finite = expected.isfinite()
        assert torch.equal(actual[name].isfinite(), finite), name
        if finite.any():

            def error(x: Tensor, expected: Tensor = expected, finite: Tensor = finite) -> float:
                return float((x.double() - expected)[finite].abs().max() / expected[finite].abs().max().clamp_min(1))

            allowed = max(TOLERANCE[tensors[0].dtype], 10 * error(rounded[name]))
            assert error(actual[name]) < allowed, (name, error(actual[name]), allowed)


def made(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def everything(heads: int, sq: int, sk: int, dtype: torch.dtype) -> dict[str, Any]:
    bias, sinks = made((heads, sq, sk), (heads,), dtype=dtype)
    slopes = 0.5 ** torch.arange(1, heads + 1).float()
    return {"softcap": 3.0, "alibi_slopes": slopes, "bias": bias, "sinks": sinks}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("d", "e"), [(192, 128), (128, 192), (48, 33), (17, 64), (576, 512)])
def test_any_two_head_sizes(d: int, e: int, dtype: torch.dtype) -> None:
    q, k, v = made((1, 2, 61, d), (1, 1, 61, d), (1, 1, 61, e), dtype=dtype)
    assert_equals_the_reference(q, k, v, layout="BNSD", next_tokens=0)


@pytest.mark.parametrize("team", [1, 2, 3])
def test_heads_of_two_sizes_that_are_cut_between_threads(team: int, threads: Any) -> None:
    threads(team)
    q, k, v = made((1, 330, 1, 40), (1, 330, 1, 40), (1, 330, 1, 24))
    assert_equals_the_reference(q, k, v, layout="BSND", next_tokens=0, softcap=3.0)


def test_values_that_are_a_view_of_the_keys() -> None:
    q, k = made((2, 16, 1, 576), (2, 1, 40, 576))
    out = ops.flash_attention(q, k, k[..., :512], layout="BNSD")
    torch.testing.assert_close(out, ops.flash_attention.reference(q, k, k[..., :512], layout="BNSD"))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("sq", "sk"), [(1, 97), (3, 1), (8, 200), (9, 95), (48, 96), (65, 193), (112, 40)])
def test_sizes_around_the_tiles(sq: int, sk: int, dtype: torch.dtype) -> None:
    q, k, v = made((2, 4, sq, 16), (2, 2, sk, 16), (2, 2, sk, 8), dtype=dtype)
    assert_equals_the_reference(q, k, v, layout="BNSD", next_tokens=0, pre_tokens=70, **everything(4, sq, sk, dtype))


@pytest.mark.parametrize("sq", [5, 50])
@pytest.mark.parametrize("shape", [(130,), (50, 1), (4, 1, 130), (2, 1, 1, 130), (2, 1, 50, 130), (1, 4, 50, 130)])
def test_a_bias_is_broadcast_and_its_gradient_is_summed(shape: tuple[int, ...], sq: int) -> None:
    shape = tuple(sq if n == 50 else n for n in shape)
    q, k, v, bias = made((2, 4, sq, 8), (2, 2, 130, 8), (2, 2, 130, 8), shape)
    mask = torch.rand(2, 1, sq, 130) < 0.3
    assert_equals_the_reference(q, k, v, layout="BNSD", bias=bias, mask=mask)
    assert_equals_the_reference(q, k, v, layout="BNSD", bias=bias, dropout_p=0.3, rng=Rng(4), next_tokens=2)


def test_a_transposed_bias_of_minus_infinity_hides_keys() -> None:
    q, k, v, bias = made((1, 2, 60, 8), (1, 2, 60, 8), (1, 2, 60, 8), (2, 60, 60))
    bias = bias.mT.masked_fill(torch.ones(60, 60, dtype=torch.bool).triu(), -math.inf)  # the first query sees nothing
    out, lse = ops.flash_attention(q, k, v, layout="BNSD", bias=bias, return_lse=True)
    exact, exact_lse = ops.flash_attention.reference(q, k, v, layout="BNSD", bias=bias, return_lse=True)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)
    assert not out[:, :, 0].any()


@pytest.mark.parametrize("sq", [2, 60])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_scores_of_any_size_are_capped(sq: int, size: float) -> None:
    q, k, v = made((1, 2, sq, 16), (1, 2, 60, 16), (1, 2, 60, 16))
    # Scores of several hundred are sums with errors of 1e-4, which the derivative of tanh near 0 passes on, and depend
    # on the order of the additions.
    how: dict[str, Any] = {"layout": "BNSD", "ill_conditioned": size > 1}
    for softcap in (1.0, 30.0):
        assert_equals_the_reference(q * size, k, v, softcap=softcap, **how)
        assert_equals_the_reference(q * size, k, v, softcap=softcap, scale=-0.2, **how)


@pytest.mark.parametrize("sink", [-1e4, -30.0, 0.0, 30.0, 1e4, -math.inf])
@pytest.mark.parametrize("sq", [1, 50])
def test_sinks_of_any_size(sq: int, sink: float) -> None:
    q, k, v = made((1, 2, sq, 16), (1, 2, 60, 16), (1, 2, 60, 16))
    assert_equals_the_reference(q, k, v, layout="BNSD", next_tokens=0, sinks=torch.tensor([sink, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_with_everything(dtype: torch.dtype) -> None:
    q, k, v, sinks = made((130, 4, 16), (150, 2, 16), (150, 2, 24), (4,), dtype=dtype)
    cu = {
        f"cu_seqlens_{x}": torch.tensor(s, dtype=torch.int32)
        for x, s in (("q", [0, 60, 63, 130]), ("k", [0, 90, 90, 150]))
    }
    for top_left in (False, True):
        how = {"top_left": top_left, "next_tokens": 1, "softcap": 2.0, "alibi_slopes": torch.rand(3, 4)}
        assert_equals_the_reference(q, k, v, layout="TND", sinks=sinks, **how, **cu)


def test_repetition_is_bit_equal(threads: Any) -> None:
    q, k, v = made((1, 4, 300, 24), (1, 2, 300, 24), (1, 2, 300, 16))
    how = {"layout": "BNSD", "next_tokens": 0, **everything(4, 300, 300, torch.float32)}
    threads(2)
    first, second = (gradients(ops.flash_attention, q, k, v, **how) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
