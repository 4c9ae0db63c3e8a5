"""A trainer under any layout on tokens that are made up, one process per rank, for measuring it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hal.model.arguments import build
from hal.model.checks import check_model
from hal.model.config import Config
from hal.model.train import make_trainer
from hal.model.trainer import Trainer

VOCABULARY = 255
"""Token ids of a config that does not say how many it has; with end-of-document, a power of two."""


@dataclass(frozen=True)
class MadeUp:
    """A split whose sample n is `length` random ids below `vocabulary`, drawn from n."""

    length: int
    vocabulary: int

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), int64 [count, length] each."""
        samples = range(first, first + count)
        generators = (torch.Generator().manual_seed(n) for n in samples)
        ids = torch.stack([torch.randint(0, self.vocabulary, (self.length + 1,), generator=g) for g in generators])
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def join() -> None:
    """Joins the ranks' process group, once per process; the ranks meet over a file. Alone: nothing."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        store = dist.FileStore(os.environ["HAL_BENCH_MEETING"], size)
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))


def config_of(options: Mapping[str, Any]) -> Config:
    """The config of these options for any number of processes, with a vocabulary of its own."""
    known = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY, "data_path": ("made-up",)}
    config = build({**known, **options}, check_model)
    assert config.vocab_size
    config.set_vocabulary(config.vocab_size + 1)
    return config


def trainer_of(config: Config) -> Trainer:
    """This rank's trainer, on made-up tokens."""
    vocabulary = config.vocab_size or config.padded_vocab_size
    data: Any = {name: MadeUp(config.seq_length, vocabulary) for name in ("train", "valid")}
    return make_trainer(config, data)
