"""Advice for options of Megatron and DeepSpeed that have another name in HAL, or that HAL does not need."""

from __future__ import annotations

_CALLED = {
    "batch-size": "--micro-batch-size",
    "checkpoint-num-layers": "--recompute-num-layers",
    "DDP-impl": "--zero-stage (there is one implementation)",
    "lr-warmup-samples": "--lr-warmup-iters",
    "train-samples": "--train-iters",
    "zero-reduce-bucket-size": "--ddp-bucket-size",
    "bucket-size": "--ddp-bucket-size",
    "virtual-pipeline-model-parallel-size": "--num-layers-per-virtual-pipeline-stage",
    "tensorboard-dir": "--run-dir",
    "tokenizer-name-or-path": "--tokenizer-model",
    "use-rotary-position-embeddings": "--position-embedding-type rope",
    "group-query-attention": "--num-query-groups",
    "padded-vocab-size": "--pad-vocab-size-to",
    "recompute-activations": "--recompute-granularity selective",
    "checkpoint-activations": "--recompute-granularity full --recompute-method uniform",
}
_NOT_NEEDED = {
    "data-impl": "data is always memory-mapped",
    "dataset-impl": "data is always memory-mapped",
    "distributed-backend": "the backend brings its transport",
    "deepspeed": "--deepspeed-config FILE is enough",
    "optimizer": "the optimizer is AdamW",
    "no-async-tensor-model-parallel-allreduce": "the backend schedules communication",
    "no-bias-gelu-fusion": "fused kernels are the backend's choice; --pin names one",
    "no-masked-softmax-fusion": "fused kernels are the backend's choice; --pin names one",
    "no-gradient-accumulation-fusion": "fused kernels are the backend's choice; --pin names one",
    "attention-softmax-in-fp32": "softmax is always computed in float32",
    "accumulate-allreduce-grads-in-fp32": "gradients are always summed in float32",
    "transformer-impl": "--backend and --pin choose what runs",
    "use-mcore-models": "there is one model",
    "zero-allgather-bucket-size": "one layer is one message",
    "zero-contigious-gradients": "one layer is one message",
    "zero-reduce-scatter": "gradients of --zero-stage are always reduce-scattered",
    "partition-activations": "--sequence-parallel splits the same activations",
    "contigious-checkpointing": "memory is the backend's part",
    "checkpoint-in-cpu": "activations stay on the device",
    "synchronize-each-layer": "nothing waits between layers",
    "num-workers": "samples are read as they are needed",
    "no-load-lr-state": "the schedule is always the configuration's",
    "override-opt-param-scheduler": "the schedule is always the configuration's",
}

ELSEWHERE = {
    **{name: f"It is called {ours} here." for name, ours in _CALLED.items()},
    **{name: f"Nothing here needs it: {why}. Remove it." for name, why in _NOT_NEEDED.items()},
}
"""The sentence that an error message adds, by the option's name without leading dashes."""
