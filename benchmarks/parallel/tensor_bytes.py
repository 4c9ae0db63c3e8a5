"""Exact counts of a training step on one rank: bytes of tensors, and the order of a pipeline's actions.

Every rank of a layout calls these functions; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hal import Comm, Message, Work
from hal.model.apps.planning.schedules import Action, bubble
from hal.model.config.schema import Config
from hal.model.gpt.dropout_rng import DropoutRng
from hal.model.gpt.moe import Experts
from hal.model.training.optimizer import local
from hal.model.training.stage import GradientAccumulation

from ..harness.live_bytes import LiveBytes
from .layout import config_of, trainer_of


def state_bytes(options: Mapping[str, Any]) -> dict[str, int]:
    """This rank's bytes of weights, gradients and optimizer state, between a step's backward pass and its update."""
    config = config_of(options)
    trainer = trainer_of(config)
    optimizer = trainer.optimizer
    trainer.forward_backward()
    moments = [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    masters = [*optimizer.main.values()] if optimizer.low else []
    return {
        "weights": sum(local(p).nbytes for p in optimizer.model.values()),
        "gradients": sum(g.nbytes for g in optimizer.grads().values()),
        "optimizer": sum(t.nbytes for t in (*moments, *masters)),
    }


def activation_bytes(options: Mapping[str, Any]) -> int:
    """Bytes that a microbatch keeps on this rank between forward and backward pass, without pipeline parallelism."""
    config = config_of(options)
    trainer = trainer_of(config)
    model = trainer.model
    rows = model.parallel.context_rows(config.seq_length).count
    tokens = torch.zeros(config.micro_batch_size, rows, dtype=torch.int64)
    dropout_rng = _dropout_rng(config, trainer.rng)
    model(tokens, dropout_rng)  # allocates permanent tensors, e.g. the rotary table
    with LiveBytes() as live:
        loss = model.loss(model(tokens, dropout_rng), tokens)
        return live.now() - loss.nbytes


def _dropout_rng(config: Config, rng: Any) -> DropoutRng | None:
    assert config.global_batch_size
    if not (config.attention_dropout or config.hidden_dropout):
        return None
    return DropoutRng(rng.fork("dropout", 0), 0, config.global_batch_size)


def peak_bytes(options: Mapping[str, Any]) -> int:
    """The peak of this rank's bytes in a step, including weights, optimizer, buffers and temporaries."""
    config = config_of(options)
    with LiveBytes() as live:
        trainer = trainer_of(config)
        trainer.step()  # allocates permanent buffers
        live.peak = live.now()
        trainer.step()
        return live.peak


class CountingComm(Comm):
    """`comm`, which counts the bytes that this rank sends through it: those of messages, and of collectives that are
    rings (Patarasuk and Yuan, 2009)."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.name, self.rank, self.size = comm, comm.name, comm.rank, comm.size
        self.sent = 0.0

    def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        share = {"all_gather": self.size - 1, "reduce_scatter": (self.size - 1) / self.size}
        self.sent += share[collective] * x.nbytes
        return self.comm.start(collective, x, op=op, source=source)

    def _exchange_start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        self.sent += sum(message.tensor.nbytes for message in sends)
        return self.comm.exchange_start(sends, receives)


def sent_to_experts(options: Mapping[str, Any]) -> tuple[float, float]:
    """(bytes that this rank sends to the experts of other ranks and back in a step, rows that its own multiply)."""
    trainer = trainer_of(config_of(options))
    experts = [module for module in trainer.model.modules() if isinstance(module, Experts)]
    comm = CountingComm(trainer.model.parallel.experts)
    rows = [0]
    for module in experts:
        module.parallel = replace(module.parallel, experts=comm)
        module.linear_fc1.register_forward_pre_hook(lambda _, given: rows.append(int(given[1].sum())))
    trainer.forward_backward()
    return comm.sent, float(sum(rows))


def recorded_order(options: Mapping[str, Any]) -> list[Action]:
    """The actions of this rank's pipeline in one step, in order, recorded by wrapping the methods of its stages."""
    trainer = trainer_of(config_of(options))
    assert not isinstance(trainer.pipeline, GradientAccumulation)
    done: list[Action] = []
    for stage in trainer.pipeline.stages:
        _record(stage, "forward_one_chunk", lambda how: "F", done)
        _record(stage, "backward_one_chunk", lambda how: "B" if how.get("full_backward", True) else "I", done)
        _record(stage, "backward_weight_one_chunk", lambda how: "W", done)
    trainer.step()
    return done


def _record(stage: Any, name: str, kind: Callable[[Mapping[str, Any]], str], done: list[Action]) -> None:
    run = getattr(stage, name)

    def recorded(microbatch: int, *args: Any, **how: Any) -> Any:
        done.append(Action(kind(how), stage.stage_index, microbatch))
        return run(microbatch, *args, **how)

    setattr(stage, name, recorded)


def recorded_bubble(options: Mapping[str, Any]) -> float:
    """Idle time / working time, computed from the recorded orders of all ranks for stages of equal duration."""
    own = recorded_order(options)
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, own)
    return bubble(orders)
