"""A training step of a small GPT: HAL's model and optimizer against the same model in plain torch and megatron-core.

float32, and bfloat16 (HAL: a bfloat16 model with float32 master weights, like Megatron; torch: autocast over a float32
model; megatron-core: its own mixed precision). "tuned" peers use set_float32_matmul_precision("medium") and the
allocator that keeps memory. The suite also measures the peak memory of training, and its growth over 1,000 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..harness import target
from ..harness.case import OURS, Candidate, Case, Thunk
from ..harness.peak_rss import peak_of, peaks_after
from ..peers import megatron_gpt, plain_gpt

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCABULARY = 6, 384, 6, 256, 8, 8192
SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "micro_batch_size": 4,
    "train_iters": 1000,
}
"""A model so small that 1,000 steps take seconds."""


def flop() -> float:
    """FLOP of one step: 6 per matrix parameter and token, and attention's seven products over causal pairs."""
    parameters = LAYERS * 12 * HIDDEN**2 + VOCABULARY * HIDDEN
    pairs = LENGTH * (LENGTH + 1) // 2
    return float(6 * parameters * BATCH * LENGTH + LAYERS * BATCH * pairs * HIDDEN * 14)


def batch() -> tuple[Tensor, Tensor]:
    """tokens and labels [b, s]."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=target.device())
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _ours(bf16: bool) -> Thunk:
    from ..peers import hal_gpt  # imported here, so that processes of peers do not import HAL's model

    config = hal_gpt.config_of(LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY, bf16=bf16)
    return hal_gpt.step_of(config, target.device(), *batch())


def _plain(bf16: bool, *, compiled: bool = False, medium: bool = False) -> Thunk:
    torch.set_float32_matmul_precision("medium" if medium else "highest")
    model = plain_gpt.PlainGPT(VOCABULARY, LENGTH, LAYERS, HIDDEN, HEADS).to(target.device())
    return plain_gpt.step_of(model, *batch(), bf16=bf16, compiled=compiled)


def _megatron(bf16: bool) -> Thunk:
    megatron_gpt.enter()
    model = megatron_gpt.gpt(LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY, bf16=bf16)
    return megatron_gpt.step_of(model, *batch(), bf16=bf16)


def _peak(make: Callable[[bool], Thunk], bf16: bool) -> Thunk:
    if make is _megatron:
        megatron_gpt.enter()  # called before the measurement, which must not count the memory of imports
    return peak_of(lambda: make(bf16), 3)


def _growth() -> Thunk:
    """A call that returns the trainer's peak memory after 1,000 steps / that after 100 steps."""
    from ..parallel.layout import config_of, trainer_of

    trainer = trainer_of(config_of(SMALL))

    def call() -> float:
        first, last = peaks_after(trainer.step, (100, 1000))
        return last / first

    return call


def _dtype(bf16: bool) -> str:
    return "bf16" if bf16 else "f32"


def _shape(bf16: bool) -> str:
    return f"{_dtype(bf16)} L{LAYERS} H{HIDDEN} A{HEADS} S{LENGTH} B{BATCH} V{VOCABULARY}"


def _memory() -> list[Case]:
    makers = {OURS: (_ours, "hal"), "eager": (_plain, "torch"), "megatron-core": (_megatron, "megatron")}
    peaks = [
        Case(
            "training memory",
            _shape(bf16),
            {
                name: Candidate(partial(_peak, make, bf16), f"{process}-memory-{_dtype(bf16)}")
                for name, (make, process) in makers.items()
            },
            quantity="counted bytes",
        )
        for bf16 in (False, True)
    ]
    small = "f32 L{num_layers} H{hidden_size} A{num_attention_heads} S{seq_length} B{micro_batch_size}".format(**SMALL)
    growth = Case(
        "memory at step 1,000",
        small,
        {OURS: Candidate(_growth, "hal-creep")},
        budgets={"101 % of step 100": 1.01},
        quantity="counted share",
    )
    return [*peaks, growth]


def cases() -> list[Case]:
    """The step and its memory in float32 and bfloat16, and a thousand steps of a small model."""
    steps = [
        Case(
            "training step",
            _shape(bf16),
            {
                OURS: Candidate(partial(_ours, bf16), "hal"),
                "eager": Candidate(partial(_plain, bf16), "torch"),
                "compile": Candidate(partial(_plain, bf16, compiled=True), "compile", ("default",)),
                "megatron-core": Candidate(partial(_megatron, bf16), "megatron"),
                "tuned eager": Candidate(partial(_plain, bf16, medium=True), "medium", ("pooled",)),
                "tuned compile": Candidate(
                    partial(_plain, bf16, compiled=True, medium=True), "medium compile", ("pooled",)
                ),
            },
            work=flop(),
            ceiling=f"GEMM {_dtype(bf16)}",
            allocators=("default", "pooled"),
        )
        for bf16 in (False, True)
    ]
    return steps + _memory()
