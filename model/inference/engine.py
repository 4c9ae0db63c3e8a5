"""A model laid out over ranks for forward passes only: what generation, evaluation and serving run on.

Tensor parallel ranks share layers, pipeline ranks hold stages, context parallel ranks share sequences; the numbers are
those of one process up to rounding. Every rank of the world makes the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hal import Comm, HalError, Message, ops
from hal.mesh import Mesh

from . import checkpoint
from .cache import KeyValueCache
from .config import Config, ConfigError
from .gpt import GPT
from .layers import Parallel
from .parallel.pieces import Piece, piece
from .parallel.plan import Plan

_WORD, _COPY = "embedding.word_embeddings.weight", "output_layer.weight"


NOT_FINITE = ": the weights hold NaN or infinite values, or --dtype is too narrow for them"


class NotFinite(HalError):
    """The model's numbers are infinite or not a number. Raised by every rank alike, which can go on."""


class Engine:
    """This rank's stage of a model. `vocabulary`: the number of ids that are tokens; padding never gets any
    probability. `lead`: whether this process speaks for all."""

    def __init__(
        self,
        model: GPT,
        vocabulary: int,
        mesh: Mesh | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.model, self.vocabulary, self.mesh = model, vocabulary, mesh
        self.config, self.device, self.parallel = model.config, next(model.parameters()).device, model.parallel
        self.layers = range(model.config.num_layers) if layers is None else layers
        self.pp: Comm | None = mesh.comm("pp") if mesh is not None and mesh.layout.pp > 1 else None
        self.lead = mesh is None or mesh.rank == 0
        self._sent: Callable[[], list[Tensor]] | None = None

    @staticmethod
    def build(config: Config, vocabulary: int, device: torch.device, mesh: Mesh | None, plan: Plan) -> Engine:
        """This rank's stage with the weights of initialisation. Raises ConfigError via the plan."""
        stage = 0 if mesh is None else mesh.at["pp"]
        parallel = Parallel()
        if mesh is not None:
            parallel = Parallel(tp=mesh.comm("tp"), cp=mesh.comm("cp"), cp_algorithm=config.context_parallel_algo)
        layers = plan.layers[stage]
        model = GPT(
            config, device, parallel, layers=layers, first=stage == 0, last=stage == plan.stages - 1
        ).requires_grad_(False)
        return Engine(model, vocabulary, mesh, layers=layers)

    def load(self, folder: Path) -> None:
        """Fills the weights from a checkpoint's folder, of whatever layout. Raises HalError if it does not fit."""
        pieces = {}
        tied = not self.config.untie_embeddings_and_output_weights
        for name, parameter in self.model.named_parameters():
            whole = _WORD if tied and name == _COPY else name
            pieces[whole] = self._piece(name, parameter.detach())
        checkpoint.load_tensors(folder, checkpoint.sources(pieces, folder, moments=False))

    def _piece(self, name: str, parameter: Tensor) -> Piece:
        return piece(parameter, parameter, self.model.shards.get(name), self.parallel.rank, self.parallel.size, 0)

    @property
    def replicas(self) -> int:
        """How many data-parallel ranks hold the same part of the model."""
        return 1 if self.mesh is None else self.mesh.layout.dp

    @property
    def replica(self) -> int:
        """Which of them this is."""
        return 0 if self.mesh is None else self.mesh.at["dp"]

    def require_one_replica(self, what: str) -> None:
        """Raises ConfigError if data-parallel ranks would only repeat each other's work."""
        if self.mesh is not None and self.replicas > 1:
            raise ConfigError(
                f"{what} shares one model among its ranks, but {self.mesh.layout.world} processes hold {self.replicas} "
                "of them; start --tensor-model-parallel-size x --pipeline-model-parallel-size processes"
            )

    # Forward passes.

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty cache for this rank's layers. Raises ContractError where the layout cuts sequences."""
        return KeyValueCache(self.config, self.layers, batch, capacity, self.parallel, self.device)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        rows: int | None = None,
        *,
        padding: bool = False,
        starts: Tensor | None = None,
    ) -> Tensor | None:
        """Logits [s or rows, b, v_local] of tokens [b, s] on the last stage's ranks, None elsewhere.

        padding: also the padding ids', which else have none. starts: of documents, as in GPT.forward.
        tokens: of whole sequences; with context parallelism each rank computes its share of the rows.
        """
        cp = self.parallel.context_rows(tokens.shape[1])
        x = cp.take(tokens, 1).to(self.device)
        if self.pp is not None and self.pp.rank > 0:
            shape = (x.shape[1], x.shape[0], self.config.hidden_size)
            empty = torch.empty(shape, dtype=self.config.params_dtype, device=self.device)
            (x,) = self.pp.exchange(receives=[Message(self.pp.rank - 1, empty)])
        x = self.model(x, cache=cache, rows=rows, starts=starts)
        if self.model.last:
            if not padding:
                start = self.parallel.rank * x.shape[-1]
                x[..., max(0, self.vocabulary - start) :] = torch.finfo(x.dtype).min
            return x
        assert self.pp is not None
        self.settle()
        self._sent = self.pp.exchange_start([Message(self.pp.rank + 1, x.contiguous())], [])
        return None

    def settle(self) -> None:
        """Waits until the next stage has what was sent to it."""
        if self._sent is not None:
            self._sent()
            self._sent = None

    def next_logits(self, tokens: Tensor, cache: KeyValueCache | None) -> Tensor | None:
        """Logits [b, vocabulary] of the token after tokens [b, s], on the last stage's ranks, None elsewhere."""
        logits = self.forward(tokens, cache, rows=1)
        if logits is None:
            return None
        last = logits[0].t().contiguous()
        tp = self.parallel.tp
        whole = last if tp is None or tp.size == 1 else tp.all_gather(last)
        return whole[: self.vocabulary].t()

    def agree(self, numbers: Tensor | None, like: Tensor) -> Tensor:
        """The numbers of the rank that leads the last stage, on every rank; `like` has their shape and dtype."""
        self.settle()
        if self.mesh is None or self.mesh.world.size == 1:
            assert numbers is not None
            return numbers
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

        tokens, labels: int64 [b, s]; counted: bool [b, s], which labels count. A label is missed unless it is the
        likeliest token. padding: the vocabulary's padding takes part in the softmax, as it does in training. Shares are
        summed by `total`. Any s: sequences are padded to what the layout can cut.
        """
        tokens, labels, counted = (self._pad(x) for x in (tokens, labels, counted))
        share = torch.zeros(len(tokens), 3, device=self.device)
        logits = self.forward(tokens, padding=padding, starts=starts)
        if logits is None:
            return share
        rows = self.parallel.context_rows(tokens.shape[1])
        y_SB, counted_SB = (rows.take(x, 1).t().contiguous().to(self.device) for x in (labels, counted))
        start = self.parallel.rank * logits.shape[-1]
        nll_SB = ops.cross_entropy(logits, y_SB, vocab_start=start, comm=self.parallel.tp)
        missed_SB = self._likeliest(logits, start) != y_SB
        if self.parallel.rank == 0:
            for column, values in enumerate((nll_SB, missed_SB, counted_SB)):
                share[:, column] = (values.float() * counted_SB).sum(0)
        return share

    def total(self, shares: Tensor) -> Tensor:
        """The sum of every rank's shares, on the CPU of every rank. Raises NotFinite for losses that are no numbers."""
        self.settle()
        alone = self.mesh is None or self.mesh.world.size == 1
        whole = shares.cpu() if alone else self.mesh.world.all_reduce(shares).cpu()
        bad = int((~whole.isfinite().all(-1)).sum())
        if bad:
            raise NotFinite(f"the losses of {bad} of {len(whole)} sequences are not finite{NOT_FINITE}")
        return whole

    def _likeliest(self, logits: Tensor, start: int) -> Tensor:
        """Ids [s, b] with the largest logit over all tensor-parallel ranks."""
        value, index = logits.float().max(-1)
        tp = self.parallel.tp
        if tp is None or tp.size == 1:
            return index + start
        values, indices = tp.all_gather(value[None]), tp.all_gather((index + start)[None])
        return indices.gather(0, values.argmax(0)[None])[0]

    def _pad(self, x: Tensor) -> Tensor:
        cp = 1 if self.parallel.cp is None else self.parallel.cp.size
        multiple = 2 * cp if cp > 1 and self.parallel.cp_algorithm == "ring" else cp
        return torch.nn.functional.pad(x, (0, -x.shape[1] % multiple))
