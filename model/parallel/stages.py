"""A rank's share of the model as stages, sharded by fully_shard if asked, and the schedule that runs them.

The schedules and the sharding are torch.distributed's; here is only how a GPT becomes their input.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..config import Config
from ..draws import Draws
from ..gpt import GPT
from .plan import Plan

_SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Stage(nn.Module):
    """A part of the GPT as the engines call it: forward(x, sample, starts), sample int64 [micro batch] on the CPU.

    x is tokens [b, s] on the first stage, hidden [s, b, h] elsewhere. starts: of documents, as in GPT.forward, or None.
    draws_of(first sample's place in the global batch) gives the microbatch's dropout.
    """

    def __init__(self, model: GPT, index: int, draws_of: Callable[[int], Draws | None]) -> None:
        super().__init__()
        self.model, self.index, self._draws_of = model, index, draws_of

    def forward(self, x: Tensor, sample: Tensor, starts: Tensor | None = None) -> Tensor:
        y: Tensor = self.model(x, self._draws_of(int(sample[0])), starts=starts)
        # The zero-bubble schedule detaches what travels in place, which a view refuses.
        return y.clone() if y._is_view() and not self.model.last else y


def shard(stage: Stage, mesh: DeviceMesh, config: Config, zero: int) -> None:
    """Shards the stage's parameters over `mesh`, layer by layer (ZeRO; see Plan.zero).

    Parameters become float32, so that the optimizer's shard is its master copy; the layers compute in the config's
    dtype, and gradients are summed in float32, not averaged: the loss is scaled by the whole batch already.
    """
    # Nothing here works in place on what a stage returns.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Rounded to the model's dtype before, as a replicated model's parameters are.
    stage.float()
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.params_dtype == torch.float32 else config.params_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in (*stage.model.decoder.layers.values(), stage):
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        # Otherwise torch folds the factor into the reduction, which gloo cannot do.
        sharded.set_force_sum_reduction_for_comms(True)


class OneStage:
    """Forward and backward of a model that is all on this rank, microbatch by microbatch.

    after_first: called between the first microbatch's backward pass and the second's.
    """

    def __init__(self, stage: Stage, zero: int, after_first: Callable[[], object]) -> None:
        self.stage, self.zero, self.after_first = stage, zero, after_first

    def run(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample: Tensor,
        starts: Tensor | None,
        count: int,
        loss: Callable[..., Tensor],
    ) -> None:
        """loss(logits, labels) of each of `count` microbatches, and its gradients if they are enabled."""
        begins = [None] * count if starts is None else starts.chunk(count)
        parts = zip(tokens.chunk(count), labels.chunk(count), sample.chunk(count), begins)
        for i, (x, y, numbers, begin) in enumerate(parts):
            if isinstance(self.stage, FSDPModule) and torch.is_grad_enabled():
                self._prepare(i + 1 == count)
            value = loss(self.stage(x, numbers, begin), y)
            if torch.is_grad_enabled():
                value.backward()
                if i == 0 and count > 1:
                    self.after_first()

    def _prepare(self, last: bool) -> None:
        stage: Any = self.stage
        stage.set_is_last_backward(last)
        # Stage 1 keeps whole gradients until the last microbatch, 2 and 3 never do; only 3 gives the weights back.
        stage.set_requires_gradient_sync(last or self.zero >= 2)
        stage.set_reshard_after_backward(last or self.zero == 3)


class _CollectingStage(pipelining.PipelineStage):
    """Calls `collect` after each microbatch's weight gradients, which zero bubble computes without autograd's hooks: so
    that 16-bit gradients are summed in float32 there too."""

    collect: Callable[[], object] = staticmethod(lambda: None)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_weight_one_chunk(*args, **kwargs)
        self.collect()
        return result


class Pipeline:
    """Forward and backward of this rank's stages under torch's schedule."""

    def __init__(
        self,
        stages: list[Stage],
        config: Config,
        plan: Plan,
        group: Any,
        device: torch.device,
        hidden: tuple[int, ...],
        collect: Callable[[], object],
    ) -> None:
        """hidden: shape [s, b, h] of what travels between stages, on this rank. collect: see _CollectingStage."""
        self.first = any(s.model.embedding is not None for s in stages)
        self.last = any(s.model.last for s in stages)
        self._stages = [self._stage(s, config, plan, group, device, hidden) for s in stages]
        for made in self._stages:
            made.collect = collect
        self._plan = plan
        self._schedules: dict[int, Any] = {}

    @staticmethod
    def _stage(stage: Stage, config: Config, plan: Plan, group: Any, device: torch.device, hidden: Any) -> Any:
        model, dtype = stage.model, config.params_dtype
        s = model.parallel.context_rows(config.seq_length).count
        tokens = torch.empty(config.micro_batch_size, s, dtype=torch.int64, device="meta")
        between = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty(
            s,
            hidden[1],
            config.padded_vocab_size // model.parallel.size,
            dtype=dtype,
            device="meta",
            requires_grad=True,
        )
        return _CollectingStage(
            stage,
            stage.index,
            plan.stages,
            device,
            input_args=(tokens if model.embedding is not None else between,),
            output_args=(logits if model.last else between,),
            group=group,
        )

    def run(
        self,
        tokens: Tensor,
        labels: Tensor,
        sample: Tensor,
        starts: Tensor | None,
        count: int,
        loss: Callable[..., Tensor],
    ) -> None:
        """As OneStage.run; the ranks of the pipeline call it together, each with the whole replica's microbatches."""
        if count not in self._schedules:
            several = self._plan.schedule != "1f1b"
            self._schedules[count] = _SCHEDULES[self._plan.schedule](
                self._stages if several else self._stages[0],
                n_microbatches=count,
                loss_fn=lambda logits, y: self._loss(logits, y),
                scale_grads=False,
            )
        self._loss = loss
        schedule = self._schedules[count]
        step = schedule.step if torch.is_grad_enabled() else schedule.eval
        inputs = (tokens,) if self.first else ()
        others = {"sample": sample} if starts is None else {"sample": sample, "starts": starts}
        step(*inputs, target=labels if self.last else None, **others, return_outputs=False)
