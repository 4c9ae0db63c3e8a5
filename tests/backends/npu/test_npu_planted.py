"""Real errors from Ascend code, planted into the backend: the conformance kit refuses each one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hal import ops
from hal.backends.npu import Npu, optimizer
from hal.backends.npu.attention import fusion, fusion_call
from hal.backends.npu.attention.fusion_call import FusionCall, Plan
from hal.core.op import Op
from hal.testing import Failure
from hal.testing.checks import check_sample
from hal.testing.subject import Subject


def check_all(backend: Npu, op: Op, id: str, dtype: torch.dtype = torch.float32) -> int:  # type: ignore[type-arg]
    """Runs the op's edge cases on one implementation; raises Failure at the first wrong one."""
    impl = next(i for i in backend.impls[op.name] if i.id == id)
    subject = Subject(backend, impl, dtype)
    with subject:
        return sum(not check_sample(subject, sample).declined for sample in op.edge_cases())


def test_the_backend_as_it_is_passes(npu: Npu) -> None:
    assert check_all(npu, ops.flash_attention, "npu/fusion_attention") > 20
    assert check_all(npu, ops.adamw, "npu/apply_adam_w") > 3
    assert check_all(npu, ops.adamw, "npu/adamw") > 3


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, object], None]]:
    """Replaces a name in the modules that decide how attention is called."""

    def replace(name: str, value: object) -> None:
        for module in (fusion, fusion_call):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)

    yield replace


def _inverted_triangle(device: torch.device) -> Tensor:
    return torch.tril(torch.ones(2048, 2048, dtype=torch.bool, device=device))


def _swapped(p: Plan) -> Plan:
    return dataclasses.replace(p, pre=p.next, next=p.pre) if p.mode == 4 else p


def test_mask_polarity(npu: Npu, plant: Callable[[str, object], None]) -> None:
    """True = visible, as in other libraries."""
    plant("triangle", _inverted_triangle)
    with pytest.raises(Failure):
        check_all(npu, ops.flash_attention, "npu/fusion_attention")


def test_full_mask_polarity(npu: Npu, plant: Callable[[str, object], None]) -> None:
    right = fusion_call.full_mask
    plant("full_mask", lambda *args: ~right(*args))
    with pytest.raises(Failure):
        check_all(npu, ops.flash_attention, "npu/fusion_attention")


def test_pre_and_next_swapped(npu: Npu, plant: Callable[[str, object], None]) -> None:
    right = fusion_call.plan
    plant("plan", lambda *args: _swapped(right(*args)))
    with pytest.raises(Failure):
        check_all(npu, ops.flash_attention, "npu/fusion_attention")


def test_a_band_without_a_mask(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    """pre and next alone do nothing: the library computes the full matrix."""
    right = FusionCall.forward
    monkeypatch.setattr(FusionCall, "forward", lambda self, q, k, v, mask: right(self, q, k, v, None))
    with pytest.raises(Failure):
        check_all(npu, ops.flash_attention, "npu/fusion_attention")


def test_a_causal_mask_from_the_other_corner(npu: Npu, plant: Callable[[str, object], None]) -> None:
    """sparse_mode 2 (top left) instead of 3 (bottom right): the same for Sq = Skv, wrong otherwise."""
    right = fusion_call.plan

    def top_left(*args: object) -> Plan:
        p = right(*args)  # type: ignore[arg-type]
        return dataclasses.replace(p, mode=2) if p.mode == 3 else p

    plant("plan", top_left)
    with pytest.raises(Failure):
        check_all(npu, ops.flash_attention, "npu/fusion_attention")


def test_tiles_that_mode_0_skips_although_the_window_sees_them(npu: Npu, plant: Callable[[str, object], None]) -> None:
    """Mode 0 takes pre and next from the top left corner. With an exact mask, a window that is aligned at the bottom
    right gives right results up to eight tiles of keys, which are 1,024 keys on a device and 256 here."""
    right = fusion_call.plan

    def mode_0(sq: int, sk: int, pre: int | None, next: int | None, masked: bool) -> Plan:
        p = right(sq, sk, pre, next, masked)
        if p.mode != 4 or masked:
            return p
        return Plan("full", 0, p.pre, p.next, dead_rows=True)

    q, k = torch.randn(1, 1, 40, 8), torch.randn(1, 1, 300, 8)
    here = {"layout": "BNSD", "pre_tokens": 20, "next_tokens": 5}
    expected = ops.flash_attention.reference(q, k, k, **here)
    for planted in (False, True):
        if planted:
            plant("plan", mode_0)
        got = ops.flash_attention(q.npu(), k.npu(), k.npu(), **here).cpu()
        assert torch.allclose(got, expected, atol=1e-4) != planted


def test_rows_that_see_nothing_left_uniform(npu: Npu, plant: Callable[[str, object], None]) -> None:
    right = fusion_call.plan
    plant("plan", lambda *args: dataclasses.replace(right(*args), dead_rows=False))
    with pytest.raises(Failure):
        check_all(npu, ops.flash_attention, "npu/fusion_attention")


def test_beta_power_off_by_one(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    """beta ** step instead of beta ** (step - 1): megatron_npu's first step was a quarter too small."""
    right = optimizer.beta_powers
    monkeypatch.setattr(optimizer, "beta_powers", lambda beta1, beta2, step: right(beta1, beta2, step + 1))
    with pytest.raises(Failure):
        check_all(npu, ops.adamw, "npu/apply_adam_w")
