"""Linear attention: the recurrence in chunks, the layer against megatron-core's, layouts, and its counted products."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import parallel_runs
import pytest
import torch
from model_options import GATED_DELTA_OPTIONS, sizes
from torch import Tensor, nn

from hal.model.config.command_line import build
from hal.model.config.flops import attention_weights, flops_per_token, visible_pairs
from hal.model.config.schema import Config, ConfigError
from hal.model.gpt.attention import SharedInputs
from hal.model.gpt.gated_delta_net import GatedDeltaNet, gated_delta_rule
from hal.model.gpt.layers import Init

SIZES = {**sizes(3, 32, 4, 16), "vocab_size": 101, "init_method_std": 0.2, **GATED_DELTA_OPTIONS}


def token_by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor) -> Tensor:
    """The recurrence as the module states it, float64."""
    state, results = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[3]):
        key, query = (x[:, :, :, t, :, None] for x in (k, q / q.shape[-1] ** 0.5))
        state = state * decay[..., t, None, None].exp()
        error = v[:, :, :, t] - (state * key).sum(-2)
        state = state + step[..., t, None, None] * key * error[..., None, :]
        results.append((state * query).sum(-2))
    return torch.stack(results, 3)


@pytest.mark.parametrize("length", [1, 64, 65, 200])
@pytest.mark.parametrize("alike", [False, True], ids=["random", "alike"])
def test_chunks_give_the_recurrence(length: int, alike: bool) -> None:
    """With keys that are all alike and hardly any decay, the powers of the triangular matrix are large."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        return torch.empty(*shape, dtype=torch.float64).uniform_(low, high, generator=generator)

    q, k = (nn.functional.normalize(draw(2, 3, 1, length, 16), dim=-1) for _ in range(2))
    k = k[:, :, :, :1].expand_as(k) if alike else k
    decay = draw(2, 3, 2, length, low=-0.01 if alike else -1.0, high=0.0)
    arguments = [q, k, draw(2, 3, 2, length, 8), decay, draw(2, 3, 2, length, low=0.0)]
    exact = [x.clone().requires_grad_() for x in arguments]
    right = token_by_token(*exact)
    single = [x.float().requires_grad_() for x in arguments]
    result = gated_delta_rule(*single)
    torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-6)
    upstream = draw(*right.shape)
    gradients = torch.autograd.grad(result, single, upstream.float())
    for mine, theirs in zip(gradients, torch.autograd.grad(right, exact, upstream)):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-5)


