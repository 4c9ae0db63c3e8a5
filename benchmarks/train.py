"""One training step of a small GPT: HAL's model and optimizer against the same model in plain torch and megatron-core.

float32, and bfloat16 (HAL: a bfloat16 model with float32 master weights, as Megatron; torch: autocast over a float32
model; megatron-core: its own way). "tuned" peers have set_float32_matmul_precision("medium") and the allocator that
keeps memory. Also the memory that training takes at its peak, and whether the peak creeps over 1,000 steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import megatron_gpt, worker
from .case import OURS, Call, Candidate, Case
from .plain_gpt import PlainGPT, step_of
from .resident import peak_of, peaks_after

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCABULARY = 6, 384, 6, 256, 8, 8192
SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "micro_batch_size": 4,
    "train_iters": 1000,
}
"""A model whose 1,000 steps take seconds."""


def flop() -> float:
    """Of one step: 6 per matrix parameter and token, and attention's seven products over causal pairs."""
    parameters = LAYERS * 12 * HIDDEN**2 + VOCABULARY * HIDDEN
    pairs = LENGTH * (LENGTH + 1) // 2
    return float(6 * parameters * BATCH * LENGTH + LAYERS * BATCH * pairs * HIDDEN * 14)


def batch() -> tuple[Tensor, Tensor]:
    """tokens and labels [b, s]."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=worker.device())
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _ours(bf16: bool) -> Call:
    from hal.model.config import Config
    from hal.model.gpt import GPT
    from hal.model.optimizer import Optimizer

    config = Config(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        vocab_size=VOCABULARY,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        clip_grad=0.0,
        bf16=bf16,
    )
    model = GPT(config, worker.device())
    optimizer = Optimizer(config, dict(model.named_parameters()))
    tokens, labels = batch()

    def step() -> None:
        optimizer.zero_grad()
        model.loss(model(tokens), labels, inplace_backward=True).backward()  # as the trainer does
        optimizer.step(1e-4, 0.0)

    return step


def _plain(bf16: bool, *, compiled: bool = False, medium: bool = False) -> Call:
    torch.set_float32_matmul_precision("medium" if medium else "highest")
    model = PlainGPT(VOCABULARY, LENGTH, LAYERS, HIDDEN, HEADS).to(worker.device())
    return step_of(model, *batch(), bf16=bf16, compiled=compiled)


def _megatron(bf16: bool) -> Call:
    megatron_gpt.enter()
    model = megatron_gpt.gpt(LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY, bf16=bf16)
    return megatron_gpt.step_of(model, *batch(), bf16=bf16)


def _peak(make: Callable[[bool], Call], bf16: bool) -> Callable[[], float]:
    if make is _megatron:
        megatron_gpt.enter()  # what it imports is not what its training takes
    return peak_of(lambda: make(bf16), 3)


def _growth() -> Callable[[], float]:
    """Returns the trainer's peak after 1,000 steps / after 100."""
    from .layout import config_of, trainer_of

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
    found = [
        Case(
            "training memory",
            _shape(bf16),
            {
                name: Candidate(lambda m=make, b=bf16: _peak(m, b), f"{kind}-memory-{_dtype(bf16)}")
                for name, (make, kind) in makers.items()
            },
            quantity="counted bytes",
        )
        for bf16 in (False, True)
    ]
    creep = {OURS: Candidate(_growth, "hal-creep")}
    small = "f32 L{num_layers} H{hidden_size} A{num_attention_heads} S{seq_length} B{micro_batch_size}".format(**SMALL)
    limit = {"101 % of step 100": 1.01}
    found.append(Case("memory at step 1,000", small, creep, budgets=limit, quantity="counted share"))
    return found


def cases() -> list[Case]:
    """The step and its memory in float32 and bfloat16, and a thousand steps of a small model."""
    return [
        Case(
            "training step",
            _shape(bf16),
            {
                OURS: Candidate(lambda b=bf16: _ours(b), "hal"),
                "eager": Candidate(lambda b=bf16: _plain(b), "torch"),
                "compile": Candidate(lambda b=bf16: _plain(b, compiled=True), "compile", ("default",)),
                "megatron-core": Candidate(lambda b=bf16: _megatron(b), "megatron"),
                "tuned eager": Candidate(lambda b=bf16: _plain(b, medium=True), "medium", ("pooled",)),
                "tuned compile": Candidate(
                    lambda b=bf16: _plain(b, compiled=True, medium=True), "medium compile", ("pooled",)
                ),
            },
            work=flop(),
            ceiling=f"GEMM {_dtype(bf16)}",
            allocators=("default", "pooled"),
        )
        for bf16 in (False, True)
    ] + _memory()
