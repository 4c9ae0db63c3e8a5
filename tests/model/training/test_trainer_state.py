"""The state of a run: who writes which part of it, and whether a run may continue from the state of another."""

import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hal
from hal.model.checkpoint import reader, writer
from hal.model.config.schema import Config, ConfigError
from hal.model.gpt.model import GPT, OUTPUT_LAYER, WORD_EMBEDDING
from hal.model.training.loss_scaler import LossScaler
from hal.model.training.optimizer import Optimizer
from hal.model.training.trainer_state import ModelState, _require_progress, options, require_same_model


@pytest.fixture(autouse=True)
def backend(cpu_ref):
    return cpu_ref


PROGRESS = {
    "consumed_samples": 8,
    "skipped": 0,
    "optimizer_steps": 2,
    "rng": [7, 0],
    "loss_scaler": asdict(LossScaler()),
}


@pytest.mark.parametrize(
    "name, value",
    [
        *(
            (name, value)
            for name in (
                "iteration",
                "consumed_samples",
                "skipped",
                "optimizer_steps",
                "scheduled_samples",
                "bad_batches",
            )
            for value in (-1, 1.0, True, None, "1", 2**63)
        ),
        *(("rng", value) for value in (None, 7, [], [7], [7, 0, 0], [7, "0"], (7, 0))),
        *(("rerun_losses", value) for value in (None, 2.5, (2.5,), ["2.5"], [True], [2.5, math.inf], [math.nan])),
        *(("loss_scaler", value) for value in (None, [], {"scale": "1"}, {"scale": None}, {"factor": 1.0})),
    ],
)
def test_progress_of_another_kind_is_refused_by_name(name, value):
    _require_progress(PROGRESS, Path("iter_0000002"))
    _require_progress({**PROGRESS, "rerun_losses": [3, 2.5]}, Path("iter_0000002"))
    with pytest.raises(hal.HalError, match=f"iter_0000002: its state has no {name}, or not as training writes it"):
        _require_progress({**PROGRESS, name: value}, Path("iter_0000002"))


def test_all_that_is_wrong_with_progress_is_said_at_once():
    with pytest.raises(hal.HalError, match="no consumed_samples, skipped, optimizer_steps, rng, loss_scaler, or"):
        _require_progress({}, Path("iter_0000002"))


PLAIN = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32}
ROPE = {"position_embedding_type": "rope"}
LONGROPE = {**ROPE, "rope_type": "longrope", "short_factor": ("1.0", "2.0"), "long_factor": ("3.0", "4.0")}
SCALED = {"use_rope_scaling": True, "rope_scaling_factor": 8.0}
WINDOW = {"pre_tokens": 3}
EXPERTS = {"num_experts": 4, "disable_bias_linear": True}
BIASES = {"disable_bias_linear": True, "add_qkv_bias": True}


def same_model(saved, ours, *, weights_only=False):
    """The name of the option that is refused between two models of these options, or None."""
    state = {"config": options(Config(**{**PLAIN, **saved}))}
    try:
        require_same_model(state, Config(**{**PLAIN, **ours}), Path("folder"), weights_only=weights_only)
    except ConfigError as error:
        return str(error).split(" was made with ")[1].split(" ")[0]
    return None