class _Linear(nn.Linear):
    """megatron-core's interface of a linear layer."""

    def __init__(self, n_in: int, n_out: int, **_: Any) -> None:
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class _Norm(nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


def megatrons(config: Config, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """megatron-core's layer of the same sizes on the CPU. Its kernels need Triton, and the deterministic path none."""
    module = pytest.importorskip("megatron.core.ssm.gated_delta_net")
    from megatron.core.transformer.transformer_config import TransformerConfig

    monkeypatch.setattr(module, "HAVE_FLA", True)
    monkeypatch.setattr(module, "l2norm", _normalised, raising=False)
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(module, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    names = "num_layers hidden_size num_attention_heads linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    names += "linear_num_value_heads linear_conv_kernel_dim experimental_attention_variant"
    theirs = TransformerConfig(
        **{name: getattr(config, name) for name in names.split()},
        linear_attention_freq=3,
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        deterministic_mode=True,
        layernorm_epsilon=config.norm_epsilon,
        use_cpu_initialization=True,
    )
    parts = module.GatedDeltaNetSubmodules(in_proj=_Linear, out_norm=_Norm, out_proj=_Linear)
    alone = SimpleNamespace(size=lambda: 1)
    layer: nn.Module = module.GatedDeltaNet(theirs, parts, 1, pg_collection=SimpleNamespace(tp=alone))
    return layer


def copy(mine: GatedDeltaNet, theirs: nn.Module, c: Config) -> None:
    """Rows grouped per key head -> megatron-core's order: all queries, all keys, all values, and so on."""
    per, k, v = mine.per_group, mine.key, mine.value

    def reordered(rows: Tensor, widths: tuple[int, ...]) -> Tensor:
        grouped = rows.view(c.linear_num_key_heads, -1, rows.shape[-1])
        return torch.cat([part.flatten(0, 1) for part in grouped.split(widths, 1)])

    theirs.in_proj.weight.copy_(reordered(mine.in_proj.weight, (k, k, per * v, per * v, per, per)))
    theirs.conv1d.weight.copy_(reordered(mine.conv_weight, (k, k, per * v))[:, None])
    theirs.A_log.copy_(mine.A_log)
    theirs.dt_bias.copy_(mine.dt_bias)
    theirs.out_norm.weight.copy_(mine.out_norm.weight)
    theirs.out_proj.weight.copy_(mine.linear_proj.weight)


def test_the_layer_is_megatrons(cpu_ref: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = Config(**SIZES)
    init = Init(3, torch.float32, torch.device("cpu"))
    mine, theirs = GatedDeltaNet(config, init, "layer", 0), megatrons(config, monkeypatch)
    with torch.no_grad():
        mine.out_norm.weight.uniform_(0.5, 1.5)
        mine.dt_bias.uniform_(-1.0, 1.0)
        copy(mine, theirs, config)
    x = torch.randn(70, 2, 32, generator=torch.Generator().manual_seed(1))
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    result, (expected, _) = mine(left, SharedInputs()), theirs(right, None)
    # The largest difference was 1.2e-5 with 60 seeds; results are up to 2.3.
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=2e-5)
    upstream = torch.randn_like(result)
    result.backward(upstream), expected.backward(upstream)
    torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.A_log.grad, theirs.A_log.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.dt_bias.grad, theirs.dt_bias.grad, rtol=1e-4, atol=1e-4)


def test_decays_and_convolutions_begin_as_megatrons() -> None:
    config = Config(**{**SIZES, "linear_num_key_heads": 256, "linear_num_value_heads": 512})
    layer = GatedDeltaNet(config, Init(3, torch.float32, torch.device("cpu")), "layer", 0)
    decay, bound = layer.A_log.exp(), 1 / 2  # of four inputs
    assert 1.0 <= decay.min() < 1.2 and 15.8 < decay.max() <= 16.0 and 8.0 < decay.mean() < 9.0
    assert layer.conv_weight.abs().max() <= bound and abs(layer.conv_weight.std() - bound / 3**0.5) < 0.01
    assert torch.equal(layer.dt_bias, torch.ones(512))


MODEL = {
    **parallel_runs.COMMON,
    **GATED_DELTA_OPTIONS,
    "linear_attention_freq": "[1,0,1,1]",
    "qk_layernorm": True,
    "apply_wd_to_qk_layernorm": True,
    "apply_layernorm_1p": True,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
    "weight_decay": 0.1,
    # Division by the lengths of queries and keys enlarges rounding errors where the weights are large.
    "init_method_std": 0.05,
    "lr": 3e-3,
}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "lr": 3e-3,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, options, layout",
    [
        pytest.param(2, {}, parallel_runs.TP2, id="tp2"),
        pytest.param(2, EXPERTS, {**parallel_runs.TP2, **parallel_runs.SP}, id="tp2-sp-experts"),
        pytest.param(2, EXPERTS, parallel_runs.PP2, id="pp2-experts", marks=pytest.mark.slow),
        pytest.param(2, {}, {"zero_stage": 3}, id="dp2-zero3", marks=pytest.mark.slow),
        pytest.param(1, {}, parallel_runs.RECOMPUTE, id="recomputed", marks=pytest.mark.slow),
    ],
)
def test_a_layout_trains_as_one_process(world: int, options: dict[str, Any], layout: dict[str, Any]) -> None:
    base = {**MODEL, **options}
    want = parallel_runs.steps(base, 6)
    parallel_runs.close(parallel_runs.on(world, {**base, **layout}, 6), want, 1e-5, 1e-4)


def test_products_are_counted() -> None:
    """Two layers with linear attention and one without."""
    c = Config(**SIZES)
    keys, values = 2 * 6, 4 * 10
    linear = 32 * (2 * keys + 2 * values + 2 * 4) + 4 * (2 * keys + values) + 4 * 4 * 10**2 + 32 * values
    assert attention_weights(c) == 32 * (2 * 4 * 8 + 2 * 2 * 8) + 4 * 8 * 32, "queries have gates"
    mlp, pairs = 3 * 32 * c.ffn_hidden_size, visible_pairs(16, None, 0) / 16
    products = 2 * linear + attention_weights(c) + 3 * mlp + 32 * c.padded_vocab_size
    assert flops_per_token(c) == 6.0 * (products + 4 * 2 * 8 * pairs)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"linear_attention_freq": None}, "needs --linear-attention-freq"),
        ({"linear_attention_freq": "[1,0]"}, "describes 2 layers, but --num-layers is 3"),
        ({"linear_num_value_heads": 3}, "--linear-num-value-heads 3 is not divisible by --linear-num-key-heads 2"),
        ({"linear_num_key_heads": 1, "tensor_model_parallel_size": 2}, "--linear-num-key-heads 1 is not divisible by"),
        ({"swiglu": False}, "give --swiglu"),
        (
            {"context_parallel_size": 2, "reset_attention_mask": True},
            "cannot follow --context-parallel-size 2, --reset-attention-mask",
        ),
        ({"fp8_format": "hybrid", "bf16": True}, "cannot follow --fp8-format"),
    ],
)
def test_contradictions(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build({"backend": "cpu_ref", **GATED_DELTA_OPTIONS, "num_layers": 3, "num_attention_heads": 4, **options})
