"""The optimizer on two parameters with given gradients: clipping, decay, precision, and the loss scaler's options."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hal
from hal.comm.threads import threads
from hal.model.config.schema import Config
from hal.model.parallel.tensor_sharding import Shard
from hal.model.training.optimizer import DECOUPLED, LossScaler, Optimizer, local, no_decay, owned_names


def optimizer_of(dtype=torch.float32, *, world=None, **options):
    parameters = {
        "layer.weight": nn.Parameter(torch.ones(2, 2, dtype=dtype)),
        "norm.weight": nn.Parameter(torch.ones(2, dtype=dtype)),
    }
    config = Config(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, **options)
    return Optimizer(config, parameters, world)


def backward(optimizer, value):
    """Adds `value` to every element of every gradient."""
    sum((p * value).sum() for p in optimizer.model.values()).backward()


@pytest.mark.parametrize(
    "clip_grad, norm, share",
    [
        (1.0, 4.0, 1 / 4),
        (1.0, 1.0, 1.0),
        (1.0, 0.5, 1.0),  # gradients are never made larger
        (0.0, 4.0, 1.0),
        (0.5, 4.0, 1 / 8),
        (1e-6, 1e-6, 1 / 2),  # torch and Megatron add 1e-6 to the norm
    ],
)
def test_gradients_are_clipped_to_a_norm(cpu_ref, clip_grad, norm, share):
    optimizer = optimizer_of(clip_grad=clip_grad, adam_beta1=0.9, adam_beta2=0.75)
    backward(optimizer, 2.0)
    optimizer.step(0.1, optimizer.clip_factor(torch.tensor(norm)))
    for name in optimizer.model:
        torch.testing.assert_close(optimizer.exp_avg[name], torch.full_like(optimizer.main[name], 0.1 * 2.0 * share))
        second = torch.full_like(optimizer.main[name], 0.25 * (2.0 * share) ** 2)
        torch.testing.assert_close(optimizer.exp_avg_sq[name], second)


def test_decay_is_for_matrices_and_bias_correction_for_every_step(cpu_ref):
    optimizer = optimizer_of(weight_decay=0.5, clip_grad=0.0)
    for step in (1, 2):
        backward(optimizer, 3.0)
        optimizer.step(0.1)
        optimizer.zero_grad()
        assert optimizer.steps == step and optimizer.grads() == {}
        # With the same gradient in every step, Adam's bias-corrected update is the learning rate.
        one, half = 1 - 0.1 * step, (1 - 0.05) ** step - (0.1 if step == 1 else 0.1 + 0.1 * 0.95)
        torch.testing.assert_close(optimizer.model["norm.weight"].detach(), torch.full((2,), one))
        torch.testing.assert_close(optimizer.model["layer.weight"].detach(), torch.full((2, 2), half))


def test_without_bias_correction_the_moments_are_used_as_they_are(cpu_ref):
    """MindSpore's AdamWeightDecay: m, v = averages from 0 on; update = m / (sqrt(v) + eps) + weight_decay * weight."""
    optimizer = optimizer_of(weight_decay=0.5, clip_grad=0.0, adam_bias_correction=False, adam_eps=1e-6)
    weight, m, v = 1.0, 0.0, 0.0
    for gradient in (3.0, -2.0):
        backward(optimizer, gradient)
        optimizer.step(0.1)
        optimizer.zero_grad()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        weight -= 0.1 * (m / (v**0.5 + 1e-6) + 0.5 * weight)
        torch.testing.assert_close(optimizer.model["layer.weight"].detach(), torch.full((2, 2), weight))


def test_epsilon_before_the_correction_of_the_second_moment(cpu_ref):
    """MindFormers' AdamWeightDecayX (research/qwen): m / (sqrt(v) + eps) * sqrt(1 - beta2^t) / (1 - beta1^t)."""
    options = {"adam_eps": 0.05, "adam_eps_before_correction": True}
    optimizer = optimizer_of(weight_decay=0.0, clip_grad=0.0, **options)
    weight, m, v = 1.0, 0.0, 0.0
    for step, gradient in ((1, 3.0), (2, -2.0)):
        backward(optimizer, gradient)
        optimizer.step(0.1)
        optimizer.zero_grad()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        weight -= 0.1 * m / (v**0.5 + 0.05) * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        torch.testing.assert_close(optimizer.model["layer.weight"].detach(), torch.full((2, 2), weight))


