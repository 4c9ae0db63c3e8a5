"""The schedules of a step's microbatches over the stages of a pipeline.

The order of work is torch.distributed.pipelining's; this file adapts the GPT to it. Only runs with a pipeline import
it, because torch's module imports torch's compiler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import pipelining

from hal import HalError
from hal.profiling import phase

from ..config.parallel_layout import ParallelLayout
from ..config.schema import Config
from .microbatches import Microbatch
from .stage import Loss, Stage

_SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


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
        if not hasattr(make, "eval") or "scale_grads" not in inspect.signature(make).parameters:
            raise HalError(
                f"--pipeline-model-parallel-size {layout.layout.pp} needs schedules that evaluate and leave gradients "
                f"unscaled, which torch {torch.__version__} lacks; install torch 2.11 or later, or use "
                "--pipeline-model-parallel-size 1"
            )
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
