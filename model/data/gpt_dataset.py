"""Batches of tokens from megatron-core's GPTDataset over .bin/.idx files, with validation and blending.

Sample n of a split is a function of the data, the seed and the requested number of samples, so a run resumes exactly
from its count of consumed samples. One process builds the index maps while the others wait.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from hal.untrusted import who_can_replace

from ..common.atomic_files import cache_dir, made_once, make_folder
from ..config.schema import Config, ConfigError
from ..config.validation import split_proportions
from ..parallel import document_mask
from . import fill_in_the_middle
from .fingerprint import of_prefix
from .indexed_dataset import check_ids, read_index, read_note, require_ids, require_match
from .megatron_datasets import gpt_dataset, helpers, indexed_dataset
from .text_corpus import standard_library, text_file
from .tokenizers.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")
_SURPLUS = 0.005
"""Megatron's margin: each blended dataset has 0.5 % more samples than its weight requires, since blending rounds."""


@dataclass
class Split:
    """The samples of one split. `fetch(n, count)` returns (tokens, labels), int64 [count, s] each.

    source: what determines the samples, as JSON values: fingerprints of the tokenizer and of the files (see
    fingerprint.py), the weights of the files, and the part of each.
    """

    dataset: Any
    vocabulary: int
    eod: int
    mask_loss: bool = False
    source: dict[str, Any] = field(default_factory=dict)

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples first..first+count-1, wrapping around after the last. Raises ConfigError for ids out of range.

        With mask_loss, the labels of end-of-document tokens are document_mask.IGNORED.
        """
        size = len(self.dataset)
        rows = [self.dataset[n % size] for n in range(first, first + count)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        low, top = (int(t) for t in torch.aminmax(torch.cat((tokens, labels))))
        require_ids(low, top, self.vocabulary)
        return tokens, labels.masked_fill(tokens == self.eod, document_mask.IGNORED) if self.mask_loss else labels

    def starts(self, first: int, tokens: Tensor) -> Tensor:
        """Where each token's document begins, int64 [count, s], in the samples `tokens` from `first` on."""
        return document_mask.starts(tokens, self.eod)


@dataclass(frozen=True)
class _Blend:
    """The datasets of a split. weights: sum to 1; None takes every sample of each dataset once. shared: all splits come
    from these prefixes, divided by --split."""

    prefixes: tuple[Path, ...]
    weights: tuple[float, ...] | None
    shared: bool


class _Mixture:
    """Samples of several datasets in the order of two index maps: the dataset, and the sample within it."""

    def __init__(self, datasets: list[Any], which: numpy.ndarray, sample: numpy.ndarray) -> None:
        self.datasets, self.which, self.sample = datasets, which, sample

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, n: int) -> Any:
        return self.datasets[self.which[n]][self.sample[n]]


def open_data(config: Config, tokenizer: Tokenizer, samples: dict[str, int]) -> dict[str, Split]:
    """The splits named in `samples` (split -> number of samples that the run needs).

    Raises ConfigError for unreadable data, ids outside the vocabulary, data of another tokenizer, or a split too small
    for one sequence.
    """
    lengths: dict[Path, numpy.ndarray] = {}
    fingerprints: dict[Path, dict[str, Any]] = {}
    opened = {}
    for name, count in samples.items():
        source: dict[str, Any] = {"tokenizer": tokenizer.fingerprint, "files": []}
        if config.mock_data:
            mock = _mock(config, tokenizer, name, count)
            opened[name] = Split(mock, tokenizer.vocab_size, tokenizer.eod, config.eod_mask_loss, source)
            continue
        blend = _blend(config, tokenizer, name)
        for prefix in blend.prefixes:
            if prefix not in lengths:
                lengths[prefix] = _checked_lengths(config, tokenizer, prefix)
        if len(blend.prefixes) == 1:
            dataset = _open_one(config, tokenizer, name, blend, blend.prefixes[0], lengths, count)
        else:
            dataset = _mix(config, tokenizer, name, blend, lengths, count)
        for prefix in blend.prefixes:
            if prefix not in fingerprints:
                fingerprints[prefix] = of_prefix(prefix)
        source["files"] = [fingerprints[prefix] for prefix in blend.prefixes]
        weights = None if blend.weights is None else [round(w, 12) for w in blend.weights]
        source["weights"], source["parts"] = weights, _parts(dataset)
        if config.fim_data:
            source["fill_in_the_middle"] = fill_in_the_middle.settings(config)
        opened[name] = Split(dataset, tokenizer.vocab_size, tokenizer.eod, config.eod_mask_loss, source)
    return opened


