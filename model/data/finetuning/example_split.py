"""The splits of a finetuning run: sequences that hold one example, or several with --packing.

The sequences are the same in every epoch; their order is drawn from the seed and the number of the epoch. So sample n
is a function of the data, the seed and n, and a run resumes exactly from its count of consumed samples.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ...config.schema import Config, ConfigError
from ...config.validation import evaluates
from ...parallel import document_mask
from ..fingerprint import of_file
from ..gpt_dataset import Split, parse_blend, ranges
from ..indexed_dataset import require_ids
from ..tokenizers.tokenizer import Tokenizer
from .encoded_file import EncodedFile, encode_file
from .packing import Sequences, pack
from .rendering import Renderer

_ENDLESS = 1 << 62


class ExampleSequences:
    """Sample n, for every n >= 0: the sequence that is number n % `sequences` of epoch n // `sequences`.

    A sample has tokens, labels and starts, int64 [s] each: as Split.fetch and Split.starts give them. An example of n
    tokens takes n - 1 positions, because its last token is a label only. The rest of a sequence is padding, a document
    of its own, whose labels are ignored.
    """

    def __init__(self, config: Config, files: list[EncodedFile], examples: numpy.ndarray, pad: int, train: bool):
        """examples: int64 [count, 2], numbers of a file and of an example in it. pad: the id of padding. train: whether
        the order of the sequences is drawn anew in every epoch."""
        self._files, self._length, self._pad, self._shuffled = files, config.seq_length, pad, train
        self._seed = config.seed
        self.order = functools.lru_cache(2)(self._order)
        lengths = numpy.array([files[f].bounds[n + 1] - files[f].bounds[n] - 1 for f, n in examples], numpy.int64)
        first = numpy.array([files[f].first_counted[n] for f, n in examples], numpy.int64)
        longer = int((lengths > self._length).sum())
        if longer and not config.truncation:
            longest = int(lengths.argmax())
            file, number = examples[longest]
            raise ConfigError(
                f"{longer} of {len(examples)} examples have more than {self._length + 1} tokens, which is what "
                f"--seq-length {self._length} holds; the longest, {files[file].path}:{files[file].lines[number]}, has "
                f"{lengths[longest] + 1}. Raise --seq-length, or cut their ends off with --truncation"
            )
        kept = numpy.flatnonzero(first <= self._length)
        self.unanswered = len(examples) - len(kept)
        self.cut = longer - self.unanswered
        lengths = numpy.minimum(lengths[kept], self._length)
        self._sequences: Sequences = pack(lengths, self._length) if config.packing else [[i] for i in range(len(kept))]
        self.examples, self.filled = examples[kept], int(lengths.sum())
        self.sequences = len(self._sequences)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        epoch, at = divmod(n, self.sequences)
        number = int(self.order(epoch)[at]) if self._shuffled else at
        tokens = torch.full((self._length,), self._pad)
        labels = torch.full((self._length,), document_mask.IGNORED)
        starts, begin = torch.empty(self._length, dtype=torch.int64), 0
        for example in self._sequences[number]:
            file, inner = self.examples[example]
            ids, counted = (x[: self._length + 1] for x in self._files[file].example(inner))
            end = begin + len(ids) - 1
            tokens[begin:end] = torch.from_numpy(ids[:-1])
            labels[begin:end] = torch.from_numpy(numpy.where(counted[1:], ids[1:], document_mask.IGNORED))
            starts[begin:end] = begin
            begin = end
        starts[begin:] = begin
        return {"tokens": tokens, "labels": labels, "starts": starts}

    def _order(self, epoch: int) -> numpy.ndarray:
        """The numbers of the sequences in the order of an epoch, int64 [sequences]."""
        # RandomState's numbers are the same in all versions of numpy.
        return numpy.random.RandomState([self._seed, epoch]).permutation(self.sequences)

    def summary(self) -> str:
        """The counts that a user should know, on one line."""
        share = self.filled / (self.sequences * self._length)
        text = f"{len(self.examples)} examples in {self.sequences} sequences, of which {share:.0%} are filled"
        if self.cut:
            text += f"; {self.cut} {'was' if self.cut == 1 else 'were'} cut to {self._length + 1} tokens"
        if self.unanswered:
            text += f"; {self.unanswered} more {'is' if self.unanswered == 1 else 'are'} left out, because no token of "
            text += "the answer remained"
        return text


class ExampleSplit(Split):
    """A split whose documents are examples, which may contain the end-of-document id."""

    dataset: ExampleSequences

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples first..first+count-1; labels that the loss does not count are document_mask.IGNORED."""
        rows = [self.dataset[n] for n in range(first, first + count)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        require_ids(int(tokens.min()), int(max(tokens.max(), labels.max())), self.vocabulary)
        return tokens, labels

    def starts(self, first: int, tokens: Tensor) -> Tensor:
        return torch.stack([self.dataset[n]["starts"] for n in range(first, first + len(tokens))])


def open_examples(config: Config, tokenizer: Tokenizer, names: list[str]) -> dict[str, Split]:
    """The splits of these names. Raises ConfigError for files or lines that cannot be used, and for a split without
    examples."""
    renderer = Renderer(config, tokenizer)
    encoded: dict[Path, EncodedFile] = {}
    problems: list[str] = []
    opened: dict[str, Split] = {}
    paths = {name: _paths(config, name) for name in names}
    for path in dict.fromkeys(path for several in paths.values() for path in several):
        try:
            encoded[path] = encode_file(config, path, renderer)
        except ConfigError as error:
            problems.append(error.text)
    if problems:
        raise ConfigError("\n".join(problems))
    for name in names:
        files = [encoded[path] for path in paths[name]]
        sequences = ExampleSequences(config, files, _examples(config, files, name), tokenizer.eod, name == "train")
        if not sequences.sequences:
            raise ConfigError(f"the {name} split has no examples with an answer; raise --seq-length, or give more data")
        opened[name] = ExampleSplit(
            sequences, tokenizer.vocab_size, tokenizer.eod, source=_source(tokenizer, renderer, paths[name])
        )
    return opened


def _paths(config: Config, name: str) -> list[Path]:
    flag, words = "--data-path", config.data_path
    if config.train_data_path:
        flag, words = f"--{name}-data-path", getattr(config, f"{name}_data_path")
    if not words:
        raise ConfigError(f"there are no {name} examples; give a file of JSON lines with {flag}")
    paths, weights = parse_blend(words, flag)
    if weights is not None:
        raise ConfigError(
            f"{flag} gives weights; with --sft every example of the files counts once, so give files only"
        )
    return list(dict.fromkeys(paths))


def _examples(config: Config, files: list[EncodedFile], name: str) -> numpy.ndarray:
    """The examples of a split, int64 [count, 2]: as in pretraining, a range of them in the order of the files."""
    numbers = [numpy.stack([numpy.full(len(file), f), numpy.arange(len(file))], 1) for f, file in enumerate(files)]
    examples = numpy.concatenate(numbers)
    if config.train_data_path:
        return examples
    # Without an evaluation there is no reason to leave examples out, unless the user has asked for it.
    whole = "split" not in config.given and not evaluates(config) and name == "train"
    begin, end = ranges("1,0,0" if whole else config.split, len(examples))[name]
    return examples[begin:end]


def _source(tokenizer: Tokenizer, renderer: Renderer, paths: list[Path]) -> dict[str, Any]:
    files = [of_file(path) for path in paths]
    for file in files:
        file["sha256"].append(renderer.fingerprint)
    return {"tokenizer": tokenizer.fingerprint, "files": files}
