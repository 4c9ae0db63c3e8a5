"""Every op of the backend, on the simulator with device memory full of NaN, through the conformance kit."""

from __future__ import annotations

import pytest

import hal
from hal.backends.npu import Npu
from hal.testing import run

EXPECTED_DECLINES = {("dropout", "float64", "npu/torch")}  # Ascend's operators have no float64
VENDOR = {
    "flash_attention": "npu/fusion_attention",
    "scale_mask_softmax": "npu/scaled_masked_softmax",
    "layer_norm": "npu/native",
    "rms_norm": "npu/rms_norm",
    "rotary": "npu/rotary_mul",
    "swiglu": "npu/swiglu",
    "geglu": "npu/geglu",
    "bias_gelu": "npu/gelu",
    "adamw": "npu/apply_adam_w",
}


@pytest.mark.parametrize("name", sorted(hal.OPS))
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
