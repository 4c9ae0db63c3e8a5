"""The training loop: every rank runs the same steps on its share of the batch, and all report the same numbers.

A step consists of forward and backward passes over the microbatches, sums over the ranks, unscaling with a check for
overflow, the gradient norm, and AdamW with clipping. The inputs of a step are a function of (config, iteration, samples
consumed), so a resumed run is bit-equal. Losses and gradient norms do not depend on the layout of the ranks, up to
rounding; dropout is bit-equal, because each rank draws its block of the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hal
from hal import Rng, spans
from hal.mesh import Mesh
from hal.profiling import phase

from ..checkpoint import lineage
from ..checkpoint.saved_config import saved_options, saved_vocabulary
from ..checkpoint.sharded_tensor import LocalShard
from ..checkpoint.writer import Saver
from ..config.device_limits import device_problems
from ..config.parallel_layout import ParallelLayout, make_parallel_layout, sums_in_place
from ..config.sample_schedule import batch_size
from ..config.schema import Config, ConfigError, resolve
from ..config.validation import evaluates, world_size
from ..data.gpt_dataset import Split
from ..gpt.model import GPT
from ..parallel.tensor_sharding import Parallel
from .experiment import data_state, differences
from .expert_load import ExpertLoad
from .float8_history import Float8History
from .gradient_buckets import GradientSums
from .loss_scaler import LossScaler
from .lr_scheduler import LRScheduler, weight_decay
from .microbatches import Microbatch, counted_tokens, fetch_microbatches
from .optimizer import Optimizer, local, owned_names
from .rerun import RerunCheck
from .stage import GradientAccumulation, Loss, Stage, shard
from .step_graph import StepGraph
from .step_result import DeviceGradients, PendingStep, PendingSteps, Progress, StepResult, TrainingFailed
from .stop_vote import StopVote
from .trainer_state import ModelState, options, read_checkpoint
from .verified_calls import VerifiedCalls

if TYPE_CHECKING:
    from .pipeline import Pipeline


def make_trainer(config: Config, data: Mapping[str, Split], world: int | None = None) -> Trainer:
    """The trainer of a config whose vocabulary is known, at iteration 0 on the active backend; joins the world.

    world: the number of processes that train together; by default all that were started. Raises ConfigError if the
    ranks cannot divide the model, or the device cannot store it.
    """
    layout = make_parallel_layout(config, world_size(config) if world is None else world)
    problems = list(device_problems(config, layout, hal.backend().capabilities()))
    if problems:
        raise ConfigError(f"backend '{hal.backend().name}' cannot train this model:\n  " + "\n  ".join(problems))
    mesh = Mesh(layout.layout, hal.backend(), timeout=60.0 * config.distributed_timeout_minutes)
    return Trainer(config, data, mesh, layout)


class Trainer:
    """A rank's stages of the model, the data all ranks share, and this rank's part of the optimizer.

    One rank is a mesh of size 1. `iteration` and `consumed` (samples) are the progress of the run. `lead`: whether this
    process prints the log and writes the report of the run. `notes`: what a resumed run changes.
    `bad_batches`: batches that were skipped because of their content. `write_line`: prints a line to the run's log.
    """

    def __init__(self, config: Config, data: Mapping[str, Split], mesh: Mesh, layout: ParallelLayout) -> None:
        self.config, self.data, self.mesh, self.layout = config, data, mesh, layout
        self.world, self.lead, self.device = mesh.world, mesh.rank == 0, hal.local_device()
        self.rng = Rng(config.seed)
        self._set_schedules(config)
        self.iteration = self.consumed = self.skipped = 0
        self.scheduled = 0
        self.lineage = lineage.begin()
        self.notes: list[str] = []
        self.bad_batches = 0
        self._rerun = RerunCheck() if config.rerun_mode == "validate_results" else None
        self.verified = VerifiedCalls(config, mesh.world)
        self.write_line: Callable[[str], None] = lambda text: None
        self.parallel, self.replicas = Parallel.of(mesh, config), mesh.comm("dp", "cp")
        self.stages = [self._make_stage(i) for i in layout.stages_of(mesh.at["pp"])]
        self.model = self.stages[0].model
        if layout.zero:
            experts = mesh.device_mesh("edp") if config.num_experts is not None else None
            for stage in self.stages:
                shard(stage, mesh.device_mesh("dp", "cp"), experts, config, layout.zero)
        models = [stage.model for stage in self.stages]
        parameters = {name: p for model in models for name, p in model.named_parameters()}
        self.optimizer = Optimizer(config, parameters, mesh.world, owned_names(models, mesh.at, layout.zero))
        self.expert_load = ExpertLoad(config, models, mesh.world)
        self._float8 = Float8History(models, mesh.comm("tp", "dp", "cp"))
        self._pending = PendingSteps(self.device, self.expert_load)
        self.pipeline = self._make_pipeline()
        self._gradients_of = StepGraph(self._compute_gradients) if config.cuda_graphs else self._compute_gradients
        self._gradient_sums = GradientSums(config, layout, mesh, models, self.optimizer)
        self._model_state = ModelState(config, models, self.optimizer, mesh)
        self.saver = Saver(
            mesh.world, background=config.async_save, keep=config.keep_checkpoint_max, timeout=mesh.timeout
        )

    def _set_schedules(self, config: Config) -> None:
        """Sets the schedules of learning rate and weight decay to those of a config."""
        self.lr_scheduler = LRScheduler.of(config)
        self.decoupled_scheduler = LRScheduler.of(config, decoupled=True)
        self._schedule = config

    def _make_stage(self, index: int) -> Stage:
        first, last = index == 0, index == self.layout.stages - 1
        layers = self.layout.layers[index]
        model = GPT(self.config, self.device, self.parallel, layers=layers, first=first, last=last)
        return Stage(model, index)

    def _make_pipeline(self) -> GradientAccumulation | Pipeline:
        if self.mesh.layout.pp == 1:
            in_place = sums_in_place(self.config, self.layout)
            after_first = self.optimizer.sum_in_place if in_place else lambda: None
            return GradientAccumulation(self.stages[0], self.layout.zero, after_first)
        from .pipeline import Pipeline

        group = self.mesh.torch_group("pp")
        return Pipeline(self.stages, self.config, self.layout, group, self.device, self.optimizer.collect)

    # Facts about the run that are the same on every rank.

    def all_reduce_max(self, value: int) -> int:
        """The largest of all processes' `value`."""
        if self.world.size == 1:
            return value
        number = torch.tensor([value], dtype=torch.int64, device=self.world.device)
        return int(self.world.all_reduce(number, "max").item())

    def parameter_count(self) -> int:
        """The number of parameters of the full model."""
        optimizer = self.optimizer
        owned = sum(local(p).numel() for n, p in optimizer.model.items() if n in optimizer.owned)
        return int(self.world.all_reduce(torch.tensor([owned], device=self.world.device)).item())

    def whole_model(self) -> GPT:
        """The full, unsharded model on every rank (for sampling at the end of a run)."""
        return self._model_state.gather([n for stage in self.layout.layers for n in stage], self.device)

    # One iteration.

    @property
    def batch_size(self) -> int:
        """Sequences of the next step."""
        return batch_size(self.config, self.consumed)

    def _losses(self, size: int) -> int:
        """The number of mean losses of a global batch of `size`: one per microbatch of each replica and
        context-parallel rank."""
        return size // (self.config.micro_batch_size * self.mesh.layout.dp) * self.replicas.size

    def _fetch(self, split: str, first: int, size: int) -> list[Microbatch]:
        """This rank's part of the global batch of `size` that starts at sample `first`."""
        with phase("data"):
            data = self.data[split]
            return fetch_microbatches(self.config, data, first, size, self.mesh, self.parallel, self.device)

    def _run(self, microbatches: list[Microbatch], size: int, scale: float, total: Tensor) -> None:
        """Forward (and backward, if gradients are enabled) of a global batch of `size`.

        Adds the mean losses of this rank's microbatches to `total` (float32 scalar). The sum of `total` over all ranks,
        divided by `_losses`, is the mean loss of the batch. Gradients are those of this mean times `scale`.
        """
        c = self.config
        draws = torch.is_grad_enabled() and (c.attention_dropout > 0.0 or c.hidden_dropout > 0.0)
        # Forked by the iteration, so that a resumed run draws the same dropout masks as an uninterrupted one.
        for stage in self.stages:
            stage.dropout = self.rng.fork("dropout", self.iteration) if draws else None
        try:
            with spans.span("phase", "forward-backward"):
                self.pipeline.run(microbatches, self._loss(microbatches, self._losses(size), scale, total))
        except RuntimeError as error:
            # A failure of torch's engines may be caused by another rank, which the error then names.
            alone, iteration = self.world.size == 1, self.iteration + 1
            failure = None if alone else hal.engine_failure(error, "step", self.mesh.timeout, iteration)
            if failure is None:
                raise
            raise failure from error

    def _loss(self, microbatches: list[Microbatch], count: int, scale: float, total: Tensor) -> Loss:
        """The function that `_run` differentiates for each microbatch. count: the losses of the global batch."""
        last, tp_rank = next((s.model for s in self.stages if s.model.last), None), self.parallel.tp.rank
        # All microbatches have the same number of tokens, so the mean of their means is the mean over all tokens.
        counted = self._counted(microbatches)

        def loss(y: Tensor, labels: Tensor) -> Tensor:
            assert last is not None
            value = last.loss(y, labels, inplace_backward=True, hidden=self.config.fuses_output_layer)
            if counted is not None:
                # Only some tokens count, so each mean is weighted by its share of the counted tokens (1 on average).
                value = value * (counted_tokens(labels) * count / counted)
            if tp_rank == 0:  # all tensor-parallel ranks have the same loss
                total.add_(value.detach())
            return value * (scale / count)

        return loss

    def _counted(self, microbatches: list[Microbatch]) -> Tensor | None:
        """If not all do, the number of tokens of the global batch that count (float32 scalar, at least 1)."""
        if not self.config.ignores_labels:
            return None
        counts = functools.reduce(torch.add, (counted_tokens(m.labels) for m in microbatches))
        return self.replicas.all_reduce(counts).clamp(min=1).float()

    def forward_backward(self, microbatches: list[Microbatch] | None = None) -> Tensor:
        """Computes the gradients of the global batch (times the loss scale); its mean loss, the same on every rank.

        microbatches: this rank's part of the batch, by default fetched.
        """
        total = torch.zeros((), device=self.device)
        size = self.batch_size
        microbatches = microbatches or self._fetch("train", self.consumed, size)
        self._gradient_sums.expect(self._losses(size) // self.replicas.size)
        scale = self.optimizer.scaler.scale
        self.expert_load.start(scale * self.config.micro_batch_size / size)
        self._float8.start()
        self._run(microbatches, size, scale, total)
        with phase("gradient reduction"):
            loss = self.world.all_reduce(total) / self._losses(size)
            self._gradient_sums.finish()
            self.expert_load.finish()
        return loss

    def step(self) -> StepResult:
        """One iteration and its result. Raises TrainingFailed for a loss or gradient that is not finite; fp16 skips the
        step."""
        self.advance()
        return list(self.results())[-1]

    def advance(self) -> None:
        """One iteration, without waiting for the device; `results` reads its loss and gradient norm.

        If these are not finite, neither this step nor a later one updates the model until `results` has raised. Only
        fp16, --rerun-mode and --verify-ops have the host read something here, since they decide by it how to go on.
        """
        self._pending.begin()
        optimizer, size, before = self.optimizer, self.batch_size, self._progress()
        lr, scale = self.lr_scheduler.lr(self.scheduled), optimizer.scaler.scale
        gradients, bad_batch = self._examined(self._gradients()), False
        if gradients is None:
            gradients, bad_batch = DeviceGradients(torch.full((), math.nan, device=self.device), None), True
        overflow = gradients.norm is None and not bad_batch
        with phase("optimizer"):
            if gradients.norm is not None:
                factor = optimizer.clip_factor(gradients.norm) + self._pending.guard(gradients.loss, gradients.norm)
                decoupled_lr = self.decoupled_scheduler.lr(self.scheduled)
                decay = weight_decay(self._schedule, self.scheduled)
                optimizer.step(lr, factor, decoupled_lr=decoupled_lr, weight_decay=decay)
                self.expert_load.update_biases(factor)
                self._float8.update(factor)
                self.scheduled += size
            if not bad_batch:
                optimizer.scaler.update(overflow)
            if not self.config.cuda_graphs:  # a graph writes its gradients into the same tensors in every step
                optimizer.zero_grad()
        self.iteration += 1
        self.consumed += size
        skipped = overflow or bad_batch
        self.skipped += skipped
        numbers = torch.cat([gradients.numbers(), *self.expert_load.counts()])
        self._pending.add(PendingStep(before, numbers, lr, scale, skipped, size))

    def results(self) -> Iterator[StepResult]:
        """The results of the steps since the last call; waits for the device once. Raises TrainingFailed in the place
        of a step whose loss or gradient is not finite; the run is then as it was before that step."""
        return self._pending.read(self._return_to)

    def _return_to(self, before: Progress) -> None:
        self.iteration, self.consumed, self.scheduled, self.optimizer.steps = before

    def _progress(self) -> Progress:
        return Progress(self.iteration, self.consumed, self.scheduled, self.optimizer.steps)

    @functools.cached_property
    def _reads_every_step(self) -> bool:
        """Whether `run` reads the results of every step, because that costs no wait or a step waits anyway."""
        waits = self.config.fp16 or self._rerun is not None or self.config.verify_ops
        return bool(waits) or not hal.backend().capabilities().asynchronous

    def _gradients(self) -> DeviceGradients:
        """Computes the gradients of this iteration's batch, unscaled; norm is None if they overflow in float16."""
        return self._gradients_of(self._fetch("train", self.consumed, self.batch_size))

    def _compute_gradients(self, microbatches: list[Microbatch]) -> DeviceGradients:
        self.optimizer.zero_grad()
        loss = self.forward_backward(microbatches)
        with hal.device_errors():  # fp16 reads whether the gradients overflow
            overflow = self.config.fp16 and self.optimizer.unscale()
            return DeviceGradients(loss, None if overflow else self.optimizer.grad_norm())

    def _examined(self, gradients: DeviceGradients) -> DeviceGradients | None:
        """With --rerun-mode, computes a suspect step again. Returns what to apply, or None to skip the batch.

        Raises TrainingFailed if an implementation or the device computes wrong results; of --verify-ops on any rank.
        """
        where = f"iteration {self.iteration + 1}, samples from {self.consumed} on"
        wrong = self.verified.wrong()
        if wrong and self._rerun is None:
            raise TrainingFailed(f"{where}: {wrong}; nothing was updated")
        if self._rerun is None:
            return gradients
        first = gradients.read()
        why = self._rerun.suspicion(first)
        if not (wrong or why):
            return gradients
        check = self._rerun.verdict_of_check if wrong else self._rerun.verdict
        cause, text, repeated = check(first, wrong or why, lambda: self._gradients().read())
        if cause == "persistent":
            raise TrainingFailed(f"{where}: {text}; nothing was updated")
        skip = cause == "input" and self.bad_batches < self.config.skip_bad_batches
        result = None if skip else self._gradients()
        # A fault that occurs now and then, but in every execution, is not transient.
        wrong, third = self.verified.wrong(), None if result is None else result.read()
        if wrong or not (third is None or third.same(repeated)):
            problem = wrong or f"a third execution gave another result again ({third} instead of {repeated})"
            raise TrainingFailed(f"{where}: {text}. But {problem}; nothing was updated")
        self.bad_batches += skip
        action = (
            f"the batch is skipped ({self.bad_batches} of {self.config.skip_bad_batches})" if skip else "it goes on"
        )
        self.write_line(f" rerun: {where}: {text}; {action}")
        return result

    def _require_right_update(self) -> None:
        """Raises TrainingFailed if --verify-ops has found a wrong result, on any rank, since the gradients were
        examined: in the optimizer's step or an evaluation. Neither is repeated, since the weights have changed."""
        wrong = self.verified.wrong()
        if wrong:
            raise TrainingFailed(
                f"iteration {self.iteration}, after the gradients: {wrong}; the weights may be wrong, and no "
                "checkpoint of this iteration was written. Continue from an earlier one with --load"
            )

    @torch.no_grad()
    def evaluate(self, split: str = "valid") -> float:
        """Mean loss over eval_iters batches of a split, without dropout."""
        c, total = self.config, torch.zeros((), device=self.device)
        size = c.eval_batch_size
        for batch in range(c.eval_iters):
            self._run(self._fetch(split, batch * size, size), size, 1.0, total)
        with hal.device_errors():
            return float(self.world.all_reduce(total)) / (c.eval_iters * self._losses(size))

    # Checkpoints.

    def tensors(self) -> dict[str, LocalShard]:
        """This rank's part of a checkpoint's tensors, by Megatron's names, sharing memory with the run."""
        return self._model_state.tensors()

    def state(self) -> dict[str, Any]:
        """The rest of a checkpoint, as JSON values."""
        return {
            "iteration": self.iteration,
            "lineage": self.lineage,
            "consumed_samples": self.consumed,
            "skipped": self.skipped,
            "scheduled_samples": self.scheduled,
            "bad_batches": self.bad_batches,
            "rerun_losses": list(self._rerun.losses) if self._rerun else [],
            "optimizer_steps": self.optimizer.steps,
            "loss_scaler": asdict(self.optimizer.scaler),
            "rng": list(self.rng.state()),
            "config": options(self.config),
            "data": data_state(self.data),
        }

    def save(self, root: Path) -> Path:
        """Writes a checkpoint, makes it the latest of `root`, and removes old ones in excess of keep_checkpoint_max.

        With async_save this continues in the background; `saver` reports completion and errors.
        """
        return self.saver.save(root, self.iteration, self.tensors(), self.state())

    def load(self, root: Path) -> None:
        """Continues from the latest checkpoint of `root`, subject to the config's load options.

        Only the weights of a release are loaded, as with finetune.
        """
        c = self.config
        folder, state, weights_only = read_checkpoint(root, c, self.world)
        c.vocabulary = saved_vocabulary(state, folder) or c.vocabulary
        self.notes = [] if weights_only else differences(state, c, self.data, folder)
        self._model_state.load(folder, moments=not (c.no_load_optim or weights_only))
        if weights_only:
            return
        self.lineage = lineage.begin(state)
        self.iteration, self.consumed = state["iteration"], 0 if c.new_dataset else state["consumed_samples"]
        self.skipped, self.bad_batches = state["skipped"], state.get("bad_batches", 0)
        if self._rerun:
            self._rerun = RerunCheck(state.get("rerun_losses", []))
        if c.no_load_optim:
            return
        self.optimizer.steps = state["optimizer_steps"]
        # Older checkpoints have a constant batch size.
        self.scheduled = state.get("scheduled_samples", self.optimizer.steps * c.global_batch_size)
        if c.use_checkpoint_opt_param_scheduler:
            self._set_schedules(resolve(saved_options(state, folder)))
        self.optimizer.scaler.resume(LossScaler(**state["loss_scaler"]))

    # The loop.

    def run(
        self,
        *,
        stop: Callable[[], bool],
        on_step: Callable[[StepResult], None],
        on_evaluation: Callable[[int, float], None],
        on_save: Callable[[Path], None],
        before_save: Callable[[], None] = lambda: None,
        around_step: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Iterates until train_iters, an exit_interval, exit_duration_in_mins, or stop() of any rank; saves and
        evaluates at their intervals.

        The device computes while the host prepares the next steps: results are read, and on_step called, once per
        log_interval, after the first step, and before an evaluation and a save (on the CPU: after every step).
        before_save: called before a checkpoint is written, when its iteration and evaluation are complete.
        around_step: a context for each step, without what is done between steps.
        on_save: called with each completed checkpoint, which with async_save may be some iterations later.
        """
        c, began, start, late = self.config, time.monotonic(), self.iteration, False
        root, vote = Path(c.save) if c.save else None, StopVote(self.world)
        while self.iteration < c.train_iters and not vote(stop() or late):
            with around_step():
                self.advance()
            evaluating = evaluates(c) and self.iteration % (c.eval_interval or 1) == 0
            saving = root if c.save_interval and self.iteration % c.save_interval == 0 else None
            logged = self._reads_every_step or self.iteration == start + 1 or self.iteration % c.log_interval == 0
            if logged or evaluating or saving:
                for result in self.results():
                    on_step(result)
            if evaluating:
                on_evaluation(self.iteration, self.evaluate())
            self._require_right_update()
            if saving:
                before_save()
                self.save(saving)
            for path in self.saver.finished():
                on_save(path)
            if c.exit_interval and self.iteration % c.exit_interval == 0:
                break
            late = (time.monotonic() - began) / 60.0 > (c.exit_duration_in_mins or math.inf)
        for result in self.results():
            on_step(result)
        vote.close()


def peak_memory_bytes() -> int:
    """The backend's peak of device memory, or the process's peak resident set size if the backend does not count."""
    peak = hal.backend().memory_stats().get("peak")
    if peak is None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(peak)
