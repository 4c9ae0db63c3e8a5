"""flash_attention's softcap, ALiBi, bias, sinks and head size of v against formulas that others wrote."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch_release import newer_torch

from hal import ContractError, ops

REFERENCE = ops.flash_attention.reference
Q, K, V = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 4, 9, 6), (2, 2, 11, 6), (2, 2, 11, 10)))
SLOPES, SINKS, BIAS = torch.tensor([0.5, 0.25, 0.125, 2.0]), torch.randn(4).double(), torch.randn(4, 9, 11).double()
CAUSAL = torch.triu(torch.full((9, 11), -math.inf, dtype=torch.float64), 11 - 9 + 1)


def gradients(function, *leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    return out, *torch.autograd.grad((out * torch.arange(out.numel()).view(out.shape).cos()).sum(), leaves)


def assert_equal(function, expected, *leaves):
    for a, b in zip(gradients(function, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@newer_torch("flex_attention takes powers of two only")
def test_softcap_alibi_and_bias_equal_torchs_flex_attention():
    def score_mod(score, b, h, i, j):
        score = 1.5 * torch.tanh(score / 1.5) - SLOPES[h] * (i + 2 - j).abs() + BIAS[h, i, j]
        return torch.where(j <= i + 2, score, -math.inf)

    how = {"layout": "BNSD", "next_tokens": 0, "softcap": 1.5, "alibi_slopes": SLOPES, "bias": BIAS}
    expected = flex_attention(Q, K, V, score_mod=score_mod, enable_gqa=True)  # without gradients on a CPU
    torch.testing.assert_close(REFERENCE(Q, K, V, **how), expected, rtol=1e-11, atol=1e-12)


def test_softcap_equals_gemma_2():
    gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2", reason="needs transformers")
    module = SimpleNamespace(num_key_value_groups=2, training=False)

    def theirs(q, k, v):
        out, _ = gemma2.eager_attention_forward(module, q, k, v, CAUSAL[None, None], scaling=0.3, softcap=2.0)
        return out.transpose(1, 2)

    ours = lambda q, k, v: REFERENCE(q, k, v, layout="BNSD", next_tokens=0, scale=0.3, softcap=2.0)  # noqa: E731
    # Gemma 2 computes its softmax in float32.
    for a, b in zip(gradients(ours, Q, K, V), gradients(theirs, Q, K, V), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_sinks_equal_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason="needs transformers")

    def theirs(q, k, v, sinks):
        module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
        return gpt_oss.eager_attention_forward(module, q, k, v, CAUSAL[None, None], scaling=0.3)[0].transpose(1, 2)

    assert_equal(
        lambda q, k, v, sinks: REFERENCE(q, k, v, layout="BNSD", next_tokens=0, scale=0.3, sinks=sinks),
        theirs,
        *(Q, K, V, SINKS),
    )


def test_the_log_sum_exp_includes_the_sink():
    out, lse = REFERENCE(Q, K, V, layout="BNSD", sinks=SINKS, return_lse=True)
    bare, less = REFERENCE(Q, K, V, layout="BNSD", return_lse=True)
    torch.testing.assert_close(lse, torch.logaddexp(less, SINKS[:, None]))
    torch.testing.assert_close(out, bare * torch.exp(less - lse)[..., None])
    hidden = torch.ones(1, dtype=torch.bool)
    out, lse = REFERENCE(Q, K, V, layout="BNSD", sinks=SINKS, mask=hidden, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, SINKS[:, None].expand_as(lse))


def test_packed_sequences_equal_one_call_each():
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in ((12, 4, 6), (14, 2, 6), (14, 2, 10)))
    starts = ([0, 5, 5, 12], [0, 3, 7, 14])
    slopes = torch.rand(3, 4)
    cu = {f"cu_seqlens_{x}": torch.tensor(s, dtype=torch.int32) for x, s in zip("qk", starts)}
    for top_left in (False, True):
        how = {"softcap": 1.5, "sinks": SINKS, "pre_tokens": 3, "next_tokens": 0, "top_left": top_left}
        packed = REFERENCE(q, k, v, layout="TND", alibi_slopes=slopes, **how, **cu)
        for i in (0, 2):
            (q0, q1), (k0, k1) = (s[i : i + 2] for s in starts)
            own = (q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])
            dense = REFERENCE(*own, layout="BSND", alibi_slopes=slopes[i], **how)
            torch.testing.assert_close(packed[q0:q1], dense[0], rtol=1e-12, atol=1e-12)


def test_top_left_windows_start_at_the_first_key():
    seen = lambda i, j: i - 2 <= j <= i + 1  # noqa: E731
    mask = torch.tensor([[not seen(i, j) for j in range(11)] for i in range(9)])
    how = {"layout": "BNSD", "pre_tokens": 2, "next_tokens": 1, "top_left": True}
    torch.testing.assert_close(REFERENCE(Q, K, V, **how), REFERENCE(Q, K, V, layout="BNSD", mask=mask))


CU = torch.tensor([0, 9], dtype=torch.int32)
PACKED = {"layout": "TND", "cu_seqlens_q": CU, "cu_seqlens_k": CU}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"softcap": 0.0}, "positive and finite"),
        ({"softcap": math.inf}, "positive and finite"),
        ({"alibi_slopes": torch.ones(4).double()}, "float32"),
        ({"alibi_slopes": torch.ones(3)}, r"\[4\] or \[2, 4\]"),
        ({"bias": torch.ones(3).double()}, "broadcasts"),
        ({"bias": torch.ones(9, 11, dtype=torch.bfloat16)}, "q's dtype"),
        ({"sinks": torch.ones(2).double()}, "one logit per query head"),
        ({"sinks": torch.ones(4, dtype=torch.float16)}, "sinks of q's dtype"),
        ({**PACKED, "bias": torch.ones(9, 9).double()}, "no bias with TND"),
        ({**PACKED, "alibi_slopes": torch.ones(2, 4)}, r"\[4\] or \[1, 4\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(how, text):
    tensors = (Q[0].transpose(0, 1),) * 3 if "cu_seqlens_q" in how else (Q, K, V)
    with pytest.raises(ContractError, match=text):
        ops.flash_attention.verify(*tensors, **{"layout": "BNSD", **how})


def test_v_may_differ_from_k_in_its_head_size_only():
    with pytest.raises(ContractError, match="except for the head size"):
        ops.flash_attention.verify(Q, K, V[:, :, :10], layout="BNSD")
    with pytest.raises(ContractError, match="q and k of one head size"):
        ops.flash_attention.verify(Q, V, V, layout="BNSD")
