"""A worker's share of preprocessing: documents decoded, cut into sentences if asked, and made into ids.

What is wrong with a document becomes a `Broken`; nothing a file can hold raises, so one bad line costs one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..config import Config
from ..tokenizer import Tokenizer, build_tokenizer
from .sources import Broken, Raw


@dataclass(frozen=True)
class Encoding:
    """How documents become ids. keys: the fields of a JSON line to take; language: of the sentences, an ISO 639 code,
    or None to keep documents whole."""

    tokenizer: dict[str, Any]
    keys: tuple[str, ...]
    language: str | None
    keep_newlines: bool
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """Documents of one key: ids of all, tokens per sequence, and sequences per document."""

    ids: numpy.ndarray
    lengths: list[int]
    sequences: list[int]


@dataclass(frozen=True)
class Chunk:
    """What became of some documents: by key what they are in ids; what was broken; their size in bytes."""

    encoded: dict[str, Encoded]
    broken: list[Broken]
    documents: int
    bytes: int


class Encoder:
    """Encodes chunks of documents; one per worker."""

    def __init__(self, how: Encoding) -> None:
        # A tokenizer of the library would start threads of its own in every worker.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.how = how
        self.tokenizer: Tokenizer = build_tokenizer(Config(**how.tokenizer))
        self.dtype = dtype_of(self.tokenizer.vocab_size)

    def __call__(self, raws: Sequence[Raw]) -> Chunk:
        ids: dict[str, list[int]] = {key: [] for key in self.how.keys}
        lengths: dict[str, list[int]] = {key: [] for key in self.how.keys}
        sequences: dict[str, list[int]] = {key: [] for key in self.how.keys}
        broken, documents = [], 0
        for raw in raws:
            try:
                made = {key: self._document(text) for key, text in self._texts(raw).items()}
            except (ValueError, RecursionError) as error:
                broken.append(Broken(raw.path, raw.line, " ".join(str(error).split()) or type(error).__name__))
                continue
            documents += 1
            for key, sentences in made.items():
                sequences[key].append(len(sentences))
                for sentence in sentences:
                    ids[key] += sentence
                    lengths[key].append(len(sentence))
        encoded = {k: Encoded(numpy.array(ids[k], dtype=self.dtype), lengths[k], sequences[k]) for k in self.how.keys}
        return Chunk(encoded, broken, documents, sum(len(raw.content) for raw in raws))

    def _texts(self, raw: Raw) -> dict[str, str]:
        """Raises ValueError, with the reason, for what is no text."""
        try:
            text = raw.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: byte 0x{raw.content[error.start]:02x} at {error.start} of it") from None
        if not raw.json:
            return dict.fromkeys(self.how.keys, text)
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        texts = {}
        for key in self.how.keys:
            if key not in fields:
                raise ValueError(f"no field {key!r}; it has {', '.join(map(repr, list(fields)[:8])) or 'none'}")
            if not isinstance(fields[key], str):
                raise ValueError(f"the field {key!r} is no text")
            # JSON can hold halves of characters, which no tokenizer takes.
            if any("\ud800" <= c <= "\udfff" for c in fields[key]):
                raise ValueError(f"the field {key!r} has a lone surrogate, which is no character")
            texts[key] = fields[key]
        return texts

    def _document(self, text: str) -> list[list[int]]:
        """Sequences of ids; a sentence without ids is left out, as in Megatron."""
        encoded = [self.tokenizer.encode(sentence) for sentence in self._sentences(text)]
        sequences = [ids for ids in encoded if ids]
        if sequences and self.how.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        return sequences

    def _sentences(self, text: str) -> Iterator[str]:
        if self.how.language is None:
            yield text
            return
        from sentencex import segment

        held = ""
        for piece in segment(self.how.language, text):
            sentence = piece.strip()
            space = piece[len(piece.rstrip()) :] if sentence else piece
            if sentence:
                if held:
                    yield held
                held = sentence
            if self.how.keep_newlines and held:
                held += "\n" * space.count("\n")
        if held:
            yield held


def dtype_of(vocabulary: int) -> type[numpy.number[Any]]:
    """The type Megatron stores ids of such a vocabulary in."""
    return numpy.uint16 if vocabulary < 65500 else numpy.int32
