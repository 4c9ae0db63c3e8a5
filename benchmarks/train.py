"""One training step of a small GPT: HAL's model and optimizer against the same model in plain torch.

float32, and bfloat16 (HAL: a bfloat16 model with float32 master weights, as Megatron; torch: autocast over a float32
model). "tuned" peers have set_float32_matmul_precision("medium") and the allocator that keeps memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import worker
from .case import OURS, Call, Candidate, Case
from .plain_gpt import PlainGPT, step_of

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCABULARY = 6, 384, 6, 256, 8, 8192


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


def cases() -> list[Case]:
    """float32 and bfloat16."""
    return [
        Case(
            "training step",
            f"{'bf16' if bf16 else 'f32'} L{LAYERS} H{HIDDEN} A{HEADS} S{LENGTH} B{BATCH} V{VOCABULARY}",
            {
                OURS: Candidate(lambda b=bf16: _ours(b), "hal"),
                "eager": Candidate(lambda b=bf16: _plain(b), "torch"),
                "compile": Candidate(lambda b=bf16: _plain(b, compiled=True), "compile", ("default",)),
                "tuned eager": Candidate(lambda b=bf16: _plain(b, medium=True), "medium", ("pooled",)),
                "tuned compile": Candidate(
                    lambda b=bf16: _plain(b, compiled=True, medium=True), "medium compile", ("pooled",)
                ),
            },
            work=flop(),
            ceiling=f"GEMM {'bf16' if bf16 else 'f32'}",
            allocators=("default", "pooled"),
        )
        for bf16 in (False, True)
    ]