def test_no_decay_is_for_biases_of_any_shape_and_for_vectors():
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    named = (("a.weight", matrix), ("a.weight", vector), ("a.bias", matrix), ("a.bias", vector))
    assert [no_decay(Config(), name, p) for name, p in named] == [False, True, True, True]
    names = ("a.q_layernorm.weight", "a.k_layernorm.weight", "a.input_layernorm.weight")
    decayed = Config(apply_wd_to_qk_layernorm=True, qk_layernorm=True)
    assert [no_decay(decayed, name, vector) for name in names] == [False, False, True]
    parameter = nn.Parameter(matrix)
    assert local(parameter).data_ptr() == matrix.data_ptr() and not local(parameter).requires_grad


@pytest.mark.parametrize(
    "at, zero, owned",
    [
        ({}, 0, {"table", "norm", "sharded", "expert"}),
        ({"tp": 1}, 0, {"sharded", "expert"}),
        ({"dp": 1}, 0, {"expert"}),
        ({"cp": 1}, 0, {"expert"}),
        ({"edp": 1}, 0, {"table", "norm", "sharded"}),
        ({"dp": 1, "edp": 1}, 1, {"table", "norm", "sharded", "expert"}),
        ({"tp": 1, "dp": 1, "edp": 1}, 3, {"sharded", "expert"}),
    ],
)
def test_each_element_is_owned_by_the_first_of_its_replicas(at, zero, owned):
    class Stage(nn.ParameterDict):
        def stored_name(self, name):
            return "table" if name == "tied" else name

    stage = Stage({name: torch.zeros(1) for name in ("table", "tied", "norm", "sharded", "expert")})
    stage.shards = {"sharded": Shard(0), "expert": Shard(0, experts=True)}
    assert owned_names([stage], dict.fromkeys(("tp", "dp", "cp", "edp"), 0) | at, zero) == owned


