"""A trainer under any parallel layout on random tokens, one process per rank, for measuring it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.model.config.command_line import build
from hal.model.config.schema import Config
from hal.model.config.validation import check_model
from hal.model.training.trainer import Trainer, make_trainer

VOCABULARY = 255
"""The default number of token ids; a power of two including end-of-document."""


@dataclass(frozen=True)
class RandomTokens:
    """A split whose sample n is `length` random ids below `vocabulary`, drawn with seed n."""

    length: int
    vocabulary: int

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), int64 [count, length] each."""
        samples = range(first, first + count)
        generators = (torch.Generator().manual_seed(n) for n in samples)
        # One token more than the length: the labels are the tokens shifted by one.
        ids = torch.stack([torch.randint(0, self.vocabulary, (self.length + 1,), generator=g) for g in generators])
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def config_of(options: Mapping[str, Any]) -> Config:
    """The config of these options, valid for any number of processes; by default with a vocabulary of VOCABULARY."""
    defaults = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY, "data_path": ("random tokens",)}
    config = build({**defaults, **options}, check_model)
    assert config.vocab_size
    config.set_vocabulary(config.vocab_size + 1)
    return config


def trainer_of(config: Config) -> Trainer:
    """This rank's trainer, on random tokens."""
    vocabulary = config.vocab_size or config.padded_vocab_size
    data: Any = {name: RandomTokens(config.seq_length, vocabulary) for name in ("train", "valid")}
    return make_trainer(config, data)