def _parts(dataset: Any) -> list[list[int | None]]:
    """[first sequence, last (exclusive), number of samples if it determines their order] of each of a split's files.

    Every epoch but the first is shuffled together with others, so the order depends on the samples that a run needs.
    """
    datasets = dataset.datasets if isinstance(dataset, _Mixture) else [dataset]
    return [[int(d.indices[0]), int(d.indices[-1]) + 1, d.num_samples] for d in datasets]


def _mock(config: Config, tokenizer: Tokenizer, name: str, count: int) -> Any:
    """megatron-core's artificial documents: the numbers 1, 2, 3, ... (modulo the vocabulary) and an end-of-document."""
    module = gpt_dataset()
    documents = module.MockGPTLowLevelDataset(tokenizer)
    span = ranges(config.split, len(documents))[name]
    lengths = documents.sequence_lengths[slice(*span)]
    if int(lengths.sum(dtype=numpy.int64)) <= config.seq_length:
        raise ConfigError(f"the {name} split of --mock-data is too small for --seq-length; change --split")

    def build(cache: Path) -> Any:
        settings = _settings(config, tokenizer, cache, None)
        indices = numpy.arange(*span, dtype=numpy.int32)
        return module.MockGPTDataset(documents, None, indices, count, module.Split[name], settings)

    key = ("mock", tokenizer.unique_identifiers, name, span, count, config.seq_length, config.seed)
    return build(_maps(config, name, key, build))


def _settings(config: Config, tokenizer: Tokenizer, cache: Path, prefix: Path | None) -> Any:
    """megatron-core's description of a dataset from one prefix, or of artificial data for None."""
    return gpt_dataset().GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        split="1,1,1",
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend=None if prefix is None else ([str(prefix)], None),
    )


def parse_blend(words: tuple[str, ...], flag: str) -> tuple[tuple[Path, ...], tuple[float, ...] | None]:
    """Prefixes and weights of `A`, `A B C` or `0.3 A 0.7 B`, by Megatron's rule. The weights sum to 1."""
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or None in weights:
        if any(w is not None for w in weights[: len(words) // 2]):
            raise ConfigError(f"{flag} mixes weights and prefixes; give WEIGHT PREFIX pairs, or prefixes only")
        return tuple(Path(word) for word in words), None
    given = [w for w in weights if w is not None]
    if not all(0 < w < math.inf for w in given):
        wrong = next(word for word, w in zip(words[::2], given) if not 0 < w < math.inf)
        raise ConfigError(f"{flag} has the weight {wrong}; weights must be > 0")
    return tuple(Path(word) for word in words[1::2]), tuple(w / sum(given) for w in given)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _blend(config: Config, tokenizer: Tokenizer, name: str) -> _Blend:
    flag, words = "--data-path", config.data_path
    if config.train_data_path:
        flag, words = f"--{name}-data-path", getattr(config, f"{name}_data_path")
        if not words:
            raise ConfigError(f"there is no {name} data; give {flag} beside --train-data-path")
    if words:
        return _Blend(*parse_blend(words, flag), shared=not config.train_data_path)
    if config.text_file is not None:
        return _Blend((text_file(config.text_file, tokenizer),), None, shared=True)
    return _Blend((standard_library(tokenizer),), None, shared=True)


def _checked_lengths(config: Config, tokenizer: Tokenizer, prefix: Path) -> numpy.ndarray:
    index = read_index(prefix)
    require_match(prefix, tokenizer)
    check_ids(index, tokenizer.vocab_size)
    note = read_note(prefix)
    if note is not None and note.get("append_eod") is False:
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(config, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} would have no effect: {prefix} was made without --append-eod, so its "
                    f"documents have no end-of-document token"
                )
    return index.lengths


def ranges(split: str, sequences: int) -> dict[str, tuple[int, int]]:
    """First and last (exclusive) sequence of each split, by Megatron's rule: rounded cumulative proportions."""
    proportions = split_proportions(split)
    edges = [round(sum(proportions[:i]) / sum(proportions) * sequences) for i in range(4)]
    return {name: (edges[i], edges[i + 1]) for i, name in enumerate(SPLITS)}


def _mix(
    config: Config, tokenizer: Tokenizer, name: str, blend: _Blend, lengths: dict[Path, numpy.ndarray], count: int
) -> Any:
    """Megatron's blending: greedily keeps proportions closest to the weights; without weights, every sample once."""
    counts: list[int | None] = [None] * len(blend.prefixes)
    if blend.weights is not None:
        counts = [math.ceil(count * weight) for weight in blend.weights]
    datasets = [
        _open_one(config, tokenizer, name, blend, prefix, lengths, None if n is None else math.ceil(n * (1 + _SURPLUS)))
        for prefix, n in zip(blend.prefixes, counts)
    ]
    sizes = [len(dataset) for dataset in datasets]
    weights = blend.weights or tuple(float(n) for n in sizes)
    size = sum(sizes) if blend.weights is None else sum(n for n in counts if n is not None)

    def build(folder: Path) -> None:
        which, sample = numpy.zeros(size, dtype=numpy.int16), numpy.zeros(size, dtype=numpy.int64)
        if blend.weights is None:
            helpers().build_exhaustive_blending_indices(which, sample, numpy.array(sizes, numpy.int64), len(datasets))
        else:
            ratios = numpy.array(weights, dtype=numpy.float64)
            helpers().build_blending_indices(which, sample, ratios, len(datasets), size, False)
        numpy.save(folder / "dataset_index.npy", which)
        numpy.save(folder / "dataset_sample_index.npy", sample)

    identity = (*(_identity(p) for p in blend.prefixes), weights, sizes, size)
    folder = _maps(config, name, identity, build)
    maps = (numpy.load(folder / f"dataset_{kind}.npy", mmap_mode="r") for kind in ("index", "sample_index"))
    return _Mixture(datasets, *maps)


def _identity(prefix: Path) -> tuple[Any, ...]:
    """A cache key that changes when the data does: megatron-core's own key has only the path."""
    stats = [os.stat(f"{prefix}{suffix}") for suffix in (".idx", ".bin")]
    return str(prefix.absolute()), *((stat.st_size, stat.st_mtime_ns) for stat in stats)


def _maps(config: Config, name: str, identity: tuple[Any, ...], build: Any) -> Path:
    """The folder of the index maps of one key, filled by `build(folder)` if it does not exist, and safe to open."""
    root = data_cache(config, "index")
    folder = made_once(root / f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}", build)
    for path in folder.glob("*.npy"):
        _require_plain(path)
    return folder


def data_cache(config: Config, kind: str) -> Path:
    """The folder of --data-cache-path, or the one of this kind in HAL's cache. Raises ConfigError if another user could
    change what is in it."""
    if config.data_cache_path is None:
        return cache_dir(kind)
    folder = Path(config.data_cache_path)
    problem = who_can_replace(make_folder(folder))
    if problem:
        raise ConfigError(
            f"--data-cache-path {folder} is not safe: {problem}; give a folder that only you can write to, or leave "
            "the option out"
        )
    return folder


def _require_plain(path: Path) -> None:
    """Raises ConfigError for files that numpy would unpickle: megatron-core opens its maps with allow_pickle."""
    try:
        array = numpy.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype.hasobject:
            raise ValueError("it holds objects")
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"{path} is not an index map ({error}); remove the folder {path.parent}") from None


