"""megatron-core's layers on HAL's ops against its own: values, gradients, checkpoints, and refused options."""

import types

import pytest
import small_models
import torch

from hal import HalError
from hal.model.megatron import hal_device, hal_ops


def config(**overrides):
    return small_models.config(**{"num_layers": 2, "num_attention_heads": 4, **overrides})


@pytest.fixture
def routed(world):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with hal_device():
        model_parallel_cuda_manual_seed(7)
        yield


def test_the_provider_offers_what_megatron_core_asks_of_one():
    from megatron.core.models.backends import BackendSpecProvider

    from hal.model.megatron import HalSpecProvider

    abstract = {n for n, v in vars(BackendSpecProvider).items() if getattr(v, "__isabstractmethod__", False)}
    assert abstract <= set(dir(HalSpecProvider))
    provider = HalSpecProvider()
    assert provider.core_attention().__name__ == "HalCoreAttention"
    assert provider.layer_norm(rms_norm=True).__name__ == provider.layer_norm(for_qk=True).__name__ == "HalNorm"


def test_the_spec_option_finds_a_module_spec():
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    assert isinstance(import_module(("hal.model.megatron", "gpt_layer_spec")), ModuleSpec)


def attention(**overrides):
    from megatron.core.transformer.enums import AttnMaskType

    from hal.model.megatron.core_attention import HalCoreAttention

    mask_type = overrides.pop("mask_type", AttnMaskType.causal)
    return HalCoreAttention(config(**overrides), 1, mask_type, "self")


def qkv(groups=4, length=6):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(length, 2, n, 4, generator=draw, requires_grad=True) for n in (4, groups, groups)]


