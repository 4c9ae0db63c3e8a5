"""Every reference to an NVIDIA device in megatron-core's source, and how HAL handles it.

The whole installed package is read, except `OUT_OF_REACH`. Each name must be routed (`NAMES`) or listed in `HARMLESS`
for the file that uses it. Names that are neither, and entries that no longer occur, are reported as complaints.
"""

import ast
import re
from pathlib import Path

from hal.model.megatron import CORE
from hal.model.megatron.cuda_patches import NAMES

_STREAMS = "more than one instance of the distributed optimizer: refused by torch, which has no such stream"
_A2A = "overlap of mixture of experts' exchange with the computation"
_STRAGGLERS = "StragglerDetector, which switches itself off without an NVIDIA device"
_RL = "emptying the device between phases of reinforcement learning: without an NVIDIA device nothing happens"
_GRAPHS = "CUDA graphs"
_CLASSES = "one of the classes by which tensors are told apart, which guards.py replaces"

OUT_OF_REACH = {
    "datasets/data_schedule.py": "hybrid context parallelism, which needs Transformer Engine",
    "distributed/fsdp": "Megatron's FSDP",
    "distributed/torch_fully_sharded_data_parallel.py": "torch's FSDP on a mesh of NVIDIA devices",
    "energy_monitor.py": "NVIDIA's energy counters",
    "export": "export to TensorRT-LLM",
    "extensions": "Transformer Engine",
    "fp8_utils.py": "FP8, which needs Transformer Engine",
    "full_cuda_graph.py": _GRAPHS,
    "fusions/fused_indices_converter.py": "a Triton kernel of mixture of experts",
    "fusions/fused_mla_yarn_rope_apply.py": "a Triton kernel of multi-latent attention",
    "fusions/fused_pad_routing_map.py": "a Triton kernel of mixture of experts",
    "inference": "inference engines",
    "models/bert": "BERT",
    "models/common/model_chunk_schedule_plan.py": _A2A,
    "models/gpt/fine_grained_callables.py": _A2A,
    "models/vision": "vision models",
    "nccl_allocator.py": "buffers registered with NCCL (nccl_ub)",
    "optimizer/cpu_offloading": "an optimizer divided between host and NVIDIA device",
    "pipeline_parallel/bridge_communicator.py": "pipelines between models of different layouts",
    "pipeline_parallel/combined_1f1b.py": _A2A,
    "pipeline_parallel/fine_grained_activation_offload.py": "moving activations to the host over NVIDIA streams",
    "pipeline_parallel/hybrid_cp_schedule.py": "hybrid context parallelism, which needs Transformer Engine",
    "resharding": "moving weights between layouts while running, over NVSHMEM",
    "ssm": "Mamba and gated delta nets",
    "tensor_parallel/inference_layers.py": "inference engines",
    "transformer/cuda_graphs.py": _GRAPHS,
    "transformer/custom_layers": "Triton kernels that do not depend on the batch",
    "transformer/experimental_attention_variant": "sparse attention",
    "transformer/fsdp_dtensor_checkpoint.py": "Megatron's FSDP",
}
"""Files and folders of megatron-core that a GPT on HAL does not use, and their purpose."""

HARMLESS = {
    "datasets/blended_megatron_dataset_builder.py": {
        "torch.cuda.device_count": "how many threads build datasets, where none counts as one; never touched",
    },
    "dist_checkpointing/exchange_utils.py": {"init_data('cuda')": "makes its tensor by torch.empty, which is routed"},
    "dist_checkpointing/strategies/async_utils.py": {
        "torch.cuda.device_count": "the persistent writer's process, which guards.py refuses; never touched",
        "torch.cuda.set_device": "the same process",
    },
    "dist_checkpointing/strategies/fully_parallel.py": {"'torch.cuda.synchronize'": "the label of a time measured"},
    "dist_checkpointing/strategies/torch.py": {
        "torch.cuda.is_available": "whether to look for Transformer Engine: the answer must stay no",
    },
    "distributed/distributed_data_parallel.py": {"torch.cuda.Stream": _STREAMS, "torch.cuda.empty_cache": _RL},
    "distributed/param_and_grad_buffer.py": {
        "torch.cuda.stream": _STREAMS,
        "torch.cuda.default_stream": _STREAMS,
    },
    "model_parallel_config.py": {"'nccl'": "how Transformer Engine starts its overlap of communication"},
    "optimizer/optimizer.py": {".is_cuda": _RL, "torch.cuda.empty_cache": _RL},
    "parallel_state.py": {
        "torch.distributed.ProcessGroupNCCL.Options": "only with a file of NCCL's options",
        "'nccl'": "a check of the transport that the caller names for pipeline groups",
    },
    "pipeline_parallel/schedules.py": {"torch.autocast": "enable_autocast, which guards.py refuses"},
    "pipeline_parallel/utils.py": {
        "torch.cuda.Event": _A2A,
        "torch.cuda.Stream": _A2A,
        "torch.cuda.current_stream": _A2A,
        "torch.cuda.stream": _A2A,
        "torch.cuda.nvtx.range_pop": _A2A,
        "torch.cuda.nvtx.range_push": _A2A,
    },
    "tensor_parallel/layers.py": {
        "partial('cuda')": "custom_fwd and custom_bwd act inside autocast only, which guards.py refuses",
        "torch.cuda.amp.custom_bwd": "before torch 2.4",
        "torch.cuda.amp.custom_fwd": "before torch 2.4",
    },
    "tensor_parallel/random.py": {
        "'cuda'": "which device's generator is meant: this process has one",
        "torch.device": "the same",
        "torch._C._cuda_setRNGState": "before torch had generators",
        "torch.cuda.device": "before torch had generators",
        "torch.cuda.CUDAGraph": _GRAPHS,
        "torch.cuda._lazy_init": "CUDA graphs; never touched, for torch.compile believes it",
    },
    "transformer/moe/token_dispatcher.py": {"torch.device": "an argument of Tensor.to, which is routed"},
    "transformer/moe/moe_utils.py": {".is_cuda": "copies of counts to the host, which are made elsewhere without it"},
    "transformer/mlp.py": {
        "torch.cuda.OutOfMemoryError": "an exception that every torch has",
        "torch.cuda.empty_cache": "after that exception; without an NVIDIA device nothing happens",
    },
    "transformer/module.py": {
        "torch.cuda.BFloat16Tensor": _CLASSES,
        "torch.cuda.FloatTensor": _CLASSES,
        "torch.cuda.HalfTensor": _CLASSES,
    },
    "transformer/transformer_config.py": {
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "a flag of NVIDIA's library, if asked for",
    },
    "utils.py": {
        "'nccl'": _STRAGGLERS,
        "torch.cuda.Event": _STRAGGLERS,
        "torch.cuda.clock_rate": _STRAGGLERS,
        "torch.cuda.is_available": _STRAGGLERS,
        "torch.cuda.power_draw": _STRAGGLERS,
        "torch.cuda.temperature": _STRAGGLERS,
        "torch.cuda.utilization": _STRAGGLERS,
        "torch.cuda.nvtx.range_pop": "ranges for NVIDIA's profiler, off unless asked for",
        "torch.cuda.nvtx.range_push": "ranges for NVIDIA's profiler, off unless asked for",
        "torch.distributed._symmetric_memory.empty": "a buffer of the inference engines",
    },
}
"""File -> name -> why it is not routed."""

