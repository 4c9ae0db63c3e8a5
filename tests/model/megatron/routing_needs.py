"""What each routed name is for: a piece of megatron-core that needs it, checking what it does with it.

Also what megatron-core's source says it uses, for the part that HAL supports.
"""

import ast
import re
from pathlib import Path

import torch


def forward_with_a_memory_buffer():
    from megatron.core.utils import GlobalMemoryBuffer

    assert GlobalMemoryBuffer().get_tensor((2, 3), torch.float32, "x").device.type == "cpu"


def timers():
    from megatron.core.timers import Timer

    timer = Timer("t")
    timer.start()
    timer.stop()
    assert timer.elapsed(reset=False) >= 0


def seeded_tracker():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 5)
    return tracker


def a_tracked_stream_starts_at_its_seed():
    before = torch.get_rng_state()
    tracker = seeded_tracker()
    assert torch.equal(tracker.get_states()["a"], torch.Generator().manual_seed(5).get_state())
    assert torch.equal(torch.get_rng_state(), before)


def a_fork_draws_from_its_own_stream():
    tracker, before = seeded_tracker(), torch.get_rng_state()
    with tracker.fork("a"):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before)


def grad_scaler():
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    assert ConstantGradScaler(4.0).scale.item() == 4.0


def _parameters():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    return [parameter]


def count_zeros():
    from megatron.core.optimizer.clip_grads import count_zeros_fp32

    assert count_zeros_fp32(_parameters(), torch.distributed.group.WORLD) == 0


def clip_by_norm():
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameters = _parameters()
    clip_grad_by_total_norm_fp32(parameters, 3.0, 6.0)
    assert torch.allclose(parameters[0].grad, torch.full((4,), 1.5))


def default_causal_mask():
    from megatron.core.transformer.utils import get_default_causal_mask

    assert get_default_causal_mask(2).tolist() == [[False, True], [False, False]]


def _shard(data):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(3))
    shard.data = data
    return shard


def parallel_load_of_a_shard_without_data():
    shard = _shard(None)
    shard.init_data("cuda")
    assert shard.data.device.type == "cpu"


def parallel_load_of_a_shard_without_data_for_a_round():
    # torch.empty by name; the default of ShardedTensor.init_data is another copy of it.
    from megatron.core.dist_checkpointing import exchange_utils

    made = exchange_utils.torch.empty(0, dtype=torch.float32, device="cuda")
    assert made.device.type == "cpu"
    parallel_load_of_a_shard_without_data()


def parallel_load_of_a_shard():
    from megatron.core.dist_checkpointing import exchange_utils

    taken, _ = exchange_utils._get_empty_tensor_for_exchange("s", {"s": _shard(torch.zeros(3))}, {}, {})
    assert taken.shape == (3,)


def broadcast_data():
    from megatron.core.tensor_parallel.data import broadcast_data

    given = {"x": torch.arange(6).view(2, 3)}
    assert torch.equal(broadcast_data(["x"], given, torch.int64)["x"], given["x"])


def gather_of_a_matrix():
    from megatron.core.tensor_parallel.utils import gather_split_1d_tensor

    assert gather_split_1d_tensor(torch.ones(2, 4), torch.distributed.group.WORLD).shape == (8,)


NEEDED_BY = {
    "torch.cuda.current_device": forward_with_a_memory_buffer,
    "torch.cuda.synchronize": timers,
    "torch.cuda.get_rng_state": a_tracked_stream_starts_at_its_seed,
    "torch.cuda.random.get_rng_state": a_fork_draws_from_its_own_stream,
    "torch.cuda.manual_seed": a_tracked_stream_starts_at_its_seed,
    "torch.cuda.default_generators": a_fork_draws_from_its_own_stream,
    "torch.cuda._lazy_call": a_fork_draws_from_its_own_stream,
    "torch.tensor": grad_scaler,
    "torch.zeros": count_zeros,
    "torch.ones": default_causal_mask,
    "torch.empty": parallel_load_of_a_shard_without_data_for_a_round,
    "torch.empty_like": parallel_load_of_a_shard,
    "torch.Tensor.cuda": broadcast_data,
    "torch.Tensor.type": clip_by_norm,
    "torch.distributed.all_gather_into_tensor": gather_of_a_matrix,
}

