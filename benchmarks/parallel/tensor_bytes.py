"""What a rank holds and does in one training step, counted exactly: bytes of tensors, and the order of a pipeline's
work. Each function runs on every rank of a layout; nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hal.model.config import Config
from hal.model.draws import Draws
from hal.model.optimizer import local
from hal.model.parallel.trainer import ParallelTrainer
from hal.model.planning.schedules import Action, bubble

from .layout import config_of, trainer_of
from .memory import Tracker


def state_bytes(options: Mapping[str, Any]) -> dict[str, int]:
    """weights, gradients and optimizer between a step's backward pass and its update, in bytes of this rank."""
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
    """Bytes that one microbatch keeps on this rank between its forward and its backward pass. Without a pipeline."""
    config = config_of(options)
    trainer = trainer_of(config)
    model = trainer.model
    rows = model.parallel.context_rows(config.seq_length).count
    tokens = torch.zeros(config.micro_batch_size, rows, dtype=torch.int64)
    draws = _draws(config, trainer.rng)
    model(tokens, draws)  # what is made once and stays, such as the table of rotations, does not belong to a microbatch
    with Tracker() as held:
        loss = model.loss(model(tokens, draws), tokens)
        return held.now() - loss.nbytes


def _draws(config: Config, rng: Any) -> Draws | None:
    assert config.global_batch_size
    if not (config.attention_dropout or config.hidden_dropout):
        return None
    return Draws(rng.fork("dropout", 0), 0, config.global_batch_size)


def peak_bytes(options: Mapping[str, Any]) -> int:
    """The most bytes this rank ever holds in a step, everything included: weights, optimizer, buffers, temporaries."""
    config = config_of(options)
    with Tracker() as held:
        trainer = trainer_of(config)
        trainer.step()  # buffers that are made once
        held.peak = held.now()
        trainer.step()
        return held.peak


def recorded_order(options: Mapping[str, Any]) -> list[Action]:
    """What this rank's pipeline did in one step, in order."""
    trainer = trainer_of(config_of(options))
    assert isinstance(trainer, ParallelTrainer)
    done: list[Action] = []
    for stage in trainer._engine._stages:
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
    """Idle time / working time that the recorded orders of all ranks make, all stages being equal."""
    mine = recorded_order(options)
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, mine)
    return bubble(orders)