@pytest.mark.parametrize(
    "dtype, ranks, one, two",
    [
        (torch.float32, 1, torch.float32, torch.float32),
        (torch.bfloat16, 1, torch.bfloat16, torch.float32),
        (torch.bfloat16, 2, torch.float32, torch.float32),
        (torch.float16, 1, torch.float32, torch.float32),  # unscaling 16 bits would underflow
    ],
)
def test_gradients_are_float32_where_more_than_one_is_added_or_unscaled(cpu_ref, dtype, ranks, one, two):
    optimizer = optimizer_of(dtype, world=threads(ranks)[0])
    backward(optimizer, 1.0)
    assert {g.dtype for g in optimizer.grads().values()} == {one}
    backward(optimizer, 2.0**-9)
    assert {g.dtype for g in optimizer.grads().values()} == {two}
    assert {float(x) for g in optimizer.grads().values() for x in g.flatten()} == {1.0 + 2.0**-9}
    optimizer.zero_grad()
    assert optimizer.grads() == {} and all(p.grad is None for p in optimizer.model.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_is_taken_in_float32_and_the_weights_are_its_rounding(cpu_ref, dtype):
    optimizer = optimizer_of(dtype, clip_grad=0.0)
    for _ in range(3):  # steps so small that 1.0 in 16 bits would not notice one of them
        backward(optimizer, 1.0)
        optimizer.step(1e-4)
        optimizer.zero_grad()
    for name, parameter in optimizer.model.items():
        assert 1 - 4e-4 < float(optimizer.main[name].max()) < 1 - 2e-4 and optimizer.main[name].dtype == torch.float32
        assert torch.equal(parameter.detach(), optimizer.main[name].to(dtype))
    backward(optimizer, 1.0)
    optimizer.step(0.5)
    assert all(float(p.detach().max()) < 0.6 for p in optimizer.model.values())


def test_products_add_to_the_sums_where_the_backend_can(cpu_ref):
    optimizer = optimizer_of(torch.bfloat16)
    backward(optimizer, 1.0)
    without = dict(hal.backend().impls)
    del without["linear_wgrad"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hal.backend(), "impls", without)
        optimizer.sum_in_place()
        assert not any(hasattr(p, "main_grad") for p in optimizer.model.values())
    optimizer.sum_in_place()
    for name, parameter in optimizer.model.items():
        assert parameter.main_grad is optimizer.grads()[name] and parameter.main_grad.dtype == torch.float32
    optimizer.zero_grad()
    assert all(p.main_grad is None for p in optimizer.model.values())


def test_embedding_and_output_layer_have_a_learning_rate_of_their_own(cpu_ref):
    names = (*DECOUPLED, "layer.weight", "norm.weight")
    for decoupled_lr, own in ((None, 0.1), (0.3, 0.3)):
        parameters = {n: nn.Parameter(torch.ones(2) if n == "norm.weight" else torch.ones(2, 2)) for n in names}
        optimizer = Optimizer(Config(decoupled_lr=decoupled_lr, weight_decay=0.5, clip_grad=0.0), parameters)
        backward(optimizer, 3.0)
        optimizer.step(0.1, decoupled_lr=decoupled_lr)
        # Adam's first step is the learning rate; matrices decay by half of it.
        for name, expected in zip(names, (1 - 1.5 * own, 1 - 1.5 * own, 1 - 0.15, 1 - 0.1)):
            value = parameters[name].detach()
            torch.testing.assert_close(value, torch.full_like(value, expected))


def test_the_norm_is_that_of_all_ranks_together(cpu_ref):
    class Two(hal.SingleRankComm):
        def all_reduce(self, x, op="sum"):
            return x + 9.0  # the square of the other rank's norm

    optimizer = optimizer_of()
    backward(optimizer, 2.0)
    assert float(optimizer.grad_norm()) == pytest.approx(24**0.5)
    optimizer.world = Two()
    optimizer.world.size = 2
    norm = optimizer.grad_norm()
    assert float(norm) == pytest.approx(33**0.5) and norm.dtype == torch.float64
    optimizer.owned = {"layer.weight"}
    assert float(optimizer.grad_norm()) == pytest.approx(5.0)
    optimizer.owned = set()
    assert float(optimizer.grad_norm()) == pytest.approx(3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_gradients_are_collected_where_no_hook_has_run(cpu_ref, dtype):
    optimizer = optimizer_of(dtype)
    for parameter in optimizer.model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.collect()
    low = dtype == torch.bfloat16
    assert len(optimizer.main_grads) == 2 * low and len(optimizer.grads()) == 2
    assert all((p.grad is None) == low for p in optimizer.model.values())


def test_experts_add_to_their_sums_where_the_backend_multiplies_groups(cpu_ref):
    weights = {"expert": nn.Parameter(torch.ones(2, 2, 2)), "layer.weight": nn.Parameter(torch.ones(2, 2))}
    optimizer = Optimizer(Config(), weights)
    backward(optimizer, 1.0)
    impls = {"linear_wgrad": [1], "grouped_linear_wgrad": [1]}
    for known, summed in (({"linear_wgrad": [1]}, {"layer.weight"}), (impls, set(weights))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hal.backend(), "impls", known)
            optimizer.sum_in_place()
        assert {n for n, p in weights.items() if getattr(p, "main_grad", None) is not None} == summed


def test_overflow_is_found_and_the_scale_divided_out(cpu_ref):
    optimizer = optimizer_of(torch.float16, loss_scale=8.0)
    backward(optimizer, 4.0)
    assert optimizer.unscale() is False
    assert float(optimizer.grad_norm()) == pytest.approx((6 * 0.5**2) ** 0.5)
    backward(optimizer, float("inf"))
    assert optimizer.unscale() is True


def test_the_scalers_options():
    fresh = LossScaler(dynamic=True)
    assert (fresh.scale, fresh.minimum, fresh.good_steps) == (1.0, 1.0, 0) and fresh.hysteresis_left == fresh.hysteresis
    assert LossScaler.of(Config()) == LossScaler(1.0, False)
    assert LossScaler.of(Config(fp16=True, loss_scale=64.0)) == LossScaler(64.0, False)
    options = {"initial_loss_scale": 256.0, "min_loss_scale": 4.0, "loss_scale_window": 3, "hysteresis": 5}
    expected = LossScaler(256.0, True, minimum=4.0, window=3, hysteresis=5, good_steps=0, hysteresis_left=5)
    assert LossScaler.of(Config(fp16=True, **options)) == expected


@pytest.mark.parametrize("ours, theirs", [(True, True), (True, False), (False, True)])
def test_a_scale_is_resumed_where_both_runs_move_theirs(ours, theirs):
    here = LossScaler(64.0, ours, minimum=16.0, window=10, hysteresis=3, hysteresis_left=3)
    before = here.scale, here.good_steps, here.hysteresis_left
    here.resume(LossScaler(2.0, theirs, minimum=1.0, window=99, good_steps=7, hysteresis_left=1))
    assert (here.window, here.minimum, here.hysteresis) == (10, 16.0, 3)
    assert (here.scale, here.good_steps, here.hysteresis_left) == ((16.0, 7, 1) if ours and theirs else before)
