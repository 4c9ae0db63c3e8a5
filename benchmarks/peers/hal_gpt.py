"""The GPT of the training step in HAL, with which the peers in this folder are compared."""

from __future__ import annotations

import torch
from torch import Tensor

import hal
from hal.model.config.schema import Config
from hal.model.gpt.model import GPT
from hal.model.training.optimizer import Optimizer

from ..harness.case import Thunk


def config_of(layers: int, hidden: int, heads: int, length: int, vocabulary: int, *, bf16: bool = False) -> Config:
    """The config of the model that PlainGPT and `megatron_gpt.gpt` compute, without dropout and without clipping."""
    return Config(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=length,
        vocab_size=vocabulary,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        clip_grad=0.0,
        bf16=bf16,
    )


def step_of(config: Config, device: torch.device, tokens: Tensor, labels: Tensor, *, recorded: bool = False) -> Thunk:
    """A function that does one training step of a new model on `tokens` and `labels` [b, s].

    recorded: forward and backward passes are one graph, as with --cuda-graphs.
    """
    model = GPT(config, device)
    optimizer = Optimizer(config, dict(model.named_parameters()))

    def gradients() -> None:
        optimizer.zero_grad()
        # As in the trainer, the loss writes its gradient over the logits.
        model.loss(model(tokens), labels, inplace_backward=True).backward()  # type: ignore[no-untyped-call]

    repeat: Thunk | None = None

    def step() -> None:
        nonlocal repeat
        if repeat is None:
            repeat = hal.backend().capture(gradients) if recorded else gradients
        repeat()
        optimizer.step(1e-4)

    return step
