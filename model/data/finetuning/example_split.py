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

    def __init__(self, config: Config, files: list[EncodedFile], span: tuple[int, int], pad: int, train: bool):
        """span: the first and last (exclusive) example, counted through the files. pad: the id of padding. train:
        whether the order of the sequences is drawn anew in every epoch."""
        self._files, self._length, self._pad, self._shuffled = files, config.seq_length, pad, train
        self._seed = config.seed
        self.order = functools.lru_cache(2)(self._order)
        self._ends = numpy.cumsum([len(file) for file in files])
        lengths = numpy.concatenate([numpy.diff(file.bounds) - 1 for file in files])[slice(*span)]
        first = numpy.concatenate([file.first_counted for file in files])[slice(*span)]
        longer = int((lengths > self._length).sum())
        if longer and not config.truncation:
            longest = int(lengths.argmax())
            file, number = self._find(span[0] + longest)
            raise ConfigError(
                f"{longer} of {len(lengths)} examples have more than {self._length + 1} tokens, which is what "
                f"--seq-length {self._length} holds; the longest, {file.path}:{file.lines[number]}, has "
                f"{lengths[longest] + 1}. Raise --seq-length, or cut their ends off with --truncation"
            )
        kept = numpy.flatnonzero(first <= self._length)
        self.unanswered = len(lengths) - len(kept)
        self.cut = longer - self.unanswered
        lengths = numpy.minimum(lengths[kept], self._length)
        self._sequences: Sequences = pack(lengths, self._length) if config.packing else [[i] for i in range(len(kept))]
        self.examples, self.filled = span[0] + kept, int(lengths.sum())
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
            file, inner = self._find(int(self.examples[example]))
            ids, counted = (x[: self._length + 1] for x in file.example(inner))
            end = begin + len(ids) - 1
            tokens[begin:end] = torch.from_numpy(ids[:-1])
            labels[begin:end] = torch.from_numpy(numpy.where(counted[1:], ids[1:], document_mask.IGNORED))
            starts[begin:end] = begin
            begin = end
        starts[begin:] = begin
        return {"tokens": tokens, "labels": labels, "starts": starts}

    def _find(self, number: int) -> tuple[EncodedFile, int]:
        """The file of an example, and its number in the file."""
        at = int(numpy.searchsorted(self._ends, number, "right"))
        return self._files[at], number - int(self._ends[at] - len(self._files[at]))

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
        span = _span(config, files, name)
        sequences = ExampleSequences(config, files, span, tokenizer.eod, name == "train")
        if not sequences.sequences:
            raise ConfigError(f"the {name} split has no examples with an answer; raise --seq-length, or give more data")
        source = _source(tokenizer, renderer, paths[name])
        # What is said of a resumed run in which other examples share a sequence, or in another number of sequences.
        source["weights"], source["parts"] = None, [[*span, sequences.sequences]]
        opened[name] = ExampleSplit(sequences, tokenizer.vocab_size, tokenizer.eod, source=source)
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


def _span(config: Config, files: list[EncodedFile], name: str) -> tuple[int, int]:
    """The examples of a split: as in pretraining, a range of them in the order of the files."""
    count = sum(len(file) for file in files)
    if config.train_data_path:
        return 0, count
    # Without an evaluation there is no reason to leave examples out, unless the user has asked for it.
    whole = "split" not in config.given and not evaluates(config) and name == "train"
    return ranges("1,0,0" if whole else config.split, count)[name]


def _source(tokenizer: Tokenizer, renderer: Renderer, paths: list[Path]) -> dict[str, Any]:
    files = [of_file(path) for path in paths]
    for file in files:
        file["sha256"].append(renderer.fingerprint)
    return {"tokenizer": tokenizer.fingerprint, "files": files}
