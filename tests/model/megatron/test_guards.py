"""Settings with which megatron-core fails or gives wrong results are refused, and the message says what to do."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_models import LENGTH, VOCABULARY, chunks, config, named
from torch.multiprocessing.reductions import StorageWeakRef

import hal
from hal import HalError
from hal.model.megatron import gpt_block_spec, hal_device
from hal.model.megatron.guards import TESTED, refuse_crossed_messages
from hal.testing.processes import run_processes

MICROBATCHES = 4


def train(model_config, schedule):
    """({name: gradient} of this stage, losses) of one step of four microbatches by the schedule."""
    models = chunks(model_config)

    def forward(numbers, model):
        draw = torch.Generator().manual_seed(next(numbers))
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=draw)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        output = model(tokens, torch.arange(LENGTH).expand(2, -1), mask, labels=tokens.roll(-1, 1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})

    losses = schedule(
        forward_step_func=forward,
        data_iterator=[iter(range(MICROBATCHES)) for _ in models] if len(models) > 1 else iter(range(MICROBATCHES)),
        model=models if len(models) > 1 else models[0],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    grads = {name: parameter.grad for model in models for name, parameter in named(model)}
    return grads, [entry["loss"] for entry in losses]


def interleaved():
    """On each of two stages: the text of the error, and the worst relative error of gradients and losses against one
    process, with the refused flags and with the flags that the error recommends."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    hal.use("cpu_ref")
    hal.backend().comm()
    with hal_device():
        ps.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(1)
        grads, losses = train(config(), schedules.get_forward_backward_func())
        ps.destroy_model_parallel()

        ps.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
        sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
        schedule = schedules.get_forward_backward_func()
        with pytest.raises(HalError) as refused:
            train(config(**sizes), schedule)

        def error(flags, schedule):
            own, mine = train(config(**sizes, **flags), schedule)
            worst = max(((own[n] - grads[n]).norm() / grads[n].norm()).item() for n in own if grads[n].norm() > 1e-4)
            return max([worst, *(abs(a - b) / b for a, b in zip(mine, losses, strict=bool(mine)))])

        wrong = error({}, schedule.__wrapped__)
        right = error({"overlap_p2p_comm": True, "batch_p2p_comm": False}, schedule)
        ps.destroy_model_parallel()
    return str(refused.value), wrong, right


def test_interleaving_over_two_stages_by_default_flags_is_refused_and_would_be_wrong():
    results = run_processes(2, interleaved)
    assert all("overlap_p2p_comm=True and batch_p2p_comm=False" in text for text, _, _ in results)
    assert max(wrong for _, wrong, _ in results) > 0.01
    assert max(right for _, _, right in results) <= 1e-5, results


def test_only_crossed_messages_are_refused():
    with pytest.raises(HalError, match="both go to the same process"):
        refuse_crossed_messages(2, True, False)
    refuse_crossed_messages(2, False, True)
    refuse_crossed_messages(4, True, False)


def late():
    """Rank 0 sends an output and frees it immediately, as the interleaved schedule does; rank 1 receives it later.

    Returns the received values, as (smallest, largest)."""
    from megatron.core.pipeline_parallel import schedules

    hal.use("cpu_ref")
    hal.backend().comm()
    with hal_device():
        out = torch.full((1 << 20,), 3.0)
        if dist.get_rank() == 0:
            under_way = dist.isend(out, 1)
            schedules.deallocate_output_tensor(out, deallocate_pipeline_outputs=True)
            assert out.numel() == 1
            over_it = [torch.full((1 << 20,), float("nan")) for _ in range(8)]
            dist.barrier()
            under_way.wait()
            del over_it
        else:
            out.zero_()
            dist.barrier()
            dist.irecv(out, 0).wait()
    return out.min().item(), out.max().item()


def test_an_output_that_is_being_sent_is_not_freed():
    assert run_processes(2, late)[1] == (3.0, 3.0)


def test_outputs_are_freed_after_a_few_sends(cpu_ref):
    from megatron.core.pipeline_parallel import schedules

    with hal_device():
        outputs = [torch.ones(1000) for _ in range(6)]
        storages = [StorageWeakRef(out.untyped_storage()) for out in outputs]
        for out in outputs:
            schedules.deallocate_output_tensor(out, deallocate_pipeline_outputs=True)
        assert [h.expired() for h in storages] == [True, True, False, False, False, False]
        kept = torch.ones(1000)
        schedules.deallocate_output_tensor(kept, deallocate_pipeline_outputs=False)
        assert kept.numel() == 1000
    assert all(h.expired() for h in storages)


@pytest.fixture
def routed(world):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with hal_device():
        model_parallel_cuda_manual_seed(1)
        yield


def test_autocast_that_torch_would_drop_is_refused(routed):
    from megatron.core.pipeline_parallel import schedules

    train(config(), schedules.forward_backward_no_pipelining)
    with pytest.raises(HalError, match="train in another precision"):
        train(config(enable_autocast=True, autocast_dtype=torch.bfloat16), schedules.forward_backward_no_pipelining)


def test_another_version_than_the_tested_one_is_named(cpu_ref, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.0")
    with pytest.warns(UserWarning, match=r"megatron-core 0.99.0 is installed.*tested with 0.16.1"), hal_device():
        pass


def test_the_spec_of_bert_that_needs_an_nvidia_device_can_be_imported_but_not_used(cpu_ref):
    with hal_device():
        from megatron.core.models.bert.bert_layer_specs import bert_layer_with_transformer_engine_spec as spec
    with pytest.raises(HalError, match="--spec local"):
        print(spec.submodules)


def test_the_tested_version_is_the_pinned_one():
    pins = re.findall(r"megatron-core==([\d.]+)", (Path(__file__).parents[3] / "setup.cfg").read_text())
    assert set(pins) == {TESTED}


def test_a_writer_that_would_hang_is_refused(cpu_ref):
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    own = vars(AsyncCallsQueue)["__init__"]
    with hal_device():
        assert AsyncCallsQueue().persistent is False
        with pytest.raises(HalError, match="the first save would hang"):
            AsyncCallsQueue(persistent=True)
    assert vars(AsyncCallsQueue)["__init__"] is own


def test_dynamic_batches_need_an_nvidia_device_and_static_ones_do_not(cpu_ref):
    from megatron.core.inference import communication_utils
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    with hal_device():
        with pytest.raises(HalError, match=r"flash-attn.*gpt_static_inference\.py"):
            DynamicInferenceContext(
                params_dtype=torch.float32,
                num_layers=1,
                kv_channels=4,
                num_attention_heads=1,
                max_sequence_length=8,
                buffer_size_gb=0.1,
            )
        communication_utils._is_cuda(torch.zeros(1))
        with pytest.raises(AssertionError, match="meta instead of cpu"):
            communication_utils._is_cuda(torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    "options",
    [{"context_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}],
    ids=["context", "sequence"],
)
def test_what_only_hals_layers_have_is_refused_by_the_name_of_the_option_that_helps(options, routed):
    """The sizes come from the configuration; the layers are built in one process."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    assert isinstance(WrappedTorchNorm(config(), 16), torch.nn.LayerNorm)
    model_config = config(**options)
    with pytest.raises(HalError, match=r"--spec hal\.model\.megatron gpt_layer_spec, .* gpt_block_spec\(config\)"):
        chunks(model_config)
    if "sequence_parallel" in options:
        assert GPTModel(model_config, gpt_block_spec(model_config), VOCABULARY, LENGTH) is not None
