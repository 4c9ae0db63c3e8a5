"""Windows whose edges are near or beyond the range of 64-bit integers, against Python's integers."""

import itertools

import pytest
import torch

import hal
from hal import backend_tools, ops

EDGES = [None, 0, 3, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), -(2**63) + 3, 2**70, -(2**70)]
WINDOWS = list(itertools.product(EDGES, EDGES))


def expected_mask(sq, skv, pre, next, d):
    """True where query i does not see key j."""
    return torch.tensor(
        [
            [(pre is not None and j < i + d - pre) or (next is not None and j > i + d + next) for j in range(skv)]
            for i in range(sq)
        ]
    )


@pytest.mark.parametrize(("sq", "skv"), [(5, 5), (3, 6), (6, 3)])
def test_the_mask_of_a_window_is_right_for_every_integer(sq, skv):
    for pre, next in WINDOWS:
        mask = ops.band_mask(sq, skv, pre, next)
        mask = torch.zeros(sq, skv, dtype=torch.bool) if mask is None else mask
        assert torch.equal(mask, expected_mask(sq, skv, pre, next, skv - sq)), (pre, next)


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("run", [ops.flash_attention, ops.flash_attention.reference], ids=["cpu_ref", "reference"])
def test_attention_with_such_a_window_equals_attention_with_its_mask(run, top_left):
    hal.use("cpu_ref")
    q, k, v = (torch.randn(1, n, 2, 8) for n in (4, 6, 6))
    starts = {f"cu_seqlens_{x}": torch.tensor([0, n], dtype=torch.int32) for x, n in (("q", 4), ("k", 6))}
    for pre, next in WINDOWS:
        mask = expected_mask(4, 6, pre, next, 0 if top_left else 2)
        right = ops.flash_attention.reference(q.double(), k.double(), v.double(), layout="BSND", mask=mask).float()
        window = {"pre_tokens": pre, "next_tokens": next, "top_left": top_left}
        dense = run(q, k, v, layout="BSND", **window)
        packed = run(q[0], k[0], v[0], layout="TND", **starts, **window)
        torch.testing.assert_close(dense, right, msg=lambda text, at=(pre, next): f"{at}: {text}")
        torch.testing.assert_close(packed, right[0], msg=lambda text, at=(pre, next): f"{at}: {text}")


def test_kernels_are_told_of_edges_that_fit_into_32_bits():
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 6, 2, 8)
    for pre, next, top_left in itertools.product(EDGES, EDGES, (False, True)):
        call = ops.flash_attention.Call(q, k, k, layout="BSND", pre_tokens=pre, next_tokens=next, top_left=top_left)
        spec = backend_tools.attention_spec(call)
        assert all(edge is None or abs(edge) <= 10 for edge in (spec.pre, spec.next))
        found = ops.band_mask(4, 6, spec.pre, spec.next)
        found = torch.zeros(4, 6, dtype=torch.bool) if found is None else found
        assert torch.equal(found, expected_mask(4, 6, pre, next, 0 if top_left else 2)), (pre, next, top_left)
