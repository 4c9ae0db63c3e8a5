"""Tokenizers: text to ids and back, with one id that ends a document.

The objects have what megatron-core's datasets ask of a tokenizer (`vocab_size`, `eod`, `unique_identifiers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import Config, ConfigError


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends a document. Encodes any text (and any bytes) and never fails to decode."""

    vocab_size, eod = 257, 256

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What tells this tokenizer from another, for cache keys."""
        return {"class": type(self).__name__}

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 show as replacement characters."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class NullTokenizer:
    """For data that was tokenized elsewhere: ids 0..size-1, and `size` ends a document, as in Megatron."""

    def __init__(self, size: int) -> None:
        self.vocab_size, self.eod = size + 1, size

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What tells this tokenizer from another, for cache keys."""
        return {"class": type(self).__name__, "vocab_size": self.vocab_size}

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is ids separated by blanks."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids themselves, separated by blanks."""
        return " ".join(map(str, ids))


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from a vocab.json and a merges.txt; <|endoftext|> ends a document."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers import ByteLevelBPETokenizer

        self._files = (vocab_file, merge_file)
        for path in self._files:
            if not Path(path).is_file():
                raise ConfigError(f"the tokenizer's file {path} does not exist")
        try:
            self._bpe = ByteLevelBPETokenizer(vocab_file, merge_file)
        except Exception as error:
            raise ConfigError(f"{vocab_file} and {merge_file} are no GPT-2 vocabulary: {error}") from None
        eod = self._bpe.token_to_id("<|endoftext|>")
        if eod is None:
            raise ConfigError(f"{vocab_file} has no <|endoftext|> to end documents with")
        self.vocab_size, self.eod = self._bpe.get_vocab_size(), int(eod)

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What tells this tokenizer from another, for cache keys."""
        return {"class": type(self).__name__, "files": self._files, "vocab_size": self.vocab_size}

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._bpe.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return str(self._bpe.decode(list(ids)))


Tokenizer = ByteTokenizer | NullTokenizer | GPT2BPETokenizer


def build_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that a config asks for. Raises ConfigError for files it cannot use."""
    if config.tokenizer_type == "GPT2BPETokenizer":
        assert config.vocab_file and config.merge_file
        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    if config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size
        return NullTokenizer(config.vocab_size)
    return ByteTokenizer()
