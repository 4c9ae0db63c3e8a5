"""The two schedules of a step's microbatches: gradient accumulation on one stage, and a pipeline of several stages.

The order of work in the pipeline and the sharding of parameters (ZeRO) are torch.distributed's; this file adapts the
GPT to them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hal import Rng
from hal.profiling import phase

from ..config.parallel_layout import ParallelLayout
from ..config.schema import Config
from ..gpt.dropout_rng import DropoutRng
from ..gpt.model import GPT, TransformerLayer
from ..gpt.moe import MoE
from .microbatches import Microbatch

_SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}

Loss = Callable[[Tensor, Tensor], Tensor]
"""(what the last stage returns: logits [s, b, v_local], or hidden [s, b, h] with Config.fuses_output_layer; labels
[b, s]) -> the scalar to differentiate."""


class Stage(nn.Module):
    """Stage number `index` of the GPT, with the interface that torch's engines call.

    dropout: the stream of the step's dropout; None = no dropout.
    """

    dropout: Rng | None = None

    def __init__(self, model: GPT, index: int) -> None:
        super().__init__()
        self.model, self.index = model, index

    def forward(self, x: Tensor, sample: Tensor, starts: Tensor | None = None) -> Tensor:
        """x: tokens [b, s] on the first stage, hidden [s, b, h] elsewhere. sample: Microbatch.sample_numbers, a tensor
        because pipelining cuts only tensors into microbatches. starts: as in GPT.forward."""
        dropout_rng, batch = None, self.model.config.global_batch_size
        if self.dropout is not None:
            assert batch is not None
            dropout_rng = DropoutRng(self.dropout, int(sample[0]), batch)
        y: Tensor = self.model(x, dropout_rng, starts=starts, logits=not self.model.config.fuses_output_layer)
        # The zero-bubble schedule detaches the tensors that it sends in place, which torch does not allow for views.
        return y.clone() if y._is_view() and not self.model.last else y


def shard(stage: Stage, mesh: DeviceMesh, experts: DeviceMesh | None, config: Config, zero: int) -> None:
    """Shards the stage's parameters over `mesh`, layer by layer (ZeRO; see ParallelLayout.zero).

    experts: the mesh over which the weights of experts are sharded.

    Parameters become float32, so that the optimizer's shard is the master copy; the layers compute in the config's
    dtype. Gradients are summed in float32, not averaged, because the loss is already that of the global batch.
    """
    # torch warns because in-place changes of such a view would be lost, but there are none here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # The initial values stay rounded to the model's dtype, like those of a replicated model.
    stage.float()
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.params_dtype == torch.float32 else config.params_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    layers = list(stage.model.decoder.layers.values())
    inner = [
        layer.mlp.experts for layer in layers if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoE)
    ]
    for module in (*inner, *layers, stage):
        # A loss that includes the output layer reads its weight after the stage's forward pass.
        reshard = zero == 3 and not (module is stage and config.fuses_output_layer)
        over = experts if module in inner else mesh
        sharded = fully_shard(module, mesh=over, reshard_after_forward=reshard, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        # Otherwise torch would pass the divisor to the reduction, which gloo does not support.
        sharded.set_force_sum_reduction_for_comms(True)


class GradientAccumulation:
    """Forward and backward of a model without pipeline parallelism, microbatch by microbatch.

    after_first: called between the first microbatch's backward pass and the second's forward pass.
    """

    def __init__(self, stage: Stage, zero: int, after_first: Callable[[], object]) -> None:
        self.stage, self.zero, self.after_first = stage, zero, after_first

    def run(self, microbatches: Sequence[Microbatch], loss: Loss) -> None:
        """The loss of each microbatch, and its gradients if they are enabled."""
        last = len(microbatches) - 1
        for i, m in enumerate(microbatches):
            if isinstance(self.stage, FSDPModule) and torch.is_grad_enabled():
                self._prepare(i == last)
            # The logits must not be assigned to a variable, because they would then stay in memory during the backward
            # pass and the next microbatch's forward pass.
            with phase("forward"):
                value = loss(self.stage(m.tokens, m.sample_numbers(), m.starts), m.labels)
            if torch.is_grad_enabled():
                with phase("backward"):
                    value.backward()  # type: ignore[no-untyped-call]
                if i == 0 and last > 0:
                    self.after_first()
            del value  # frees the rest of the graph before the next forward pass

    def _prepare(self, last: bool) -> None:
        stage: Any = self.stage
        stage.set_is_last_backward(last)
        # ZeRO 1 keeps unsharded gradients until the last microbatch; ZeRO 2 and 3 reduce-scatter them after each one.
        # Only ZeRO 3 shards the weights again between microbatches.
        stage.set_requires_gradient_sync(last or self.zero >= 2)
        stage.set_reshard_after_backward(last or self.zero == 3)


class _PipelineStage(pipelining.PipelineStage):
    """torch's wrapper of a stage, with ranges for profilers and corrections for the zero-bubble schedule."""

    collect: Callable[[], object] = staticmethod(lambda: None)
    """Called after each microbatch's weight gradients, which zero bubble computes without autograd's hooks, so that
    16-bit gradients are summed in float32 there as well."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with phase("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with phase("backward"):
            result = super().backward_weight_one_chunk(*args, **kwargs)
        self.collect()
        return result

    # During evaluation torch skips the backward passes, but the V-shaped schedule still passes their gradients between
    # the two stages of a rank, and raises an error because there are none.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """Forward and backward of this rank's stages, in the order of torch's schedule."""

    def __init__(
        self,
        stages: Sequence[Stage],
        config: Config,
        layout: ParallelLayout,
        group: Any,
        device: torch.device,
        collect: Callable[[], object],
    ) -> None:
        """group: torch's process group of the pipeline. collect: see _PipelineStage."""
        self.holds_first = any(s.model.embedding is not None for s in stages)
        self.holds_last = any(s.model.last for s in stages)
        self.stages = [_pipeline_stage(s, config, layout, group, device) for s in stages]
        for stage in self.stages:
            stage.collect = collect
        make: Any = _SCHEDULES[layout.schedule]
        self._schedules: dict[int, Any] = {}

        def schedule(count: int) -> Any:
            # With fewer microbatches than stages, which torch's 1F1B refuses, its order of work is that of GPipe.
            plain = layout.schedule == "1f1b"
            kind: Any = pipelining.ScheduleGPipe if plain and count < layout.layout.pp else make
            return kind(
                self.stages[0] if plain else self.stages,
                n_microbatches=count,
                loss_fn=lambda logits, labels: self._loss(logits, labels),
                scale_grads=False,
            )

        self._make_schedule = schedule

    def run(self, microbatches: Sequence[Microbatch], loss: Loss) -> None:
        """Like GradientAccumulation.run; all ranks of the pipeline call it together, with the same microbatches."""
        self._loss, count = loss, len(microbatches)
        if count not in self._schedules:  # the number changes while the batch size ramps up
            self._schedules[count] = self._make_schedule(count)
        schedule = self._schedules[count]
        step = schedule.step if torch.is_grad_enabled() else schedule.eval
        # torch's schedule takes the complete batch and splits it into the same microbatches again.
        inputs = (torch.cat([m.tokens for m in microbatches]),) if self.holds_first else ()
        labels = torch.cat([m.labels for m in microbatches]) if self.holds_last else None
        more = {"sample": torch.cat([m.sample_numbers() for m in microbatches])}
        starts = [m.starts for m in microbatches if m.starts is not None]
        if starts:
            more["starts"] = torch.cat(starts)
        step(*inputs, target=labels, **more, return_outputs=False)


def _pipeline_stage(
    stage: Stage, config: Config, layout: ParallelLayout, group: Any, device: torch.device
) -> _PipelineStage:
    """A stage with given input and output shapes, so that torch does not run the model to infer them."""
    model, parallel, b = stage.model, stage.model.parallel, config.micro_batch_size
    s, s_hidden = parallel.context_rows(config.seq_length).count, parallel.hidden_rows(config.seq_length).count
    floats: dict[str, Any] = {"device": "meta", "requires_grad": True}
    tokens = torch.empty(b, s, dtype=torch.int64, device="meta")
    hidden = torch.empty(s_hidden, b, config.hidden_size, dtype=config.residual_dtype, **floats)
    logits = torch.empty(s, b, config.padded_vocab_size // parallel.tp.size, dtype=config.params_dtype, **floats)
    normed = hidden.to(config.params_dtype)
    result = hidden if not model.last else normed if config.fuses_output_layer else logits
    return _PipelineStage(
        stage,
        stage.index,
        layout.stages,
        device,
        input_args=(tokens if model.embedding is not None else hidden,),
        output_args=(result,),
        group=group,
    )
