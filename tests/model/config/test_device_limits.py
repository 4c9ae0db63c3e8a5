"""What a device cannot store is refused, with what to change, before anything is built."""

import pytest
import torch

import hal
from hal.mesh import Layout
from hal.model.config.device_limits import device_problems
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.schema import Config

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 64, "micro_batch_size": 2}


def problems(capabilities, **options):
    config = Config(**{**SIZES, **options}, global_batch_size=4, train_iters=1, lr=1e-3)
    config.set_vocabulary(1000)
    world = config.tensor_model_parallel_size * config.context_parallel_size
    layout = make_parallel_layout(config, world)
    assert layout.layout == Layout.of_world(world, tp=config.tensor_model_parallel_size, cp=world // layout.layout.tp)
    return list(device_problems(config, layout, capabilities))


def test_a_device_without_limits_has_no_problems():
    assert problems(hal.Capabilities(), bf16=True, use_flash_attn=False, reset_attention_mask=True) == []


def test_a_missing_dtype_is_named_with_those_there_are():
    capabilities = hal.Capabilities(dtypes=frozenset({torch.float32, torch.bfloat16, torch.int64}))
    (problem,) = problems(capabilities, fp16=True)
    assert "float16 cannot be stored" in problem and "bfloat16, float32;" in problem and "--bf16" in problem
    assert problems(capabilities, bf16=True) == problems(capabilities) == []


@pytest.mark.parametrize(
    ("options", "count", "shape", "remedy"),
    [
        ({}, 64 * 2 * 1024, "the logits [64, 2, 1024]", "--micro-batch-size"),
        ({"tensor_model_parallel_size": 2}, 64 * 2 * 512, "the logits [64, 2, 512]", "--tensor-model-parallel-size"),
        ({"context_parallel_size": 2}, 32 * 2 * 1024, "the logits [32, 2, 1024]", "--context-parallel-size"),
        ({"seq_length": 2, "micro_batch_size": 1}, 1024 * 32, "the rows of the embedding table [1024, 32]", "--tensor"),
        ({"use_flash_attn": False, "seq_length": 512}, 2 * 4 * 512**2, "the attention scores", "--use-flash-attn"),
        ({"ffn_hidden_size": 4096, "swiglu": True}, 64 * 2 * 8192, "the MLP's activations", "--micro-batch-size"),
        ({"num_experts": 64, "ffn_hidden_size": 512}, 64 * 512 * 32, "the experts [64, 512, 32]", "--expert-model"),
        ({"reset_attention_mask": True, "seq_length": 2048}, 2 * 2048**2, "the masks", "--seq-length"),
    ],
)
def test_the_largest_tensor_decides(options, count, shape, remedy):
    assert problems(hal.Capabilities(max_elements=count), **options) == []
    (problem,) = problems(hal.Capabilities(max_elements=count - 1), **options)
    assert shape in problem and f"{count:,} elements" in problem and remedy in problem


def test_graphs_need_a_device_that_records_them():
    none = {"cuda_graphs": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    (problem,) = problems(hal.Capabilities(), **none)
    assert "cannot record graphs" in problem and "remove it" in problem
    assert problems(hal.Capabilities(graphs=True), **none) == problems(hal.Capabilities()) == []


def test_all_problems_are_reported_at_once():
    capabilities = hal.Capabilities(dtypes=frozenset({torch.float32}), max_elements=64 * 2 * 96 - 1)
    found = problems(capabilities, bf16=True)
    assert len(found) == 5  # dtype, logits, the MLP's activations, queries with keys and values, the embedding table
