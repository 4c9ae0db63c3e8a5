"""Batches of tokens: megatron-core's GPTDataset over a .bin/.idx, checked before it is used.

Sample n of a split is a function of the data, the seed and the number of samples asked for, so a run continues exactly
from its count of consumed samples.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from . import documents
from .config import Config, ConfigError
from .corpus import standard_library, text_file
from .files import cache_dir, make_folder, publish_folder
from .indexed import check_ids, read_index, require_ids
from .megatron.datasets import gpt_dataset, indexed_dataset
from .tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")


@dataclass
class Split:
    """One split's samples. `fetch(n, count)` gives (tokens, labels), int64 [count, s] each."""

    dataset: Any
    vocabulary: int
    eod: int
    mask_loss: bool = False

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples first..first+count-1, repeating from the start after the last. Raises ConfigError for alien ids.

        With mask_loss, the labels of end-of-document tokens are documents.IGNORED.
        """
        size = len(self.dataset)
        rows = [self.dataset[n % size] for n in range(first, first + count)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        low, top = (int(t) for t in torch.aminmax(torch.cat((tokens, labels))))
        require_ids(low, top, self.vocabulary)
        return tokens, labels.masked_fill(tokens == self.eod, documents.IGNORED) if self.mask_loss else labels


def open_data(config: Config, tokenizer: Tokenizer, samples: dict[str, int]) -> dict[str, Split]:
    """The splits named in `samples` (split -> how many samples the run needs of it).

    Raises ConfigError for unreadable data, ids outside the vocabulary, or a split too small for one sequence.
    """
    if config.data_path is not None:
        prefix = Path(config.data_path)
    elif config.text_file is not None:
        prefix = text_file(config.text_file, tokenizer)
    else:
        prefix = standard_library(tokenizer)
    index = read_index(prefix)
    check_ids(index, tokenizer.vocab_size)
    lengths = index.lengths
    ranges = _ranges(config.split, len(lengths))
    opened = {}
    for name, count in samples.items():
        begin, end = ranges[name]
        tokens = int(lengths[begin:end].sum(dtype=numpy.int64))
        if tokens <= config.seq_length:
            raise ConfigError(
                f"the {name} split of {prefix} has {tokens} tokens in {end - begin} sequences, fewer than one sample "
                f"of --seq-length {config.seq_length} + 1; use more data, a shorter sequence, or another --split"
            )
        # None = one epoch: then every run that needs no more shares one set of index maps and one order.
        wanted = None if count * config.seq_length < tokens else count
        dataset = _open_split(config, tokenizer, prefix, name, (begin, end), wanted)
        opened[name] = Split(dataset, tokenizer.vocab_size, tokenizer.eod, config.eod_mask_loss)
    return opened


def _ranges(split: str, sequences: int) -> dict[str, tuple[int, int]]:
    """Megatron's rule: cumulative shares of the sequences, rounded."""
    shares = [float(part) for part in split.split(",")]
    edges = [round(sum(shares[:i]) / sum(shares) * sequences) for i in range(4)]
    return {name: (edges[i], edges[i + 1]) for i, name in enumerate(SPLITS)}


def _open_split(
    config: Config, tokenizer: Tokenizer, prefix: Path, name: str, span: tuple[int, int], count: int | None
) -> Any:
    module = gpt_dataset()
    stat = os.stat(f"{prefix}.idx")
    # The index maps of one key live in one folder that appears complete. Size and time of the data are in the key:
    # megatron-core's own key has only the path, and would reuse maps of data that has changed since.
    identity = (
        str(prefix.absolute()),
        stat.st_size,
        stat.st_mtime_ns,
        tokenizer.unique_identifiers,
        name,
        span,
        count,
        config.seq_length,
        config.seed,
    )
    root = cache_dir("index") if config.data_cache_path is None else make_folder(Path(config.data_cache_path))
    folder = root / f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}"

    def build(cache: Path) -> Any:
        settings = module.GPTDatasetConfig(
            random_seed=config.seed,
            sequence_length=config.seq_length,
            split=config.split,
            path_to_cache=str(cache),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            blend=([str(prefix)], None),
        )
        low = indexed_dataset().IndexedDataset(str(prefix))
        indices = numpy.arange(*span, dtype=numpy.int32)
        return module.GPTDataset(low, str(prefix), indices, count, module.Split[name], settings)

    if not folder.is_dir():
        with publish_folder(folder) as beside:
            build(beside)
    return build(folder)
