"""Exact counts of a training step on one rank: bytes of tensors, and the order of a pipeline's actions.

Every rank of a layout calls these functions; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hal.model.apps.planning.schedules import Action, bubble
from hal.model.config.schema import Config
from hal.model.gpt.dropout_rng import DropoutRng
from hal.model.training.optimizer import local
from hal.model.training.pipeline import Pipeline

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


def recorded_order(options: Mapping[str, Any]) -> list[Action]:
    """The actions of this rank's pipeline in one step, in order, recorded by wrapping the methods of its stages."""
    trainer = trainer_of(config_of(options))
    assert isinstance(trainer.pipeline, Pipeline)
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