SCOPE = (
    "tensor_parallel",
    "pipeline_parallel/schedules.py",
    "pipeline_parallel/p2p_communication.py",
    "distributed/distributed_data_parallel.py",
    "distributed/param_and_grad_buffer.py",
    "distributed/finalize_model_grads.py",
    "optimizer/__init__.py",
    "optimizer/optimizer.py",
    "optimizer/distrib_optimizer.py",
    "optimizer/clip_grads.py",
    "optimizer/grad_scaler.py",
    "transformer/attention.py",
    "transformer/dot_product_attention.py",
    "transformer/transformer_layer.py",
    "transformer/transformer_block.py",
    "transformer/mlp.py",
    "transformer/module.py",
    "transformer/utils.py",
    "models/gpt/gpt_model.py",
    "models/common/embeddings",
    "models/common/language_module",
    "dist_checkpointing",
    "parallel_state.py",
    "timers.py",
)
"""The part of megatron-core that dense GPT training and checkpointing run through."""

UNUSED = {
    "torch.cuda.BFloat16Tensor": "class tuples of transformer/module.py, which guards.py replaces",
    "torch.cuda.FloatTensor": "the same",
    "torch.cuda.HalfTensor": "the same",
    "torch.cuda.CUDAGraph": "CUDA graphs",
    "torch.cuda._lazy_init": "CUDA graphs; never touched, for torch.compile believes it",
    "torch.cuda.device": "before torch 1.8",
    "torch.cuda.OutOfMemoryError": "offloading of activations in the MLP's fused path",
    "torch.cuda.Stream": "more than one instance of the distributed optimizer",
    "torch.cuda.stream": "the same",
    "torch.cuda.default_stream": "the same",
    "torch.cuda.amp.custom_bwd": "before torch 2.4",
    "torch.cuda.amp.custom_fwd": "the same",
    "torch.cuda.device_count": "the worker of asynchronous saving; never touched",
    "torch.cuda.set_device": "the same",
    "torch.cuda.empty_cache": "offloading, and Megatron's FSDP",
    "torch.cuda.get_device_properties": "inference layers",
    "torch.cuda.is_available": "a check whose answer must stay no",
    ".is_cuda": "moving the optimizer to the host and back",
}
"""Names in that source which a supported run does not reach, and why not."""


def names_in_source(core: Path) -> dict[str, list[str]]:
    """Every torch name of an NVIDIA device that the files of SCOPE use -> where."""
    found: dict[str, list[str]] = {}
    for part in SCOPE:
        path = core / part
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        assert all(f.exists() for f in files) and files, f"megatron-core has no {part} any more"
        for file in files:
            for line, name in _names(ast.parse(file.read_text())):
                found.setdefault(name, []).append(f"{file.relative_to(core)}:{line}")
    return found


_DOTTED = re.compile(r"torch\.cuda(\.\w+)+")


def _names(tree):
    inner = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            dotted = _DOTTED.fullmatch(text)
            part = dotted and id(node) in inner and _DOTTED.fullmatch(ast.unparse(inner[id(node)]))
            if (dotted and not part) or text == "torch.distributed.all_gather_into_tensor":
                yield node.lineno, text
            elif node.attr in ("cuda", "is_cuda") and text != "torch.cuda":
                yield node.lineno, "torch.Tensor.cuda" if node.attr == "cuda" else ".is_cuda"
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch.cuda.") and "Tensor" in node.value:
            yield node.lineno, "torch.Tensor.type"  # what it compares the answer with
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "device" and getattr(keyword.value, "value", None) == "cuda":
                    yield node.lineno, ast.unparse(node.func)
