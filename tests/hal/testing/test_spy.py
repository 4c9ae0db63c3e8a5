"""The spy: the exact set of ops that a training step of the GPT requests from a backend, without any device."""

import inspect

import pytest
import torch

import hal
from hal import ops
from hal.testing import Reference, Spy, golden

EVERY_STEP = {"embedding", "linear", "linear_wgrad", "bias_dropout_add", "cross_entropy", "l2norm", "adamw"}

USED = {
    "gpt2": EVERY_STEP | {"layer_norm", "flash_attention", "bias_gelu", "dropout"},
    "llama": EVERY_STEP | {"rms_norm", "flash_attention", "swiglu", "rotary"},
    "unfused": EVERY_STEP | {"layer_norm", "scale_mask_softmax", "dropout", "geglu"},
}


@pytest.mark.parametrize("shape", golden.SHAPES)
def test_a_training_step_uses_exactly_these_ops(shape):
    spy = Spy(Reference())
    with hal.activated(spy):
        golden.train(shape, torch.float32, steps=1)
    assert set(spy.counts()) == USED[shape]


def test_together_the_golden_shapes_use_every_op_of_a_training_step():
    # unscale_and_check is for fp16; dropout is built on philox_uniform, which is called directly only for generation.
    # Composite ops are recorded as the ops that they are composed of. The shapes have no mixture of experts.
    simple = {op.name for op in hal.OPS.values() if op.decompose is None and ".moe_" not in op.__module__}
    assert set().union(*USED.values()) == simple - {"unscale_and_check", "philox_uniform"}


def test_calls_are_recorded_in_order_with_their_implementation():
    spy = Spy(Reference())
    with hal.activated(spy):
        ops.rms_norm(torch.ones(2, 4), torch.ones(4))
        ops.swiglu(torch.ones(2, 4))
    assert spy.calls == [("rms_norm", "reference"), ("swiglu", "reference")]
    spy.clear()
    assert spy.counts() == {}


def test_a_refused_call_is_not_recorded():
    inner = Reference()
    inner.impls = {
        "swiglu": [hal.Impl(ops.swiglu, "r", ops.swiglu.reference, lambda x, b=None: ["no"], None, None, {})]
    }
    spy = Spy(inner)
    with hal.activated(spy), pytest.raises(hal.UnsupportedOp, match="refuses: no"):
        ops.swiglu(torch.ones(2, 4))
    assert spy.calls == []


def test_everything_else_is_the_wrapped_backends():
    inner = Reference()
    inner.library = object()
    spy = Spy(inner)
    assert spy.library is inner.library
    assert spy.device() == inner.device()
    assert spy.probe() == inner.probe()
    with pytest.raises(AttributeError):
        spy.does_not_exist  # noqa: B018
    missed = [
        name
        for name, value in vars(hal.Backend).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in {*vars(Spy), "implementations"}
    ]
    assert missed == [], "a method of Backend that the spy does not pass on"