@pytest.mark.parametrize(
    "saved, ours, name, of_weights",
    [
        ({}, {"num_attention_heads": 2}, "num-attention-heads", True),
        ({}, {"num_query_groups": 2}, "num-query-groups", True),
        ({}, ROPE, "position-embedding-type", True),
        ({}, {"normalization": "RMSNorm"}, "normalization", True),
        ({}, {"swiglu": True}, "swiglu", True),
        ({}, {"geglu": True}, "geglu", True),
        ({}, {"disable_bias_linear": True}, "disable-bias-linear", True),
        ({}, {"untie_embeddings_and_output_weights": True}, "untie-embeddings-and-output-weights", True),
        ({}, {"use_sandwich_norm": True}, "use-sandwich-norm", True),
        ({"disable_bias_linear": True}, BIASES, "add-qkv-bias", True),
        ({}, {"num_layers": 3}, "num-layers", True),
        ({}, {"num_layers": 5}, "num-layers", True),
        ({"noop_layers": ("1",)}, {"num_layers": 3}, "num-layers", True),
        ({"noop_layers": ("1",)}, {"noop_layers": ("2",)}, "num-layers", True),
        # Padding of the pipeline and no-op layers are not part of the model.
        ({"noop_layers": ("2", "3")}, {"num_layers": 2}, None, None),
        ({}, {"noop_layers": ("7",)}, None, None),
        ({}, {"norm_epsilon": 1e-3}, "norm-epsilon", False),
        (ROPE, {**ROPE, "rotary_base": 500.0}, "rotary-base", False),
        (ROPE, {**ROPE, "rotary_percent": 0.5}, "rotary-percent", False),
        (ROPE, {**ROPE, "rotary_interleaved": True}, "rotary-interleaved", False),
        ({}, {"rotary_base": 500.0, "rotary_percent": 0.5, "rotary_interleaved": True}, None, None),
        ({}, {"gelu_approximate": "none"}, "gelu-approximate", False),
        ({"swiglu": True}, {"swiglu": True, "gelu_approximate": "none"}, None, None),
        ({}, {"pre_tokens": 31}, "pre-tokens", False),
        ({}, {"pre_tokens": 32}, None, None),
        ({}, {"next_tokens": -1}, "next-tokens", False),
        ({}, {"next_tokens": 1}, None, None),
        ({"multi_latent_attention": True}, {}, "multi-latent-attention", True),
        ({"multi_latent_attention": True}, {"multi_latent_attention": True, "mscale": 2.0}, "mscale", False),
        ({"mscale": 2.0}, {}, None, None),
        ({**ROPE, "rope_type": "yarn"}, {**ROPE, "rope_type": "yarn", "beta_fast": 8.0}, "beta-fast", False),
        ({**ROPE, "rope_type": "longrope"}, ROPE, "rope-type", False),
        (LONGROPE, {**LONGROPE, "short_factor": ("1", "2")}, None, None),
        (LONGROPE, {**LONGROPE, "short_factor": ("1", "3")}, "short-factor", False),
        (LONGROPE, {**LONGROPE, "rotary_scaling_factor": 4.0}, "rotary-scaling-factor", False),
        (ROPE, {**ROPE, "short_factor": ("1", "3"), "rotary_scaling_factor": 4.0, "beta_fast": 8.0}, None, None),
        ({**ROPE, **SCALED}, {**ROPE, **SCALED, "rope_scaling_factor": 4.0}, "rope-scaling", False),
        (ROPE, {**ROPE, "rope_scaling_factor": 4.0}, None, None),
        ({}, SCALED, None, None),
        ({"squared_relu": True}, {"squared_relu": True, "gelu_approximate": "none"}, None, None),
        # "2" lists every second layer, as one without a window, without rotary positions, or with experts.
        (WINDOW, {**WINDOW, "window_attn_skip_freq": "2"}, "window-attn-skip-freq", False),
        ({**WINDOW, "window_attn_skip_freq": "2"}, {**WINDOW, "window_attn_skip_freq": "[1,0,1,0]"}, None, None),
        (WINDOW, {**WINDOW, "window_attn_skip_freq": "[1,1,1,1]"}, None, None),
        ({"next_tokens": -1}, {"next_tokens": -1, "window_attn_skip_freq": "2"}, "window-attn-skip-freq", False),
        ({}, {"window_attn_skip_freq": "2"}, None, None),
        (ROPE, {**ROPE, "no_rope_freq": "2"}, "no-rope-freq", False),
        ({**ROPE, "no_rope_freq": "2"}, {**ROPE, "no_rope_freq": "[0,1,0,1]"}, None, None),
        (ROPE, {**ROPE, "no_rope_freq": "[0,0,0,0]"}, None, None),
        ({}, {"no_rope_freq": "2"}, None, None),
        (EXPERTS, {**EXPERTS, "num_experts": 8}, "num-experts", True),
        (EXPERTS, {**EXPERTS, "moe_layer_freq": "2"}, "moe-layer-freq", True),
        ({**EXPERTS, "moe_layer_freq": "2"}, {**EXPERTS, "moe_layer_freq": "[1,0,1,0]"}, None, None),
        (EXPERTS, {**EXPERTS, "moe_router_topk": 1}, "moe-router-topk", False),
        (EXPERTS, {**EXPERTS, "moe_router_topk_scaling_factor": 1.0}, None, None),
        (EXPERTS, {**EXPERTS, "moe_router_topk_scaling_factor": 2.5}, "moe-router-topk-scaling-factor", False),
        ({}, {"moe_layer_freq": "2", "moe_router_topk": 1, "moe_router_topk_scaling_factor": 2.5}, None, None),
    ],
)
def test_models_that_weights_do_not_tell_apart(saved, ours, name, of_weights):
    for one, other in ((saved, ours), (ours, saved)):
        assert same_model(one, other) == name
        # With weights alone, options that change how the model uses them may differ.
        assert same_model(one, other, weights_only=True) == (name if of_weights else None)


