"""Every op of the backend, on the simulator with device memory full of NaN, through the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hal
from hal import ops
from hal.backends.npu import Npu, vocab
from hal.testing import run
from hal.testing.sharded_processes import OPS as BETWEEN_PROCESSES

EXPECTED_DECLINES = {
    *(("dropout", "float64", id) for id in ("npu/philox", "npu/torch")),  # Ascend's operators have no float64
    ("grouped_linear_wgrad", "float32", "npu/grouped_matmul_add"),  # the operator multiplies float16 and bfloat16
    # The device stores no float8.
    *(("scaled_linear", dtype, "composition") for dtype in ("float32", "float16", "bfloat16")),
    ("scaled_linear", "float32", "hal.lower"),
    # They need several processes: hal parity --collectives (test_mc2.py).
    *((n, d, "npu/mc2") for n in BETWEEN_PROCESSES for d in ("float32", "bfloat16", "float16")),
}
VENDOR = {
    "flash_attention": "npu/fusion_attention",
    "merge_attention": "npu/ring_attention_update",
    "scale_mask_softmax": "npu/scaled_masked_softmax",
    "layer_norm": "npu/native",
    "rms_norm": "npu/rms_norm",
    "add_rms_norm": "npu/add_rms_norm",
    "rotary": "npu/rotary_mul",
    "swiglu": "npu/swiglu",
    "geglu": "npu/geglu",
    "bias_gelu": "npu/gelu",
    "adamw": "npu/adamw",
}


@pytest.mark.parametrize("name", sorted(op.name for op in hal.OPS.values() if op.decompose is None))
def test_every_op_has_an_implementation(name: str) -> None:
    assert Npu.impls.get(name), f"{name} does not run on npu"


@pytest.mark.parametrize("name, id", VENDOR.items())
def test_the_vendors_kernel_is_preferred(name: str, id: str) -> None:
    assert Npu.impls[name][0].id == id


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(hal.OPS))
def test_the_conformance_kit_passes(npu: Npu, name: str) -> None:
    report = run(npu, ops=[name], examples=3)
    assert report.ok, report.summary()
    declined = {(row.op, row.dtype, row.implementation) for row in report.rows if row.status == "declined"}
    assert declined <= EXPECTED_DECLINES


@pytest.mark.parametrize("id", ["npu/philox", "npu/torch"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_draw_is_the_definitions_whatever_block_it_is(npu: Npu, id: str, data: st.DataObject) -> None:
    full = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    start = [data.draw(st.integers(0, n - 1)) for n in full]
    shape = [data.draw(st.integers(0, n - i)) for n, i in zip(full, start)]
    rng = hal.Rng(data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(0, 2**64 - 1))).block(full, start)
    expected = ops.philox_uniform.reference(shape, rng, device=torch.device("cpu"))
    with hal.activated(npu, pin={"philox_uniform": id}):
        assert torch.equal(ops.philox_uniform(shape, rng).cpu(), expected)


@pytest.mark.parametrize("how", [{}, {"softcap": 30.0}, {"layout": "TND"}], ids=["plain", "softcap", "packed"])
def test_attention_with_dropout_is_refused(npu: Npu, how: dict[str, Any]) -> None:
    """The fused operator takes masks of the vendor's generator only, and a draw for each score has no limit."""
    q, given = torch.randn(1, 2, 8, 16).npu(), {"layout": "BNSD", **how}
    if given["layout"] == "TND":
        q = torch.randn(8, 2, 16).npu()
        cu = torch.tensor([0, 3, 8], dtype=torch.int32).npu()
        given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    with pytest.raises(hal.UnsupportedOp, match=r"--rng vendor.*HAL_NPU_RNG=vendor.*--no-flash-attn"):
        ops.flash_attention(q, q, q, dropout_p=0.1, rng=hal.Rng(1), **given)


@pytest.mark.parametrize(
    ("how", "chosen"),
    [
        ({"scale": 1.0, "bias": (2, 8, 8)}, "npu/fusion_attention"),
        ({"scale": 0.3, "bias": (2, 8, 8)}, "npu/fusion_attention"),
        ({"scale": 1.0, "bias": (1, 8)}, "npu/torch"),  # the summands of the bias's gradient would be rounded
        ({"softcap": 30.0}, "npu/torch"),
        ({"sinks": (2,)}, "npu/fusion_attention"),
        ({"return_lse": True, "sinks": (2,)}, "npu/torch"),  # the statistics are not documented
        ({"alibi_slopes": (2,)}, "npu/fusion_attention"),
        ({"bias": (2, 8, 8), "alibi_slopes": (2,)}, "npu/torch"),
        ({"v": (1, 2, 8, 8)}, "npu/fusion_attention"),
        ({"v": (1, 2, 8, 24)}, "npu/torch"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(reversed(value)),
)
def test_the_vendors_operator_gets_a_bias_and_narrower_values(npu: Npu, how: dict[str, Any], chosen: str) -> None:
    given = {n: torch.randn(x, dtype=torch.bfloat16).npu() if isinstance(x, tuple) else x for n, x in how.items()}
    if "alibi_slopes" in given:
        given["alibi_slopes"] = given["alibi_slopes"].float()
    q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16).npu()
    assert hal.why(ops.flash_attention, q, q, given.pop("v", q), layout="BNSD", **given).chosen == chosen


@pytest.mark.parametrize("sequences, chosen", [(1024, "npu/fusion_attention"), (1025, "npu/torch")])
def test_packed_sequences_beyond_the_vendors_number_are_declined(npu: Npu, sequences: int, chosen: str) -> None:
    x = torch.randn(sequences, 1, 8).npu()
    cu = torch.arange(sequences + 1, dtype=torch.int32).npu()
    explanation = hal.why(ops.flash_attention, x, x, x, layout="TND", cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert explanation.chosen == chosen
    assert ("1025 packed sequences" in str(explanation)) == (sequences > 1024)


def test_the_loss_needs_little_memory_beyond_the_logits(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of 16-bit logits, in blocks of rows, against the reference."""
    monkeypatch.setattr(vocab, "BLOCK", 3 * 4000)
    torch.manual_seed(0)
    logits, target = torch.randn(64, 4000).bfloat16(), torch.randint(0, 4000, (64,))
    results = []
    for move, loss_of in ((torch.Tensor.npu, ops.cross_entropy), (torch.clone, ops.cross_entropy.reference)):
        x, ids = move(logits).requires_grad_(), move(target)
        if x.device.type != "cpu":
            torch.npu.reset_peak_memory_stats()
            before = torch.npu.memory_allocated()
        loss = loss_of(x, ids, label_smoothing=0.1)
        loss.sum().backward()
        if x.device.type != "cpu":
            assert torch.npu.max_memory_allocated() - before < 2 * x.numel() * x.element_size()
        results.append((loss.detach().cpu(), x.grad.cpu().float()))
    for got, right in zip(*results):
        assert torch.allclose(got, right, atol=1e-4)
