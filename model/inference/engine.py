"""A model distributed over ranks for forward passes only, as used by generation and evaluation.

Tensor-parallel ranks share layers, pipeline ranks hold stages, and context-parallel ranks share sequences. Results
equal those of a single process up to rounding. Every rank of the world must make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import hal
from hal import HalError, Message, ops
from hal.mesh import Layout, Mesh

from ..checkpoint import reader
from ..checkpoint.sharded_tensor import shard_of_rank
from ..config.parallel_layout import ParallelLayout, sequence_parts
from ..config.schema import Config, ConfigError
from ..gpt.kv_cache import KeyValueCache, bucket
from ..gpt.model import GPT
from ..parallel.tensor_sharding import Parallel

NOT_FINITE = ": the weights hold NaN or infinite values, or --dtype is too narrow for them"


class NotFinite(HalError):
    """The model's results are infinite or NaN. Raised on every rank, so that all of them can take the next request."""


class Engine:
    """This rank's stage of a model.

    vocabulary: the number of ids without padding; padding ids never get any probability. lead: whether this process
    prints and returns results on behalf of all ranks.
    """

    def __init__(
        self,
        model: GPT,
        vocabulary: int,
        mesh: Mesh | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        """mesh: default one rank. layers: global numbers of those that `model` holds, default all."""
        self.model, self.vocabulary, self.mesh = model, vocabulary, mesh or Mesh(Layout(), hal.backend())
        self.config, self.device, self.parallel = model.config, next(model.parameters()).device, model.parallel
        self.layers = range(model.config.num_layers) if layers is None else layers
        self.pp, self.lead = self.mesh.comm("pp"), self.mesh.rank == 0
        # A device that compiles every shape gets lengths that are powers of two.
        self.bucketed = hal.backend().capabilities().static_shapes
        self._sent: Callable[[], list[Tensor]] | None = None

    @staticmethod
    def build(config: Config, vocabulary: int, mesh: Mesh, layout: ParallelLayout) -> Engine:
        """This rank's stage with the weights of initialisation."""
        stage, parallel = mesh.at["pp"], Parallel.of(mesh, config)
        layers, last = layout.layers[stage], stage == layout.stages - 1
        model = GPT(config, hal.local_device(), parallel, layers=layers, first=stage == 0, last=last)
        return Engine(model.requires_grad_(False), vocabulary, mesh, layers=layers)

    def load(self, folder: Path) -> None:
        """Loads the weights from a checkpoint's folder, of any layout. Raises HalError if it does not fit the model."""
        model = self.model
        shards = {
            model.stored_name(name): shard_of_rank(p, p.detach(), model.shards.get(name), self.parallel, 0)
            for name, p in (*model.named_parameters(), *model.named_buffers())
        }
        reader.load_tensors(folder, reader.sources(shards, folder, moments=False))

    @property
    def replicas(self) -> int:
        """The number of data-parallel ranks, which hold the same part of the model."""
        return self.mesh.layout.dp

    @property
    def replica(self) -> int:
        """This rank's index among its replicas."""
        return self.mesh.at["dp"]

    def require_one_replica(self, what: str) -> None:
        """Raises ConfigError if there are several replicas, which would only repeat each other's work."""
        if self.replicas > 1:
            raise ConfigError(
                f"{what} shares one model among its ranks, but {self.mesh.layout.world} processes hold {self.replicas} "
                "of them; start --tensor-model-parallel-size x --pipeline-model-parallel-size processes"
            )

    # Forward passes.

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty cache for this rank's layers. Raises ContractError for a layout that splits sequences."""
        return KeyValueCache(
            self.config, self.layers, batch, capacity, self.parallel, self.device, bucketed=self.bucketed
        )

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        rows: slice | None = None,
        *,
        padding: bool = False,
        starts: Tensor | None = None,
    ) -> Tensor | None:
        """Logits [s or rows, b, v_local] of tokens [b, s] on the last stage's ranks, None elsewhere.

        tokens: full sequences; with context parallelism each rank computes its share of the rows. padding: keep the
        logits of the padding ids, which otherwise become the lowest finite number. rows, starts: as in GPT.forward.
        """
        x = self.parallel.context_rows(tokens.shape[1]).take(tokens, 1).to(self.device)
        if self.pp.rank > 0:
            shape = (x.shape[1], x.shape[0], self.config.hidden_size)
            empty = torch.empty(shape, dtype=self.config.residual_dtype, device=self.device)
            (x,) = self.pp.exchange(receives=[Message(self.pp.rank - 1, empty)])
        y: Tensor = self.model(x, cache=cache, rows=rows, starts=starts)
        if self.model.last:
            if not padding:
                start = self.parallel.tp.rank * y.shape[-1]
                y[..., max(0, self.vocabulary - start) :].fill_(torch.finfo(y.dtype).min)
            return y
        self.settle()
        self._sent = self.pp.exchange_start([Message(self.pp.rank + 1, y.contiguous())], [])
        return None

    def settle(self) -> None:
        """Waits until the next stage has received what was sent to it."""
        if self._sent is not None:
            self._sent()
            self._sent = None

    def next_logits(self, tokens: Tensor, cache: KeyValueCache | None) -> Tensor | None:
        """Logits [b, vocabulary] of the token after tokens [b, s], on the last stage's ranks, None elsewhere."""
        count = tokens.shape[1]
        if self.bucketed:
            tokens = _pad(tokens, bucket(count, 1, self.config.seq_length if cache is None else cache.free))
        logits = self.forward(tokens, cache, rows=slice(count - 1, count))
        if cache is not None:
            cache.discard(tokens.shape[1] - count)
        if logits is None:
            return None
        whole = ops.mappings.gather_from_region(logits[0].t().contiguous(), self.parallel.tp, 0)
        return whole[: self.vocabulary].t()

    def broadcast_from_last_stage(self, numbers: Tensor | None, like: Tensor) -> Tensor:
        """The numbers of the last stage's first rank, on the CPU of every rank; `like` has their shape and dtype."""
        self.settle()
        if self.mesh.world.size == 1:
            assert numbers is not None
            return numbers  # avoids a copy to the device and back for every token
        source = self.mesh.layout.rank(pp=self.mesh.layout.pp - 1)
        sent = like if numbers is None else numbers
        return self.mesh.world.broadcast(sent.to(self.device), source).cpu()

    def score(
        self,
        tokens: Tensor,
        labels: Tensor,
        counted: Tensor,
        *,
        padding: bool = False,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Per sequence, this rank's share of (negative log-likelihood, labels missed, labels counted), float32 [b, 3].

        tokens, labels: int64 [b, s]; counted: bool [b, s], which labels count. A label is missed unless it is the most
        likely token. padding: the vocabulary's padding takes part in the softmax, as in training. `total` sums the
        shares. s may be any length: sequences are padded to a multiple that the layout can split.
        """
        length = self._scored_length(tokens.shape[1])
        tokens, labels, counted = (_pad(x, length) for x in (tokens, labels, counted))
        share = torch.zeros(len(tokens), 3, device=self.device)
        logits = self.forward(tokens, padding=padding, starts=starts)
        if logits is None:
            return share
        rows = self.parallel.context_rows(tokens.shape[1])
        y_SB, counted_SB = (rows.take(x, 1).t().contiguous().to(self.device) for x in (labels, counted))
        start = self.parallel.tp.rank * logits.shape[-1]
        nll_SB = ops.cross_entropy(logits, y_SB, vocab_start=start, comm=self.parallel.tp)
        missed_SB = self._likeliest(logits, start) != y_SB
        if self.parallel.tp.rank == 0:
            for column, values in enumerate((nll_SB, missed_SB, counted_SB)):
                share[:, column] = (values.float() * counted_SB).sum(0)
        return share

    def total(self, shares: Tensor) -> Tensor:
        """The sum of all ranks' shares [b, 3], on the CPU of every rank. Raises NotFinite if a loss is not finite."""
        self.settle()
        with hal.device_errors():  # the first read of what the device has computed
            whole = self.mesh.world.all_reduce(shares).cpu()
        bad = int((~whole.isfinite().all(-1)).sum())
        if bad:
            raise NotFinite(f"the losses of {bad} of {len(whole)} sequences are not finite{NOT_FINITE}")
        return whole

    def _likeliest(self, logits: Tensor, start: int) -> Tensor:
        """Ids [s, b] of the largest logits over all tensor-parallel ranks. logits [s, b, v_local]; this rank's ids
        begin at `start`."""
        value, index = logits.float().max(-1)
        tp = self.parallel.tp
        values, indices = tp.all_gather(value[None]), tp.all_gather((index + start)[None])
        return indices.gather(0, values.max(0).indices[None])[0]

    def _scored_length(self, count: int) -> int:
        """The length to which sequences of `count` tokens are padded, so that context-parallel ranks can split them
        evenly; a bucket if the device compiles every shape."""
        if self.bucketed:
            count = bucket(count, 1, self.config.seq_length)
        multiple = sequence_parts(self.config)
        return -(-count // multiple) * multiple


def _pad(x: Tensor, length: int) -> Tensor:
    """x [b, s] with zeros appended to every sequence."""
    return torch.nn.functional.pad(x, (0, length - x.shape[1]))
