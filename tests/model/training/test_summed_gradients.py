"""Gradients over several microbatches: linear layers accumulate into the float32 sums with linear_wgrad."""

import pytest
import torch

import hal
from hal.model.parallel.sharded_products import linear
from hal.model.training import run as command
from hal.testing import Spy

LAYERS, COUNT = 2, 3
LARGE = {"hidden_size": 128, "seq_length": 256, "max_position_embeddings": 256, "add_qkv_bias": True}
"""Sizes of products that cpu_ref's own kernel handles."""
SHAPES = {
    "tied": {},
    "one biased": {"add_qkv_bias": True, "disable_bias_linear": True},
    "large": {**LARGE, "disable_bias_linear": True, "swiglu": True},
    "untied gated": {"untie_embeddings_and_output_weights": True, "swiglu": True, "disable_bias_linear": True},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
DTYPES = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True, "loss_scale": 64.0}}


@pytest.fixture(autouse=True)
def backend(cpu_ref):
    return cpu_ref


def backend_of(*, summed):
    """The backend wrapped by a spy, with or without linear_wgrad."""
    spy = Spy(hal.backend())
    if not summed:
        spy.impls = {name: impls for name, impls in spy.impls.items() if name != "linear_wgrad"}
    return spy


def gradients(config, *, summed=True):
    """The float32 sums of one step, by name, and how often linear_wgrad was called."""
    with hal.activated(backend_of(summed=summed)) as spy:
        trainer = command.build(config)[0]
        trainer.forward_backward()
        sums = {name: grad.clone() for name, grad in trainer.optimizer.grads().items()}
        trainer.optimizer.zero_grad()
    assert not any(getattr(p, "main_grad", None) is not None for p in trainer.model.parameters())
    return sums, spy.counts().get("linear_wgrad", 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_those_that_autograd_adds_up(tiny, shape, dtype):
    config = tiny(num_layers=LAYERS, micro_batch_size=1, global_batch_size=COUNT, **SHAPES[shape], **DTYPES[dtype])
    ours, calls = gradients(config)
    plain, none = gradients(config, summed=False)
    assert (calls, none) == ((4 * LAYERS + 1) * (COUNT - 1), 0)
    assert set(ours) == set(plain)
    for name, grad in ours.items():
        assert grad.dtype == torch.float32
        scale = float(plain[name].abs().max())
        # Without linear_wgrad, every microbatch's product is rounded to the model's dtype before it is added.
        error = {"fp32": 2e-6, "bf16": 2**-8 * COUNT, "fp16": 2**-11 * COUNT}[dtype]
        torch.testing.assert_close(grad, plain[name], rtol=0, atol=error * scale, msg=lambda m, n=name: f"{n}: {m}")


def test_one_microbatch_needs_no_sum(tiny):
    _, calls = gradients(tiny(micro_batch_size=2, global_batch_size=2))
    assert calls == 0


def losses(config, *, summed):
    with hal.activated(backend_of(summed=summed)):
        trainer = command.build(config)[0]
        return [trainer.step().loss for _ in range(5)]


def test_a_run_is_the_same_with_and_without(tiny):
    config = tiny(micro_batch_size=1, global_batch_size=2, train_iters=5, hidden_dropout=0.1, attention_dropout=0.1)
    assert losses(config, summed=True) == pytest.approx(losses(config, summed=False), rel=1e-5)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_has_no_sum_gets_a_gradient_as_usual(frozen):
    layer = torch.nn.Linear(6, 5)
    getattr(layer, frozen).requires_grad_(False)
    trainable = layer.bias if frozen == "weight" else layer.weight
    trainable.main_grad = torch.zeros_like(trainable)
    linear(torch.ones(3, 6), layer.weight, layer.bias).sum().backward()
    assert getattr(layer, frozen).grad is None
    assert trainable.grad is not None and not trainable.main_grad.any()