_OTHER = ("torch.distributed.all_gather_into_tensor",)
"""Names without a device in them that are nevertheless routed."""


def complaints(core: Path) -> list[str]:
    """Deviations from a complete routing of the package at `core`, one line each; empty if it is complete."""
    uses: dict[str, dict[str, list[int]]] = {}
    for file in sorted(core.rglob("*.py")):
        where = file.relative_to(core).as_posix()
        if not any(f"{where}/".startswith(f"{part}/") for part in OUT_OF_REACH):
            for line, name in names_in(file.read_text(encoding="utf-8")):
                uses.setdefault(where, {}).setdefault(name, []).append(line)
    lines = [
        f"{where}:{at[0]} uses {name}, which is new: route it (CORE in hal.model.megatron.cuda_patches), or say in "
        "tests/model/megatron/source_names.py why a GPT does not need it"
        for where, names in uses.items()
        for name, at in names.items()
        if name not in NAMES and name not in HARMLESS.get(where, {})
    ]
    lines += [
        f"{where} no longer uses {name}: drop it from HARMLESS"
        for where, names in HARMLESS.items()
        for name in names
        if name not in uses.get(where, {})
    ]
    lines += [f"{part} is gone: drop it from OUT_OF_REACH" for part in OUT_OF_REACH if not (core / part).exists()]
    used = {name for names in uses.values() for name in names}
    return lines + [f"{name} is no longer used: drop it from CORE" for name in CORE if name not in used]


def names_in(source: str) -> list[tuple[int, str]]:
    """(line, name) of all references in `source` to an NVIDIA device or its transport.

    Attributes and imports are reported by their full name, whatever their local alias; device arguments by the name of
    the called function; and other strings that denote the device ("cuda", "cuda:0", "nccl") in quotes.
    """
    tree = ast.parse(source)
    return sorted({*_imported(tree), *_attributes(tree), *_words(tree)})


def _imported(tree):
    """Star imports, whose names cannot be resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _device(node.module or "") and node.names[0].name == "*":
            yield node.lineno, f"{node.module}.*"


def _attributes(tree):
    names, inner = _torch_names(tree), {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            full = _full(node, names)
            if full == "torch" or _device(full) or full in _OTHER:
                yield node.lineno, full  # torch alone is a copy of the module: its uses cannot be resolved
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda") and not _full(node, names):
            yield node.lineno, "torch.Tensor.cuda" if node.attr == "cuda" else ".is_cuda"


def _words(tree):
    names, calls = _torch_names(tree), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                calls[id(argument)] = node.func
                if isinstance(argument, ast.JoinedStr):
                    calls.update((id(part), node.func) for part in argument.values)
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if node.value.startswith("torch.cuda"):
            # The result of Tensor.type is compared with such strings.
            yield node.lineno, "torch.Tensor.type" if "Tensor" in node.value else repr(node.value)
        elif re.fullmatch(r"cuda(:\d*)?|nccl", node.value):
            called = calls.get(id(node))
            word = repr(node.value.partition(":")[0])
            if called is None or word == "'nccl'":
                yield node.lineno, word
            else:
                yield node.lineno, _full(called, names) or f"{_last(called)}({word})"


def _torch_names(tree):
    """Name in this module -> full name, for every name imported from torch."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            names.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    return names


def _full(node, names):
    """torch.a.b for an expression that starts with a name imported from torch; otherwise an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *reversed(parts)])


def _last(called):
    return called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)


def _device(full):
    return full.startswith("torch") and re.search("cuda|nccl", full, re.IGNORECASE) is not None
