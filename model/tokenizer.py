"""Tokenizers: text to ids and back, with one id that ends a document. Chosen by Megatron's names (`KINDS`).

Ids are below `vocab_size`. What looks like a special token in a text is text: no document can end another. The
fingerprint is a function of what the tokenizer does and not of where its files lie; it travels with the data. Those
that need a library are in vocabularies.py.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Config, ConfigError

OPTIONS = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size", "vocab_extra_ids")
"""The options of a Config that belong to tokenizers; which are read depends on --tokenizer-type."""


class Tokenizer(ABC):
    """`vocab_size` ids, of which `eod` ends a document. Has what megatron-core's datasets ask of a tokenizer."""

    vocab_size: int
    eod: int
    content: bytes = b""
    """What the tokenizer's files hold, for the fingerprint."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the end of a document."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that tell this tokenizer from another."""
        digest = hashlib.sha256(f"{type(self).__name__} {self.vocab_size} {self.eod}\n".encode())
        digest.update(self.content)
        return digest.hexdigest()[:16]

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What tells this tokenizer from another, for cache keys."""
        return {"class": type(self).__name__, "fingerprint": self.fingerprint}


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes, 256 ends a document. Encodes any text (and any bytes) and never fails to decode."""

    vocab_size, eod = 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 show as replacement characters."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class NullTokenizer(Tokenizer):
    """For data that was tokenized elsewhere: ids 0..size-1, and `size` ends a document, as in Megatron."""

    def __init__(self, size: int) -> None:
        self.vocab_size, self.eod = size + 1, size

    def encode(self, text: str) -> list[int]:
        """The text is ids separated by blanks. Raises ValueError for anything else."""
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) <= self.eod:
            raise ValueError(f"ids from {min(ids)} to {max(ids)}, where 0 to {self.eod} exist")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class WhitespaceTokenizer(Tokenizer):
    """Words between blanks, looked up in a JSON vocabulary with <unk> and <|endoftext|> (machine-translation data)."""

    def __init__(self, vocab_file: str) -> None:
        self.content = read_file(vocab_file)
        try:
            self._ids = json.loads(self.content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the vocabulary {vocab_file} is no JSON: {error}") from None
        if not isinstance(self._ids, dict) or not all(type(i) is int and i >= 0 for i in self._ids.values()):
            raise ConfigError(f"the vocabulary {vocab_file} must be a JSON object of words and their ids")
        for needed in ("<unk>", "<|endoftext|>"):
            if needed not in self._ids:
                raise ConfigError(f"the vocabulary {vocab_file} has no {needed}")
        self._words = {i: word for word, i in self._ids.items()}
        if len(self._words) != len(self._ids):
            raise ConfigError(f"the vocabulary {vocab_file} gives two words the same id")
        self.vocab_size, self.eod = max(self._words) + 1, self._ids["<|endoftext|>"]

    def encode(self, text: str) -> list[int]:
        """A word <|endoftext|> in the text is unknown: it does not end the document."""
        unknown = self._ids["<unk>"]
        ids = (self._ids.get(word, unknown) for word in text.split())
        return [unknown if i == self.eod else i for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words.get(i, "<unk>") for i in ids)


@dataclass(frozen=True)
class Kind:
    """A --tokenizer-type: the options it needs and those it can take besides."""

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


KINDS = {
    "ByteTokenizer": Kind(),
    "GPT2BPETokenizer": Kind(("vocab_file", "merge_file")),
    "BertWordPieceLowerCase": Kind(("vocab_file",), ("vocab_extra_ids",)),
    "BertWordPieceCase": Kind(("vocab_file",), ("vocab_extra_ids",)),
    "SentencePieceTokenizer": Kind(("tokenizer_model",), ("vocab_extra_ids",)),
    "GPTSentencePieceTokenizer": Kind(("tokenizer_model",)),
    "Llama2Tokenizer": Kind(("tokenizer_model",)),
    "HuggingFaceTokenizer": Kind(("tokenizer_model",)),
    "WhitespaceTokenizer": Kind(("vocab_file",)),
    "NullTokenizer": Kind(("vocab_size",)),
}


def options_of(config: Config) -> dict[str, Any]:
    """The tokenizer's type and the options that type reads, by name."""
    kind = KINDS[config.tokenizer_type]
    values = {name: getattr(config, name) for name in (*kind.needs, *kind.takes)}
    return {"tokenizer_type": config.tokenizer_type, **values}


def readers(option: str) -> list[str]:
    """The types of tokenizer that read an option of OPTIONS."""
    return [kind for kind, spec in KINDS.items() if option in spec.needs + spec.takes]


def missing_options(config: Config) -> str | None:
    """What --tokenizer-type lacks, as a message, or None."""
    needs = KINDS[config.tokenizer_type].needs
    if all(getattr(config, name) is not None for name in needs):
        return None
    return f"--tokenizer-type {config.tokenizer_type} needs {' and '.join(_flag(name) for name in needs)}"


def build_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that a config asks for. Raises ConfigError for options that are missing and files it cannot use."""
    missing = missing_options(config)
    if missing is not None:
        raise ConfigError(missing)
    kind, options = config.tokenizer_type, options_of(config)
    del options["tokenizer_type"]
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        return NullTokenizer(options["vocab_size"])
    if kind == "WhitespaceTokenizer":
        return WhitespaceTokenizer(**options)
    from . import vocabularies

    made: Tokenizer = getattr(vocabularies, kind)(**options)
    return made


def read_file(path: str) -> bytes:
    """The content of a tokenizer's file. Raises ConfigError if there is none."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"the tokenizer's file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"the tokenizer's file {path} cannot be read: {error.strerror}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
