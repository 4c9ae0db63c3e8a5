"""Operations and bytes of calls, compared with counts made another way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal import ops
from hal.ops.attention import band_mask
from hal.profiling.work import backward_flops, bytes_of, forward_flops, visible_pairs


@given(
    sq=st.integers(1, 12),
    skv=st.integers(1, 12),
    pre=st.none() | st.integers(-3, 14),
    next_=st.none() | st.integers(-3, 14),
)
def test_visible_pairs_are_those_of_the_reference(sq, skv, pre, next_):
    masked = band_mask(sq, skv, pre, next_, torch.device("cpu"))
    assert visible_pairs(sq, skv, pre, next_) == sq * skv - (0 if masked is None else int(masked.sum()))


@pytest.mark.parametrize("layout", ["SBH", "BSH", "SBND", "BSND", "BNSD"])
def test_attention_counts_its_two_products_in_every_layout(layout):
    b, s, n, g, d = 2, 6, 4, 2, 8
    shape = {"S": s, "B": b, "D": d}
    q, k = (
        torch.zeros(*(shape[c] for c in layout[:2]), heads * d)
        if layout in ("SBH", "BSH")
        else torch.zeros(*({**shape, "N": heads}[c] for c in layout))
        for heads in (n, g)
    )
    call = ops.flash_attention.Call(q, k, k, layout=layout, num_heads=n, num_kv_heads=g, next_tokens=0)
    # q k^T and p v: 2 operations per pair inside the causal window, head and channel
    assert forward_flops("flash_attention", call) == 2 * 2 * b * n * d * (s * (s + 1) // 2)


def test_linear_layers_count_one_product_forward_and_one_per_gradient():
    call = ops.linear.Call(torch.zeros(3, 5, 7), torch.zeros(11, 7), torch.zeros(11))
    forward = forward_flops("linear", call)
    assert forward == 2 * 15 * 7 * 11
    assert backward_flops("linear", forward, 2) == 2 * forward and backward_flops("linear", forward, 1) == forward
    assert forward_flops("rms_norm", ops.rms_norm.Call(torch.zeros(2, 4), torch.zeros(4))) == 0
    assert bytes_of([torch.zeros(3, dtype=torch.bfloat16), None, [torch.zeros(2), 1.5], 4]) == 6 + 8