@pytest.mark.parametrize("groups", [4, 2])
def test_core_attention_is_megatron_cores_with_grouped_heads_and_its_gradients(groups, routed):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    model_config = config(num_query_groups=groups)
    theirs = DotProductAttention(model_config, 1, AttnMaskType.causal, "self")
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]
    results = []
    for module, attention_mask in ((theirs, mask), (attention(num_query_groups=groups), None)):
        inputs = qkv(groups)
        out = module(*inputs, attention_mask)
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        results.append([out, *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (3, 1), (-1, 1)])
def test_windows_hide_what_lies_outside(window, routed):
    from megatron.core.transformer.enums import AttnMaskType

    pre, next_ = window
    i, j = torch.arange(6)[:, None], torch.arange(6)
    hidden = (j > i + next_) | ((j < i - pre) if pre >= 0 else torch.zeros(6, 6, dtype=torch.bool))
    windowed = attention(window_size=window, mask_type=AttnMaskType.no_mask)
    masked = attention(mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(windowed(*qkv(), None), masked(*qkv(), hidden))
    causal = attention(window_size=window)
    torch.testing.assert_close(causal(*qkv(), None), masked(*qkv(), hidden | (j > i)))


def test_a_given_mask_hides_beyond_the_causal_one(routed):
    documents = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    documents[..., 3:, :3] = True
    out = attention()(*qkv(), documents)
    q, k, v = (x[3:] for x in qkv())
    torch.testing.assert_close(out[3:], attention()(q, k, v, None))


def test_packed_sequences_are_attended_apart(routed):
    q, k, v = (x[:, 0] for x in qkv())
    cu = torch.tensor([0, 2, 6])
    packed = types.SimpleNamespace(cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=None)
    out = attention()(q, k, v, None, packed_seq_params=packed)
    for part in (slice(0, 2), slice(2, 6)):
        separate = attention()(*(x[part, None] for x in (q, k, v)), None)
        torch.testing.assert_close(out[part], separate[:, 0])


def test_dropout_follows_megatron_cores_generator(routed):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    module = attention(attention_dropout=0.5)
    states = get_cuda_rng_tracker().get_states()
    first, second = module(*qkv(), None), module(*qkv(), None)
    assert not torch.equal(first, second)
    get_cuda_rng_tracker().set_states(states)
    assert torch.equal(module(*qkv(), None), first)
    module.eval()
    torch.testing.assert_close(module(*qkv(), None), attention()(*qkv(), None))


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_softmax_offsets_are_megatron_cores_with_their_gradients(kind, routed):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    theirs = DotProductAttention(config(softmax_type=kind), 1, AttnMaskType.causal, "self")
    ours, offsets = attention(softmax_type=kind), torch.tensor([-1.0, 0.5, 2.0, 0.0])
    names = [[name for name, _ in module.named_parameters()] for module in (theirs, ours)]
    assert names[0] == names[1] == (["softmax_offset"] if kind == "learnable" else [])
    assert ours.sharded_state_dict("x.").keys() == {f"x.{name}" for name in names[0]}
    results = []
    for module, mask in ((theirs, torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]), (ours, None)):
        if kind == "learnable":
            module.softmax_offset.data.copy_(offsets)
        inputs = [*qkv(), *module.parameters()]
        out = module(*inputs[:3], mask)
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        results.append([out, *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(results[1][0], attention()(*qkv(), None), atol=1e-3)


@pytest.mark.parametrize("shape", [(6, 6), (1, 4, 6, 6), (2, 1, 6, 6)])
def test_a_bias_is_added_to_the_scaled_scores(shape, routed):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    q, k, v = qkv()
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) / 2 + bias
    probs = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    want = torch.einsum("bnij,jbnd->ibnd", probs, v).flatten(2)
    torch.testing.assert_close(attention()(q, k, v, None, attention_bias=bias), want)


def test_what_attention_lacks_is_refused(routed):
    q, k, v = (x[:, 0] for x in qkv())
    cu = torch.tensor([0, 2, 6])
    packed = types.SimpleNamespace(cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=None)
    with pytest.raises(HalError, match="no attention_bias for packed sequences"):
        attention()(q, k, v, None, attention_bias=torch.zeros(6, 6), packed_seq_params=packed)
    with pytest.raises(HalError, match="softmax_type='softmax-two'"):
        attention(softmax_type="softmax-two")


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_are_torchs_and_mark_sequence_parallel_parameters(kind, routed):
    from hal.model.megatron.core_layers import HalNorm

    x = torch.randn(3, 2, 16)
    torch.testing.assert_close(HalNorm(config(normalization=kind), 16)(x), getattr(torch.nn, kind)(16, eps=1e-5)(x))
    zero = HalNorm(config(normalization=kind, layernorm_zero_centered_gamma=True), 16)
    torch.testing.assert_close(zero(x), HalNorm(config(normalization=kind), 16)(x))
    assert not zero.weight.any() and zero.weight.sequence_parallel is False
    with pytest.raises(HalError, match="'L2Norm'"):
        HalNorm(types.SimpleNamespace(normalization="L2Norm"), 16)


@pytest.mark.parametrize("activation, gated", [("silu", True), ("gelu", True), ("gelu", False)])
def test_the_mlp_is_megatron_cores(activation, gated, routed):
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    from hal.model.megatron.core_layers import HalMLP

    model_config = config(activation_func=getattr(torch.nn.functional, activation), gated_linear_unit=gated)
    local = LocalSpecProvider()
    parts = MLPSubmodules(linear_fc1=local.column_parallel_linear(), linear_fc2=local.row_parallel_linear())
    theirs, ours = MLP(model_config, parts, ffn_hidden_size=model_config.ffn_hidden_size), HalMLP(model_config, parts)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 2, 16)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])


def test_an_activation_hal_has_not_is_refused(routed):
    from hal.model.megatron.core_layers import _activation

    with pytest.raises(HalError, match="not relu"):
        _activation(config(activation_func=torch.nn.functional.relu))
    with pytest.raises(HalError, match="clamping"):
        _activation(config(gated_linear_unit=True, activation_func_clamp_value=1.0))