def _open_one(
    config: Config,
    tokenizer: Tokenizer,
    name: str,
    blend: _Blend,
    prefix: Path,
    lengths: dict[Path, numpy.ndarray],
    count: int | None,
) -> Any:
    """The part of a split that comes from one prefix. count: number of samples needed, or None for one epoch."""
    span = ranges(config.split, len(lengths[prefix]))[name] if blend.shared else (0, len(lengths[prefix]))
    tokens = int(lengths[prefix][slice(*span)].sum(dtype=numpy.int64))
    if tokens <= config.seq_length:
        raise ConfigError(
            f"the {name} split of {prefix} has {tokens} tokens in {span[1] - span[0]} sequences, fewer than one sample "
            f"of --seq-length {config.seq_length} + 1; use more data, a shorter sequence, or another --split"
        )
    # None means one epoch. All runs that need at most one epoch share the same index maps and the same order.
    requested = None if count is None or count * config.seq_length < tokens else count
    module = gpt_dataset()
    kind = module.GPTDataset
    if config.fim_data:
        rearrangement = fill_in_the_middle.Rearrangement(config, tokenizer, SPLITS.index(name))
        kind = fill_in_the_middle.dataset_class(kind, rearrangement)

    def build(cache: Path) -> Any:
        settings = _settings(config, tokenizer, cache, prefix)
        low = indexed_dataset().IndexedDataset(str(prefix))
        return kind(low, str(prefix), numpy.arange(*span, dtype=numpy.int32), requested, module.Split[name], settings)

    key = (*_identity(prefix), tokenizer.unique_identifiers, name, span, requested, config.seq_length, config.seed)
    key += (kind.__name__,) * config.fim_data  # megatron-core's names of index maps contain that of the class
    return build(_maps(config, name, key, build))
