"""The training loop on many ranks: every rank runs the same steps on its share, and all report the same numbers.

Losses, gradient norms, skipped steps and the learning rate are those of one process up to rounding; dropout is
bit-equal, because each rank draws its block of the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import hal
from hal import ops
from hal.mesh import Mesh

from .. import documents
from ..checkpoint import FP32
from ..config import Config
from ..data import Split
from ..draws import Draws
from ..gpt import GPT
from ..layers import Parallel, Shard
from ..optimizer import Optimizer, local
from ..trainer import Trainer
from .pieces import Piece, piece
from .plan import Plan, sums_in_place
from .reduce import GradientReducer, sum_over
from .stages import OneStage, Pipeline, Stage, shard

WORD, COPY = "embedding.word_embeddings.weight", "output_layer.weight"
"""The tied weight, and the name of the last stage's copy of it."""


class ParallelOptimizer(Optimizer):
    """AdamW on this rank's share; overflow and gradient norm are those of the whole model."""

    keeps_rounded = False  # gradients are summed over ranks, too

    def __init__(self, config: Config, parameters: Mapping[str, nn.Parameter], world: hal.Comm) -> None:
        super().__init__(config, parameters)
        self.world = world
        self.counted = set(parameters)
        """Names whose gradients this rank adds to the norm: over all ranks, every element once."""

    def grads(self) -> dict[str, Tensor]:
        self.collect()
        return super().grads()

    def collect(self) -> None:
        """Adds 16-bit gradients that no hook has collected to the float32 sums."""
        if self.low:
            for name, parameter in self.model.items():
                if parameter.grad is not None:
                    self._collect(name, parameter)

    def unscale(self) -> bool:
        found = ops.unscale_and_check(list(self.grads().values()), 1.0 / self.scaler.scale)
        return bool(self.world.all_reduce(found, "max").item())

    def grad_norm(self) -> float:
        mine = [g for n, g in self.grads().items() if n in self.counted]
        device = next(iter(self.main.values())).device
        norm = ops.l2norm(mine) if mine else torch.zeros((), device=device)
        return float(self.world.all_reduce(norm * norm).sqrt())


