"""Stock megatron-core's mixture of experts without Transformer Engine: every dispatcher and both kinds of experts."""

import zlib

import pytest
import torch
from small_models import LENGTH, VOCABULARY, config

from hal.model.megatron import hal_device


def losses(dispatcher, grouped=False, dtype=torch.float32):
    """Losses of three steps, from weights that depend only on their order. The products of grouped experts are stored
    side by side, those of others one by one."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(3)
    kind = config(
        num_layers=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=grouped,
        moe_aux_loss_coeff=0.01,
        moe_ffn_hidden_size=32,
        add_bias_linear=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=grouped)
    model = GPTModel(kind, spec, VOCABULARY, LENGTH)
    _fill(model)
    model.to(torch.device("cuda"), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()
    positions = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    result = []
    for _ in range(3):
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def _fill(model):
    """Draws all weights; those of expert e are the same in both forms of storage."""

    def drawn(seed, *shape):
        return 0.2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    for name, parameter in model.named_parameters():
        if "norm" not in name and "experts" not in name:
            parameter.data = drawn(zlib.crc32(name.encode()), *parameter.shape)
    for layer, module in enumerate(model.decoder.layers):
        experts = module.mlp.experts
        for e in range(4):
            first, second = drawn(100 + 10 * layer + e, 32, 16), drawn(200 + 10 * layer + e, 16, 32)
            if hasattr(experts, "weight1"):
                experts.weight1.data.view(4, 16, 32)[e] = first.t()
                experts.weight2.data.view(4, 32, 16)[e] = second.t()
            else:
                experts.local_experts[e].linear_fc1.weight.data = first
                experts.local_experts[e].linear_fc2.weight.data = second


def test_both_dispatchers_train_alike(world):
    with hal_device():
        expected = losses("allgather")
        assert losses("alltoall") == pytest.approx(expected, rel=1e-6)
    assert expected[2] < expected[0]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_grouped_products_are_those_of_every_expert(dispatcher, world):
    """megatron-core computes them in bfloat16 only."""
    with hal_device():
        expected = losses(dispatcher, dtype=torch.bfloat16)
        assert losses(dispatcher, grouped=True, dtype=torch.bfloat16) == pytest.approx(expected, rel=4e-3)
    assert expected[2] < expected[0]


def test_the_packages_that_are_replaced_are_restored(cpu_ref):
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    before = grouped_gemm_util.ops, hasattr(moe_utils, "te_general_gemm")
    with hal_device():
        assert grouped_gemm_util.grouped_gemm_is_available() and moe_utils.te_general_gemm is None
    assert (grouped_gemm_util.ops, hasattr(moe_utils, "te_general_gemm")) == before
