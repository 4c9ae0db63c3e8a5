"""The conformance kit on this backend, in both memory modes and both shapes of kernels, and its collectives."""

import pytest
import torch

import hal
from hal import ops
from hal.testing import kit
from hal.testing.collectives import parity_collectives

EVERY = [op.name for op in hal.OPS.values()]


def failures(backend, names, examples):
    report = kit.run(backend, ops=names, examples=examples)
    return [str(row) for row in report.rows if row.status == "fail"]


def test_every_op_has_an_implementation_and_none_a_waiver(opencl):
    simple = {op.name for op in hal.OPS.values() if op.decompose is None}
    assert {name for name, impls in opencl.impls.items() if impls} == simple
    assert not any(impl.waivers for impls in opencl.impls.values() for impl in impls)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVERY, kit.GOLDEN])
def test_the_kit_passes(opencl, name):
    assert failures(opencl, [name], kit.EXAMPLES) == []


@pytest.mark.parametrize("name", ["adamw", "l2norm", "unscale_and_check", "linear"])
def test_the_kit_passes_where_tensors_are_copied_to_the_device(use, name):
    assert failures(use(memory="staging"), [name], 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_kit_passes_with_copies_whatever_the_op(use, name):
    assert failures(use(memory="staging"), [name], 0) == []


# The shape for devices without vectors: one column per work-item, a group of work-items per row, sums in local memory.
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_kit_passes_in_the_shape_of_a_gpu(use, name):
    assert failures(use(lanes=1, group=64), [name], 0) == []


def test_a_few_lanes_and_a_small_group_give_the_same_sums(use):
    assert failures(use(lanes=4, group=8), ["l2norm"], 3) == []


@pytest.mark.slow
def test_the_collectives_pass():
    report = parity_collectives("opencl", nproc=2, per_kind=2)
    assert report.ok
    assert report.rows


def test_a_refusal_says_what_the_kernels_have(opencl):
    x = torch.zeros(1, 1, 2, 257)
    with pytest.raises(hal.UnsupportedOp, match=r"head size 257 \(at most 256"):
        ops.flash_attention(x, x, x, layout="BNSD")
    with pytest.raises(hal.UnsupportedOp, match=r"torch.float64 \(the kernels have float32, bfloat16 and float16"):
        ops.dropout(x.double(), 0.5, hal.Rng(1))