class ParallelTrainer(Trainer):
    """A rank's stages of the model, the data all ranks share, and this rank's part of the optimizer."""

    def __init__(self, config: Config, data: dict[str, Split], mesh: Mesh, plan: Plan, device: torch.device) -> None:
        self.mesh, self.plan = mesh, plan
        parallel = Parallel(
            tp=mesh.comm("tp"),
            sequence=config.sequence_parallel,
            cp=mesh.comm("cp"),
            cp_algorithm=config.context_parallel_algo,
        )
        self.parallel = parallel
        self.stages = [self._stage(config, device, parallel, i) for i in plan.stages_of(mesh.at["pp"])]
        self.replicas = mesh.comm("dp", "cp")
        if plan.zero:
            for stage in self.stages:
                shard(stage, mesh.device_mesh("dp", "cp"), config, plan.zero)
        super().__init__(config, self.stages[0].model, data)
        self.device = device
        self._engine = self._make_engine(group_device=device)
        self._links = self._tied_links()
        self._reducer = self._make_reducer()

    def make_optimizer(self) -> Optimizer:
        parameters = {n: p for stage in self.stages for n, p in stage.model.named_parameters()}
        optimizer = ParallelOptimizer(self.config, parameters, self.mesh.world)
        optimizer.counted = {n for n in parameters if self._counts(n, parameters)}
        return optimizer

    @property
    def world(self) -> hal.Comm:
        return self.mesh.world

    def agreed(self, value: int) -> int:
        numbers = torch.tensor([value], dtype=torch.int64, device=self.device)
        return int(self.mesh.world.all_reduce(numbers, "max").item())

    def parameter_count(self) -> int:
        optimizer = self.optimizer
        mine = sum(local(p).numel() for n, p in optimizer.model.items() if n in optimizer.counted)
        return int(self.mesh.world.all_reduce(torch.tensor([mine], device=self.device)).item())

    def _stage(self, config: Config, device: torch.device, parallel: Parallel, index: int) -> Stage:
        model = GPT(
            config,
            device,
            parallel,
            layers=self.plan.layers[index],
            first=index == 0,
            last=index == self.plan.stages - 1,
        )
        return Stage(model, index, self._draws)

    def _make_engine(self, group_device: torch.device) -> OneStage | Pipeline:
        if self.plan.layout.pp == 1:
            return OneStage(self.stages[0], self.plan.zero, self._sum_in_place)
        c = self.config
        rows = self.parallel.hidden_rows(c.seq_length).count
        group = self.mesh.torch_group("pp")
        return Pipeline(
            self.stages,
            c,
            self.plan,
            group,
            group_device,
            (rows, c.micro_batch_size, c.hidden_size),
            self.optimizer.collect,
        )

    def _sum_in_place(self) -> None:
        if sums_in_place(self.config, self.plan):
            self.optimizer.sum_in_place()

    def _sharded(self, name: str) -> bool:
        """Whether tensor-parallel ranks hold different parts of a parameter."""
        return any(name in s.model.shards for s in self.stages) or name == COPY

    def _counts(self, name: str, parameters: Mapping[str, nn.Parameter]) -> bool:
        at = self.mesh.at
        if name == COPY and not self.config.untie_embeddings_and_output_weights:
            return False
        first_replica = self.plan.zero > 0 or (at["dp"] == 0 and at["cp"] == 0)
        return first_replica and (self._sharded(name) or at["tp"] == 0)

    def _tied_links(self) -> hal.Comm | None:
        """The ranks that hold a copy of the tied weight, if they are two."""
        first, last = self.plan.rank_of(0), self.plan.rank_of(self.plan.stages - 1)
        if self.config.untie_embeddings_and_output_weights or first == last or self.mesh.at["pp"] not in (first, last):
            return None
        ends = sorted(self.plan.layout.rank(**{**self.mesh.at, "pp": pp}) for pp in (first, last))
        return self.mesh.comm_of(tuple(ends))

    def _make_reducer(self) -> GradientReducer | None:
        if self.replicas.size == 1 or self.plan.zero:
            return None
        c = self.config
        return GradientReducer(
            self.replicas,
            self.optimizer.model,
            self.optimizer.grads,
            bucket_size=c.ddp_bucket_size,
            overlap=c.overlap_grad_reduce,
            count=self.plan.microbatches,
        )

    # One iteration.

    def _draws(self, first_sample: int) -> Draws | None:
        c = self.config
        assert c.global_batch_size
        if not torch.is_grad_enabled() or not (c.attention_dropout or c.hidden_dropout):
            return None
        return Draws(self.rng.fork("dropout", self.iteration), first_sample, c.global_batch_size)

    def share(self, split: str, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """This replica's (tokens, labels) [samples, rows] of the batch at sample `first`, the samples' places, and
        where each token's document starts [samples, s], if that matters."""
        c, dp = self.config, self.plan.layout.dp
        assert c.global_batch_size
        stride = c.micro_batch_size * dp
        starts = range(self.mesh.at["dp"] * c.micro_batch_size, c.global_batch_size, stride)
        parts = [self.data[split].fetch(first + start, c.micro_batch_size) for start in starts]
        rows = self.parallel.context_rows(c.seq_length)
        whole, targets = (torch.cat(x) for x in zip(*parts))
        tokens, labels = (rows.take(x, 1).to(self.device) for x in (whole, targets))
        places = torch.cat([torch.arange(start, start + c.micro_batch_size) for start in starts])
        return tokens, labels, places, self.document_starts(split, whole)

    def _run(self, split: str, first: int, scale: float) -> Tensor:
        """Forward (and backward, if gradients are enabled) of a batch; its mean loss, the same on every rank."""
        last = next((s.model for s in self.stages if s.model.last), None)
        # Every replica and context rank has the same number of tokens, so the mean of their means is the mean.
        count = self.plan.microbatches * self.plan.layout.dp * self.plan.layout.cp
        total = torch.zeros((), device=self.device)
        share = self.share(split, first)
        counted = self._counted(share[1])

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            assert last is not None
            value = last.loss(logits, labels, inplace_backward=True)
            if counted is not None:
                # From the mean of the tokens that count here to a share of the mean of all that count.
                value = value * ((labels != documents.IGNORED).sum() * (count / counted))
            if self.mesh.at["tp"] == 0:
                total.add_(value.detach())
            return value * (scale / count)

        try:
            self._engine.run(*share, self.plan.microbatches, loss)
        except RuntimeError as error:
            failure = hal.engine_failure(error, "step", self.mesh.timeout, self.iteration + 1)
            if failure is None:
                raise
            raise failure from error
        return self.mesh.world.all_reduce(total) / count

    def _counted(self, labels: Tensor) -> int | None:
        """With --eod-mask-loss, how many tokens of the whole batch count; `labels` are this rank's."""
        if not self.config.eod_mask_loss:
            return None
        mine = (labels != documents.IGNORED).sum()
        return max(1, int(self.replicas.all_reduce(mine)))

    def forward_backward(self) -> Tensor:
        loss = self._run("train", self.consumed, self.optimizer.scaler.scale)
        grads = self.optimizer.grads()
        if self._reducer is not None:
            self._reducer.finish()
        if self.parallel.sequence and self.parallel.tp is not None:
            # Each rank saw its rows only.
            sum_over(self.parallel.tp, [g for n, g in grads.items() if not self._sharded(n)])
        self._sum_tied(grads)
        return loss

    def _sum_tied(self, grads: dict[str, Tensor]) -> None:
        if self.config.untie_embeddings_and_output_weights or self.plan.stages == 1:
            return
        here = [grads[n] for n in (WORD, COPY) if n in grads]
        if self._links is not None:
            sum_over(self._links, here)
        elif len(here) == 2:
            here[0] += here[1]
            here[1].copy_(here[0])

    @torch.no_grad()
    def evaluate(self, split: str = "valid") -> float:
        c = self.config
        assert c.global_batch_size
        batches = [self._run(split, batch * c.global_batch_size, 1.0) for batch in range(c.eval_iters)]
        return float(torch.stack(batches).mean())

    # Checkpoints.

    def tensors(self, *, mine: bool = True) -> dict[str, Piece]:
        """The last stage's copy of a tied weight goes by the weight's own name, and is written by the first."""
        optimizer, tied = self.optimizer, not self.config.untie_embeddings_and_output_weights
        low = self.config.params_dtype != torch.float32
        kinds = {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
        found: dict[str, Piece] = {}
        for name, parameter in optimizer.model.items():
            if mine and name not in optimizer.counted:
                continue
            whole = WORD if tied and name == COPY else name
            if whole != name and whole in optimizer.model:
                continue  # both ends of the pipeline are here; see load_tensors
            values = {whole: local(parameter).to(self.config.params_dtype)}
            if low:
                values[FP32 + whole] = optimizer.main[name]
            values.update({f"optimizer.state.{kind}.{whole}": held[name] for kind, held in kinds.items()})
            found.update({key: self._piece(name, parameter, held) for key, held in values.items()})
        return found

    def _piece(self, name: str, parameter: Tensor, held: Tensor) -> Piece:
        shard = next((s.model.shards[name] for s in self.stages if name in s.model.shards), None)
        if name == COPY:
            shard = Shard(0)
        return piece(parameter, held, shard, self.mesh.at["tp"], self.plan.layout.tp, self.replicas.rank)

    def load_tensors(self, folder: Path, *, moments: bool) -> None:
        super().load_tensors(folder, moments=moments)
        optimizer = self.optimizer
        if COPY in optimizer.model and WORD in optimizer.model and not self.config.untie_embeddings_and_output_weights:
            for held in (optimizer.main, optimizer.exp_avg, optimizer.exp_avg_sq):
                held[COPY].copy_(held[WORD])
            local(optimizer.model[COPY]).copy_(optimizer.main[COPY])

    @torch.no_grad()
    def whole(self) -> GPT:
        """The whole model on every rank, as one process would have it (for sampling at the end of a run)."""
        model = GPT(self.config, self.device, layers=[n for stage in self.plan.layers for n in stage])
        mine = self.tensors()
        for name, parameter in model.named_parameters():
            gathered = torch.zeros_like(parameter, dtype=torch.float32)
            if name in mine:
                mine[name].fill(gathered)
            parameter.copy_(self.mesh.world.all_reduce(gathered))
        return model
