"""--fp8-format: which layers multiply in float8, and that a model trains with it as in bfloat16."""

import json
import subprocess
import sys
from dataclasses import replace

import parallel_runs
import pytest
import torch
from model_options import LATENT_OPTIONS, LLAMA_OPTIONS

import hal
from hal.model.config.command_line import build
from hal.model.config.device_limits import device_problems
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.schema import ConfigError
from hal.model.gpt.float8 import OPERANDS, DelayedScales
from hal.model.gpt.layers import ColumnParallelLinear, Init
from hal.model.gpt.model import GPT
from hal.nn import Float8Products
from hal.nn.float8_products import EXACT
from hal.testing.processes import run_processes

BF16 = {"tokenizer_type": "NullTokenizer", "vocab_size": 100, "data_path": "unused", "bf16": True}
SMALL = {**BF16, "num_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "seq_length": 24}
FLOAT8 = {"fp8_format": "hybrid", "fp8_recipe": "blockwise"}
WIDE = {**parallel_runs.LLAMA, **FLOAT8, "bf16": True, "num_layers": 2, "hidden_size": 256, "num_attention_heads": 8}
WIDE |= {"ffn_hidden_size": 256, "num_query_groups": 8, "lr": 1e-3, "init_method_std": 0.04}
"""Parts of weights under TP2 are whole blocks of 128 x 128."""
TP2_SP = {**parallel_runs.TP2, **parallel_runs.SP}
OFTEN = {("tp2-sp", "delayed"), ("tp2-sp", "blockwise"), ("cp2", "tensorwise")}


EXPERTS = {"num_experts": 4, "disable_bias_linear": True, "moe_shared_expert_intermediate_size": 32}


def products(**options):
    gpt = GPT(build({**SMALL, **options}), torch.device("cpu"))
    return {f"{name}.weight": part.products for name, part in gpt.named_modules() if hasattr(part, "products")}


@pytest.mark.parametrize(
    "options, layers",
    [
        ({}, {0, 1, 2, 3}),
        ({"first_last_layers_bf16": True}, {1, 2}),
        ({"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2}, {0, 1}),
    ],
)
def test_the_four_products_of_a_layer_are_in_float8_and_no_others(options, layers):
    found = {name for name, how in products(**FLOAT8, **options).items() if how is not EXACT}
    parts = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    assert found == {f"decoder.layers.{n}.{part}.weight" for n in layers for part in parts}


def test_experts_and_latent_attention_are_in_float8_but_routers_are_not():
    found = products(**(FLOAT8 | LLAMA_OPTIONS | EXPERTS | LATENT_OPTIONS))
    names = {n for n, how in found.items() if how is not EXACT}
    attention = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
    experts = [f"{where}.linear_fc{n}" for where in ("experts", "shared_experts") for n in (1, 2)]
    parts = [f"self_attention.{part}" for part in attention] + [f"mlp.{part}" for part in experts]
    assert names == {f"decoder.layers.{n}.{part}.weight" for n in range(4) for part in parts}


def test_the_recipe_and_the_format_are_those_given():
    assert set(products(**FLOAT8).values()) == {Float8Products(True, torch.float8_e5m2)}
    tensorwise = products(fp8_format="e4m3", fp8_recipe="tensorwise")
    assert set(tensorwise.values()) == {Float8Products(False, torch.float8_e4m3fn)}
    delayed = products(fp8_format="hybrid").values()  # Megatron's default
    assert all(not p.by_block and isinstance(p.magnitude.__self__, DelayedScales) for p in delayed)
    assert set(products().values()) == {EXACT}


def scales_of(**options):
    part = ColumnParallelLinear(Init(0, torch.bfloat16, torch.device("cpu")), "part", 4, 4, std=0.1, bias=False)
    return part, DelayedScales(part, build({**SMALL, "fp8_format": "hybrid", **options}))


def iteration(scales, *amaxes, applied=True):
    """The magnitudes that make the scales of the operands of microbatches with these largest magnitudes."""
    scales.start()
    used = [[scales.magnitude(n, torch.tensor(v)).item() for n, v in zip(OPERANDS, values)] for values in amaxes]
    scales.update(scales.recorded, torch.tensor(applied))
    return used


def test_scales_are_those_of_earlier_iterations():
    part, scales = scales_of(fp8_margin=1)
    # Without a history, an operand has its own scale.
    assert iteration(scales, (1.0, 2.0, 3.0), (4.0, 1.0, 5.0)) == [[1.0, 2.0, 3.0], [4.0, 1.0, 5.0]]
    # Then the largest of the iteration before, times 2^margin; zeros are no history.
    assert iteration(scales, (9.0, 0.0, 1.0), (8.0, 0.0, 2.0)) == [[8.0, 4.0, 10.0]] * 2
    assert iteration(scales, (1.0, 7.0, float("inf"))) == [[18.0, 7.0, 4.0]]
    assert iteration(scales, (3.0, 3.0, 3.0), applied=False) == [[2.0, 14.0, 3.0]]  # infinity is not recorded
    assert iteration(scales, (3.0, 3.0, 6.0)) == [[2.0, 14.0, 6.0]]  # neither is a step that was not applied
    assert part.amax_history.tolist() == [[3.0, 3.0, 6.0]]


def test_the_largest_of_a_history_makes_the_scale():
    part, scales = scales_of(fp8_amax_history_len=2, fp8_amax_compute_algo="max")
    for amaxes in ((5.0, 1.0, 1.0), (2.0, 2.0, 2.0)):
        iteration(scales, amaxes)
    assert iteration(scales, (1.0, 1.0, 1.0)) == [[5.0, 2.0, 2.0]]
    assert iteration(scales, (1.0, 1.0, 1.0)) == [[2.0, 2.0, 2.0]]
    scales.magnitude("x", torch.tensor(99.0))  # of an evaluation, which the next iteration forgets
    assert iteration(scales, (1.0, 1.0, 1.0)) == [[1.0, 1.0, 1.0]]
    assert part.amax_history.tolist() == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(
    "family",
    [{}, {**LLAMA_OPTIONS, "num_query_groups": 2}, {**LLAMA_OPTIONS, **EXPERTS}, {**LLAMA_OPTIONS, **LATENT_OPTIONS}],
    ids=["gpt2", "llama", "experts", "latent"],
)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_logits_and_gradients_are_near_those_of_bfloat16(family, recipe):
    ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    results = []
    with hal.activated(hal.testing.Reference()):
        for float8 in ({}, {"fp8_format": "hybrid", "fp8_recipe": recipe}):
            if recipe == "delayed" and "num_experts" in family:
                pytest.skip("delayed scaling has no experts")
            gpt = GPT(build({**SMALL, **family, "init_method_std": 0.1, **float8}), torch.device("cpu"))
            logits = gpt(ids)
            logits.float().square().mean().backward()
            results.append((logits.detach().float(), {n: p.grad.float() for n, p in gpt.named_parameters()}))
    (logits, grads), (logits8, grads8) = results
    # A token may get another expert.
    assert 1e-3 < (logits8 - logits).norm() / logits.norm() < (0.3 if "num_experts" in family else 0.15)
    for name, grad in grads.items():
        if grad.ndim > 1 and "router" not in name:
            assert torch.cosine_similarity(grads8[name].flatten(), grad.flatten(), 0) > 0.9, name


@pytest.mark.parametrize("model", [parallel_runs.GPT2, parallel_runs.MIXTRAL], ids=["gpt2", "mixtral"])
def test_sums_of_microbatches_are_those_of_the_gradients(model):
    """The second microbatch adds to float32 sums, which the first does not."""
    one = parallel_runs.steps({**model, **FLOAT8, "bf16": True, "micro_batch_size": 8}, 2)
    several = parallel_runs.steps({**model, **FLOAT8, "bf16": True, "micro_batch_size": 2}, 2)
    parallel_runs.close(several, one, losses=2e-2, norms=5e-2)


def test_the_sum_of_each_experts_gradient_is_its_own(cpu_ref):
    layer = GPT(build({**SMALL, **FLOAT8, **LLAMA_OPTIONS, **EXPERTS}), torch.device("cpu")).decoder.layers["0"]
    experts = layer.mlp.experts.linear_fc1
    x, sizes = torch.randn(23, 48, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.tensor([7, 0, 9, 4])
    y = experts(x, sizes)
    assert (y[20:] == 0.0).all()  # rows without an expert
    y.float().square().sum().backward()
    expected = experts.weight.grad.float()
    experts.weight.grad, experts.weight.main_grad = None, torch.ones(expected.shape)
    experts(x, sizes).float().square().sum().backward()
    assert experts.weight.grad is None and (expected[1] == 0.0).all() and (expected[[0, 2, 3]] != 0.0).any()
    torch.testing.assert_close(experts.weight.main_grad - 1.0, expected, rtol=2e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("delayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout",
    [
        {"zero_stage": 3},
        pytest.param(parallel_runs.DISTRIBUTED_OPTIMIZER, marks=pytest.mark.slow),
        pytest.param(parallel_runs.PP2, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=["dp2-zero3", "dp2-distributed-optimizer", "pp2", "dp2"],
)
def test_the_first_step_is_that_of_one_process(layout, recipe):
    """Closer than float8 is to bfloat16 (1e-3), so the layout cannot have lost it. Later ones differ by rounding."""
    small = {**parallel_runs.LLAMA, **FLOAT8, "fp8_recipe": recipe, "bf16": True}
    parallel_runs.close(parallel_runs.on(2, {**small, **layout}, 1), parallel_runs.on(1, small, 1), 1e-6, 1e-4)


@pytest.mark.parametrize(
    "layout, recipe",
    [
        pytest.param(layout, recipe, marks=pytest.mark.slow if (name, recipe) in OFTEN else pytest.mark.nightly)
        for name, layout in (("tp2", parallel_runs.TP2), ("tp2-sp", TP2_SP), ("cp2", parallel_runs.CP2))
        for recipe in ("delayed", "tensorwise", "blockwise")
    ],
)
def test_a_layout_trains_as_one_process(layout, recipe):
    wide = {**WIDE, "fp8_recipe": recipe}
    parallel_runs.close(parallel_runs.on(2, {**wide, **layout}, 5), parallel_runs.on(1, wide, 5), 5e-3, 2e-2)


def largest(options):
    """The magnitudes that made the scales in one step, by operand and layer, in forward and backward pass."""
    run, used = parallel_runs.trainer(options), {}
    for name, part in run.model.named_modules():
        if isinstance(getattr(part, "products", EXACT), Float8Products):

            def record(operand, amax, name=name, made=part.products.magnitude):
                value = amax if made is None else made(operand, amax)
                used.setdefault(operand, {}).setdefault(name, []).append(value.item())
                return value

            part.products = replace(part.products, magnitude=record)
    run.step()
    return used


@pytest.mark.parametrize("family", [parallel_runs.LLAMA, parallel_runs.LATENT_DENSE], ids=["llama", "latent"])
@pytest.mark.parametrize("layout", [TP2_SP, parallel_runs.CP2], ids=["tp2-sp", "cp2"])
def test_the_parts_of_a_tensor_have_one_scale(layout, family):
    options = {**family, "bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "global_batch_size": 1}
    one, (first, second) = largest(options), run_processes(2, largest, {**options, **layout})
    assert first == second
    assert first["weight"] == one["weight"]
    for operand in ("x", "dy"):
        for name, values in one[operand].items():
            assert first[operand][name] == pytest.approx(values, rel=0.5), (operand, name)


@pytest.mark.slow
def test_experts_on_two_ranks_train_as_on_one():
    """Within the noise of quantisation, because the rows of both ranks share blocks of gradients' sums."""
    wide = {**WIDE, "num_experts": 4, "moe_ffn_hidden_size": 256, "moe_router_topk": 2}
    two = parallel_runs.on(2, {**wide, **parallel_runs.EP2}, 5)
    parallel_runs.close(two, parallel_runs.on(1, wide, 5), 1e-2, 5e-2)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_the_tiny_preset_follows_bfloat16(tmp_path, recipe):
    """Means of 20 iterations, over the text that `make train` reads.

    At the preset's learning rate rounding decides when the loss jumps in the first iterations, and bfloat16 differs
    from float32 by more than 1 %; at a lower one it does not.
    """
    curves = []
    for options in ([], ["--fp8-format", "hybrid", "--fp8-recipe", recipe]):
        run = tmp_path / str(len(curves))
        command = [sys.executable, "-m", "hal", "train", "--backend", "cpu_ref", "--config", "tiny", "--bf16", *options]
        command += ["--lr", "5e-4", "--min-lr", "5e-5", "--train-iters", "80", "--lr-decay-iters", "400"]
        command += ["--eval-iters", "0", "--run-dir", str(run)]
        subprocess.run(command, check=True, capture_output=True)
        losses = torch.tensor([loss for _, loss in json.loads((run / "run.json").read_text())["losses"]])
        curves.append(losses.view(4, 20).mean(1))
    assert curves[0][-1] < 0.75 * curves[0][0]
    torch.testing.assert_close(curves[1], curves[0], rtol=0.01, atol=0.0)


@pytest.mark.parametrize(
    "options, words",
    [
        ({**FLOAT8, "bf16": False}, "--fp8-format hybrid needs --bf16"),
        ({"fp8_recipe": "blockwise"}, "--fp8-recipe would be ignored: it needs --fp8-format"),
        ({**EXPERTS, **FLOAT8, "fp8_recipe": "delayed"}, "with --num-experts, give --fp8-recipe tensorwise or block"),
        ({"fp8_format": "e4m3", "first_last_layers_bf16": True}, "does not go with --first-last-layers-bf16"),
    ],
)
def test_what_is_not_available_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build({**SMALL, **options})


def test_a_device_without_float8_is_refused():
    config = build({**SMALL, **FLOAT8})
    layout = make_parallel_layout(config, 1)
    reals = frozenset({torch.float32, torch.bfloat16})
    (problem,) = device_problems(config, layout, hal.Capabilities(dtypes=reals))
    assert problem == "--fp8-format hybrid: the device has no float8_e4m3fn and float8_e5m2; remove it"
    both = reals | {torch.float8_e4m3fn, torch.float8_e5m2}
    assert list(device_problems(config, layout, hal.Capabilities(dtypes=both))) == []