@pytest.mark.parametrize(
    "options", [{"multi_latent_attention": True}, {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 1, 1]}], ids=str
)
def test_what_the_layers_do_not_carry_is_refused(options, routed):
    from megatron.core.models.gpt.gpt_model import GPTModel

    from hal.model.megatron import gpt_block_spec

    model_config = config()
    for name, value in options.items():
        setattr(model_config, name, value)
    with pytest.raises(HalError, match=r"trains? another model"):
        GPTModel(model_config, gpt_block_spec(model_config), 32, 8)


def test_bias_dropout_add_drops_while_training_only(routed):
    from hal.model.megatron.core_layers import get_bias_dropout_add

    x, bias, residual = torch.randn(4, 2, 16), torch.randn(16), torch.randn(4, 2, 16)
    torch.testing.assert_close(get_bias_dropout_add(False, True)((x, bias), residual, 0.5), residual + x + bias)
    dropped = get_bias_dropout_add(True, True)((x, bias), residual, 0.5) - residual
    kept = dropped.abs() > 1e-6
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], (2 * (x + bias))[kept])


def test_hal_ops_stand_only_inside(routed):
    from megatron.core import optimizer
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import transformer_block

    before = transformer_block.LayerNormImpl, optimizer.Adam, dict(vars(layers))
    with hal_ops():
        assert transformer_block.LayerNormImpl.__name__ == "HalNorm" and optimizer.Adam.__name__ == "HalAdam"
        assert layers._grad_accum_fusion_available
    assert (transformer_block.LayerNormImpl, optimizer.Adam, dict(vars(layers))) == before


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_to_main_gradients(routed, sums):
    """megatron-core's own layer with gradient_accumulation_fusion, which otherwise needs Apex."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    model_config = config(gradient_accumulation_fusion=True, params_dtype=torch.bfloat16)
    with hal_ops():
        layer = ColumnParallelLinear(16, 24, config=model_config, init_method=torch.nn.init.normal_, bias=True)
        start = torch.randn(24, 16).to(sums)
        layer.weight.main_grad = start.clone()
        x, dy = (torch.randn(8, 2, n, dtype=torch.bfloat16) for n in (16, 24))
        (layer(x)[0] * dy).sum().backward()
    product = dy.flatten(0, 1).float().t() @ x.flatten(0, 1).float()
    assert layer.weight.grad is None
    # A small product is rounded to bfloat16 before it is added; a sum stored in bfloat16 is rounded afterwards.
    error = 2**-8 * (1 if sums == torch.float32 else 2) * float(product.abs().max())
    torch.testing.assert_close(layer.weight.main_grad.float(), start.float() + product, rtol=0, atol=error)


def test_the_loss_is_megatron_cores(routed):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from hal.model.megatron.op_patches import cross_entropy

    logits, target = torch.randn(5, 2, 32), torch.randint(0, 32, (5, 2))
    torch.testing.assert_close(cross_entropy(logits.clone(), target), vocab_parallel_cross_entropy(logits, target))


def test_adamw_steps_as_torchs_and_its_state_is_interchangeable(cpu_ref):
    from hal.model.megatron.op_patches import HalAdam

    start = torch.randn(7, generator=torch.Generator().manual_seed(0))
    a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    ours, theirs = HalAdam([a], **options), torch.optim.AdamW([b], **options)
    for step in range(4):
        if step == 2:  # halfway they change states
            mine, other = ours.state_dict(), theirs.state_dict()
            ours.load_state_dict(other)
            theirs.load_state_dict(mine)
        a.grad = b.grad = torch.sin(start + step)
        ours.step()
        theirs.step()
        torch.testing.assert_close(a, b)
    with pytest.raises(HalError, match="coupled weight decay"):
        HalAdam([a], adam_w_mode=False)
    for name in ("amsgrad", "maximize"):
        with pytest.raises(HalError, match=f"does not support {name}"):
            HalAdam([a], **{name: True})
