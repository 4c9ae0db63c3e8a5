"""Division of a global batch into microbatches: the samples and columns that each rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import hal
from hal.mesh import Mesh

from ..config.schema import Config
from ..data.gpt_dataset import Split
from ..parallel import document_mask
from ..parallel.tensor_sharding import Parallel


@dataclass(frozen=True)
class Microbatch:
    """This rank's part of some samples of the global batch, on its device.

    tokens, labels: int64 [b, s]; with context parallelism this rank's columns. first_sample: index in the global batch.
    starts: where each token's document begins, int64 [b, s] of full sequences on the CPU, or None (see GPT.forward).
    """

    tokens: Tensor
    labels: Tensor
    first_sample: int
    starts: Tensor | None

    def sample_numbers(self) -> Tensor:
        """The samples' indices in the global batch, int64 [b] on the CPU."""
        return torch.arange(self.first_sample, self.first_sample + len(self.tokens))


def fetch_microbatches(
    config: Config, split: Split, first: int, batch: int, mesh: Mesh, parallel: Parallel, device: torch.device
) -> list[Microbatch]:
    """The microbatches of this rank's replica, on `device`, of the `batch` samples from sample `first` on.

    The replicas take turns: replica r has the microbatches r, r + dp, r + 2 dp, ... of the global batch.
    """
    c, size = config, config.micro_batch_size
    columns, microbatches = parallel.context_rows(c.seq_length), []
    for place in range(mesh.at["dp"] * size, batch, mesh.layout.dp * size):
        tokens, labels = split.fetch(first + place, size)
        starts = split.starts(first + place, tokens) if c.has_documents else None
        tokens, labels = (hal.to_device(columns.take(x, 1), device) for x in (tokens, labels))
        microbatches.append(Microbatch(tokens, labels, place, starts))
    return microbatches


def counted_tokens(labels: Tensor) -> Tensor:
    """The number of labels [b, s] that count, int64 scalar."""
    return (labels != document_mask.IGNORED).sum()
