"""How a window is passed to npu_fusion_attention: the library's result for the planned call is HAL's window."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hal import ops
from hal.backends.npu.attention.fusion_call import Plan, aligned, plan, plan_packed

EDGE = st.none() | st.integers(-12, 40)
LENGTH = st.integers(1, 24)


def library_mask(p: Plan, sq: int, sk: int) -> Tensor:
    """bool [sq, sk], True = visible to the library (documented meaning of modes 3 and 4; pre and next as given)."""
    i, j = torch.arange(sq)[:, None] + (sk - sq), torch.arange(sk)
    if p.mask == "none":
        return torch.ones(sq, sk, dtype=torch.bool)
    if p.mode == 3:
        return j <= i
    assert p.mode == 4
    return (i - p.pre <= j) & (j <= i + p.next)


def expected_mask(sq: int, sk: int, pre: int | None, next: int | None) -> Tensor:
    outside = ops.band_mask(sq, sk, pre, next)
    return torch.ones(sq, sk, dtype=torch.bool) if outside is None else ~outside


@given(LENGTH, LENGTH, EDGE, EDGE)
def test_a_plan_shows_exactly_the_window(sq: int, sk: int, pre: int | None, next: int | None) -> None:
    p = plan(sq, sk, pre, next, masked=False)
    visible = expected_mask(sq, sk, pre, next)
    if p.mask == "full":  # the mask is the window itself, and mode 1 ignores pre and next
        assert p.mode == 1
    else:
        assert torch.equal(library_mask(p, sq, sk), visible)
    assert p.dead_rows or bool(visible.any(-1).all()), "the library was not told about a fully masked row"


@given(LENGTH, LENGTH, EDGE, EDGE)
def test_pre_and_next_are_passed_only_where_they_count(sq: int, sk: int, pre: int | None, next: int | None) -> None:
    p = plan(sq, sk, pre, next, masked=False)
    assert p.mode != 0 or p.mask == "none"
    assert (p.pre, p.next) == (Plan().pre, Plan().next) or p.mode == 4


@given(LENGTH, LENGTH, EDGE, EDGE)
def test_a_mask_goes_through_the_full_form(sq: int, sk: int, pre: int | None, next: int | None) -> None:
    assert plan(sq, sk, pre, next, masked=True) == Plan("full", 1, dead_rows=True)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), EDGE, EDGE)
def test_packed_sequences_share_a_plan_only_if_every_row_has_a_key(
    lengths: list[tuple[int, int]], pre: int | None, next: int | None
) -> None:
    q, k = [a for a, _ in lengths], [b for _, b in lengths]
    p = plan_packed(q, k, pre, next)
    if p is None:
        return
    for sq, sk in lengths:
        if sq:
            visible = expected_mask(sq, sk, pre, next)
            assert torch.equal(library_mask(p, sq, sk), visible)
            assert bool(visible.any(-1).all())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), EDGE, EDGE)
def test_packed_windows_from_the_top_left_are_mode_2_or_one_call_each(
    lengths: list[tuple[int, int]], pre: int | None, next: int | None
) -> None:
    p = plan_packed([a for a, _ in lengths], [b for _, b in lengths], pre, next, top_left=True)
    for sq, sk in lengths if p else ():
        visible = expected_mask(sq, sk, *aligned(pre, next, sq, sk))
        j_minus_i = torch.arange(sk) - torch.arange(sq)[:, None]
        assert torch.equal(
            visible, (j_minus_i >= -(pre or 99)) & (j_minus_i <= next) if p.mode == 2 else visible | True
        )
        assert not sq or bool(visible.any(-1).all())
    assert plan_packed([3, 9], [4, 5], None, 0, top_left=True) == Plan("triangle", 2)


def test_the_usual_calls_use_the_compressed_mask() -> None:
    assert plan(4096, 4096, None, None, False) == Plan()
    assert plan(4096, 4096, None, 0, False) == Plan("triangle", 3)
    assert plan(4096, 4096, 65536, 0, False) == Plan("triangle", 3)
    assert plan(4096, 4096, 2048, 0, False) == Plan("triangle", 4, 2048, 0)
    assert plan(1, 4096, None, 0, False) == Plan()  # decoding: the last query sees every key
    assert plan_packed([3, 9], [4, 9], None, 0) == Plan("triangle", 3)
