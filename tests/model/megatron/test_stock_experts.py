"""Stock megatron-core's mixture of experts without Transformer Engine: every dispatcher, both kinds of experts, and
layouts of two ranks."""

import zlib

import pytest
import torch
from small_models import LENGTH, VOCABULARY, config

import hal
from hal.model.megatron import gpt_block_spec, hal_device, join_world
from hal.testing.processes import run_processes


def experts(dispatcher, **more):
    """megatron-core's configuration of two layers with four experts."""
    return config(
        num_layers=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher,
        moe_ffn_hidden_size=32,
        add_bias_linear=False,
        **more,
    )


def losses(dispatcher, grouped=False, dtype=torch.float32):
    """Losses of three steps, from weights that depend only on their order. The products of grouped experts are stored
    side by side, those of others one by one."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(3)
    kind = experts(
        dispatcher,
        moe_grouped_gemm=grouped,
        moe_aux_loss_coeff=0.01,
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


@pytest.mark.parametrize("dispatcher", [pytest.param("allgather", marks=pytest.mark.slow), "alltoall"])
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


def trained(dispatcher, tp, ep, own_layers):
    """Losses of three steps of two sequences, on one rank of a layout, averaged over the data-parallel ranks; with
    megatron-core's own layers or HAL's."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    hal.use("cpu_ref")
    join_world()
    layout = {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1 if ep > 1 else tp,
    }
    with hal_device():
        parallel_state.initialize_model_parallel(**layout)
        model_parallel_cuda_manual_seed(3)
        kind = experts(
            dispatcher,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=0.1,
            sequence_parallel=tp > 1,
            finalize_model_grads_func=finalize_model_grads,
            **layout,
        )
        spec = get_gpt_layer_local_spec(num_experts=4) if own_layers else gpt_block_spec(kind)
        model = GPTModel(kind, spec, VOCABULARY, LENGTH)
        _fill_shards(model, parallel_state.get_tensor_model_parallel_rank(), tp, whole_experts=ep > 1)
        model = DistributedDataParallel(kind, DistributedDataParallelConfig(), model)
        replica, replicas = (
            f() for f in (parallel_state.get_data_parallel_rank, parallel_state.get_data_parallel_world_size)
        )
        tokens = torch.randint(0, VOCABULARY, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(LENGTH)[None]
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

        def forward(sequences, model):
            ids = next(sequences)
            loss = model(ids, positions, mask, labels=ids.roll(-1, 1)).mean()
            return loss, lambda loss: (loss, loss.detach().clone())

        result = []
        for _ in range(3):
            model.zero_grad_buffer()
            losses = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(tokens[replica::replicas]),
                model=model,
                num_microbatches=2 // replicas,
                seq_length=LENGTH,
                micro_batch_size=1,
                forward_only=False,
            )
            for parameter in model.parameters():
                parameter.data -= 0.5 * parameter.main_grad
            loss = torch.stack(losses).mean()
            torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            result.append(loss.item() / replicas)
    return result


def _fill_shards(model, rank, ranks, whole_experts):
    """Draws all weights of the whole model, and keeps those of this tensor-parallel rank."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        before, expert, after = name.partition(".local_experts.")
        shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
        if expert:
            local, after = after.split(".", 1)
            layer = model.decoder.layers[int(name.split(".")[2])]
            name = f"{before}.{layer.mlp.local_expert_indices[int(local)]}.{after}"
        if (whole_experts and expert) or not getattr(parameter, "tensor_model_parallel", False):
            parameter.data = _drawn(name, shape)
        else:
            shape[dim] *= ranks
            parameter.data = _drawn(name, shape).chunk(ranks, dim)[rank].clone()


def _drawn(name, shape):
    return 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", [pytest.param("allgather", marks=pytest.mark.nightly), "alltoall"])
def test_two_ranks_train_as_one(dispatcher):
    """With EP2, TP2, and both. Beside tensor parallelism megatron-core requires sequence parallelism, which only HAL's
    layers support without Transformer Engine."""
    (expected,) = run_processes(1, trained, dispatcher, 1, 1, True)
    assert expected[2] < expected[0]
    for tp, ep, own_layers in ((1, 2, True), (2, 1, False), (2, 2, False)):
        for result in run_processes(2, trained, dispatcher, tp, ep, own_layers):
            assert result == pytest.approx(expected, rel=2e-6)
