"""The workers' part of preprocessing: decodes documents, optionally splits them into sentences, and tokenizes them.

An invalid document becomes a `Broken` instead of an exception, so that it does not affect other documents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ...config.schema import Config
from ..tokenizers.build import build_tokenizer
from ..tokenizers.tokenizer import Tokenizer
from .sources import Broken, Raw


@dataclass(frozen=True)
class Encoding:
    """How documents are tokenized. keys: fields of a JSON line to encode; language: ISO 639 code for splitting into
    sentences, or None to encode documents without splitting."""

    tokenizer: dict[str, Any]
    keys: tuple[str, ...]
    language: str | None
    keep_newlines: bool
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """Documents of one key: all their ids, the tokens of each sequence, and the sequences of each document."""

    ids: numpy.ndarray
    lengths: list[int]
    sequences: list[int]


@dataclass(frozen=True)
class Chunk:
    """The result for a chunk of documents: encoded by key, broken documents, and their number and size in bytes."""

    encoded: dict[str, Encoded]
    broken: list[Broken]
    documents: int
    bytes: int


class Encoder:
    """Encodes chunks of documents; one per worker."""

    def __init__(self, encoding: Encoding) -> None:
        # Otherwise the tokenizers library starts its own threads in every worker.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.encoding = encoding
        self.tokenizer: Tokenizer = build_tokenizer(Config(**encoding.tokenizer))
        self.dtype = dtype_of(self.tokenizer.vocab_size)

    def __call__(self, raws: Sequence[Raw]) -> Chunk:
        ids: dict[str, list[int]] = {key: [] for key in self.encoding.keys}
        lengths: dict[str, list[int]] = {key: [] for key in self.encoding.keys}
        sequences: dict[str, list[int]] = {key: [] for key in self.encoding.keys}
        broken, documents = [], 0
        for raw in raws:
            try:
                documents_by_key = {key: self._document(text) for key, text in self._texts(raw).items()}
            except (ValueError, RecursionError) as error:
                broken.append(Broken(raw.path, raw.line, " ".join(str(error).split()) or type(error).__name__))
                continue
            documents += 1
            for key, sentences in documents_by_key.items():
                sequences[key].append(len(sentences))
                for sentence in sentences:
                    ids[key] += sentence
                    lengths[key].append(len(sentence))
        encoded = {
            k: Encoded(numpy.array(ids[k], dtype=self.dtype), lengths[k], sequences[k]) for k in self.encoding.keys
        }
        return Chunk(encoded, broken, documents, sum(len(raw.content) for raw in raws))

    def _texts(self, raw: Raw) -> dict[str, str]:
        """The texts of a document by key. Raises ValueError, with the reason, if it is not valid text."""
        try:
            text = raw.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: byte 0x{raw.content[error.start]:02x} at offset {error.start}") from None
        if not raw.json:
            return dict.fromkeys(self.encoding.keys, text)
        try:
            fields = json.loads(text)
        except RecursionError:
            raise ValueError("not valid JSON: it is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        texts = {}
        for key in self.encoding.keys:
            if key not in fields:
                raise ValueError(f"no field {key!r}; it has {', '.join(map(repr, list(fields)[:8])) or 'none'}")
            if not isinstance(fields[key], str):
                raise ValueError(f"the field {key!r} is not a string")
            # JSON escapes can encode lone surrogates, which no tokenizer accepts.
            if any("\ud800" <= c <= "\udfff" for c in fields[key]):
                raise ValueError(f"the field {key!r} has a lone surrogate, which is not a character")
            texts[key] = fields[key]
        return texts

    def _document(self, text: str) -> list[list[int]]:
        """Sequences of ids; sentences without ids are dropped, as in Megatron."""
        encoded = [self.tokenizer.encode(sentence) for sentence in self._sentences(text)]
        sequences = [ids for ids in encoded if ids]
        if sequences and self.encoding.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        return sequences

    def _sentences(self, text: str) -> Iterator[str]:
        if self.encoding.language is None:
            yield text
            return
        from sentencex import segment

        # A sentence is yielded when the next one begins, because newlines that follow it may still belong to it.
        pending = ""
        for piece in segment(self.encoding.language, text):
            sentence = piece.strip()
            space = piece[len(piece.rstrip()) :] if sentence else piece
            if sentence:
                if pending:
                    yield pending
                pending = sentence
            if self.encoding.keep_newlines and pending:
                pending += "\n" * space.count("\n")
        if pending:
            yield pending


def dtype_of(vocabulary: int) -> type[numpy.number[Any]]:
    """The dtype in which Megatron stores the ids of a vocabulary of this size."""
    return numpy.uint16 if vocabulary < 65500 else numpy.int32