def test_a_checkpoint_without_options_is_believed():
    require_same_model({}, Config(**PLAIN), Path("folder"), weights_only=False)
    require_same_model({"config": {"hidden_size": 32}}, Config(**PLAIN), Path("folder"), weights_only=False)


BALANCED = {"num_experts": 4, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def state_of(stages, **at):
    """The state of a rank at these coordinates that holds these stages (lists of layers) of a tied model."""
    config = Config(**PLAIN, **BALANCED, disable_bias_linear=True, bf16=True, vocab_size=8, init_method_std=0.5)
    config.set_vocabulary(8)
    models = [
        GPT(config, torch.device("cpu"), layers=layers, first=0 in layers, last=3 in layers).requires_grad_(True)
        for layers in stages
    ]
    parameters = {name: p for model in models for name, p in model.named_parameters()}
    mesh = SimpleNamespace(
        world=hal.SingleRankComm(),
        comm=lambda *names: hal.SingleRankComm(),
        at=dict.fromkeys(("tp", "cp", "dp", "edp"), 0) | at,
    )
    return ModelState(config, models, Optimizer(config, parameters), mesh)


@pytest.mark.parametrize("at, owns", [({}, True), ({"tp": 1}, False), ({"cp": 1}, False), ({"dp": 1}, False)])
def test_one_rank_of_a_stage_writes_the_biases_of_experts(at, owns):
    state, name = state_of([[0, 1, 2, 3]], **at), "decoder.layers.0.mlp.router.expert_bias"
    assert (name in state.tensors()) == owns and name in state.tensors(replicas=True)
    weight = "decoder.final_layernorm.weight"
    assert {weight, reader.FP32 + weight, f"optimizer.state.exp_avg.{weight}"} <= set(state.tensors())


def test_a_rank_with_both_ends_of_a_tied_model_stores_one_table_and_loads_two(tmp_path):
    first, second = state_of([[0, 1], [2, 3]]), state_of([[2, 3]])
    table, copy = (first.optimizer.main[name] for name in (WORD_EMBEDDING, OUTPUT_LAYER))
    table.fill_(0.5), copy.fill_(7.0)
    values = {**first.tensors(), **{n: x for n, x in second.tensors().items() if n not in first.tensors()}}
    assert OUTPUT_LAYER not in values and WORD_EMBEDDING in second.tensors(replicas=True), "under the table's name"
    writer.save(tmp_path, 1, values, {"iteration": 1})
    first.optimizer.owned = set()  # a rank also loads what another one writes
    first.load(tmp_path / "iter_0000001", moments=True)
    assert bool((table == 0.5).all()) and bool((copy == 0.5).all())
    assert all(bool((first.optimizer.model[n] == 0.5).all()) for n in (WORD_EMBEDDING, OUTPUT_LAYER))


def test_a_model_is_gathered_from_all_ranks():
    state = state_of([[0, 1, 2, 3]])
    state.world = hal.SingleRankComm()
    state.world.size = 2  # the other rank owns nothing
    model = state.gather([0, 1, 2, 3], torch.device("cpu"))
    expected = state.models[0].state_dict()
    assert model is not state.models[0] and model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
