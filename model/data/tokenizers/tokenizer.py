"""The tokenizer interface, and the tokenizers that need no library (the others are in vocabularies.py).

Ids are below `vocab_size`; the id `eod` ends a document. The text of a special token is encoded as ordinary text, so
that no text can end a document. The fingerprint depends on the tokenizer's type and content, not on the paths of its
files; it is stored with the data.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hal.untrusted import one_line, parse_json, read_bytes, read_json, shown

from ...config.schema import ConfigError

MAX_VOCABULARY = 1 << 24
"""Most ids of a tokenizer, ten times those of the largest vocabularies. A file of one line can name any id, and the
embedding has one row per id up to the largest."""

_MAX_FILE_BYTES = 256 << 20


class InvalidText(ConfigError, ValueError):
    """A text that a tokenizer cannot encode."""


@contextlib.contextmanager
def text_errors() -> Iterator[None]:
    """Reports every failure of a library in a `with` block that encodes a text as InvalidText, of one line."""
    try:
        yield
    except (InvalidText, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        raise InvalidText(f"the tokenizer cannot encode this text: {one_line(error)}") from None


class Tokenizer(ABC):
    """A tokenizer with `vocab_size` ids, which also provides what megatron-core's datasets require of one."""

    vocab_size: int
    eod: int
    content: bytes = b""
    """The content of the tokenizer's files, for the fingerprint."""
    begin: int | None = None
    """The token that begins a text, if the tokenizer has one."""
    other_ends: frozenset[int] = frozenset()
    """Ids besides `eod` with which generated texts end, such as the end of a turn in a conversation."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end-of-document id. Raises InvalidText for a text it cannot encode."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text that a model continues: those of `encode`, and the tokens around every text (BOS)."""
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def token_id(self, token: str) -> int | None:
        """The id of one token, special tokens included, by its text; None if the vocabulary lacks it."""
        return None

    @property
    def ends(self) -> frozenset[int]:
        """All ids with which generated texts end."""
        return self.other_ends | {self.eod}

    def display(self, ids: Sequence[int]) -> str:
        """The text of token ids for people: without the replacement characters of a character cut off at an end."""
        return self.decode(ids).strip("\ufffd")

    def pipeline(self) -> str | None:
        """The content of a tokenizer.json that gives the same ids, or None where such a file cannot express it."""
        return None

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the tokenizer."""
        digest = hashlib.sha256(f"{type(self).__name__} {self.vocab_size} {self.eod}\n".encode())
        digest.update(self.content)
        return digest.hexdigest()[:16]

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The values that identify the tokenizer in cache keys."""
        return {"class": type(self).__name__, "fingerprint": self.fingerprint}


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes, 256 ends a document. Encodes any text (and any bytes) and never fails to decode."""

    vocab_size, eod = 257, 256

    def encode(self, text: str) -> list[int]:
        with text_errors():  # a lone surrogate is no character
            return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Invalid UTF-8 becomes replacement characters."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Characters of ASCII are tokens, and <|endoftext|> is the end of a document."""
        if token == "<|endoftext|>":
            return self.eod
        return ord(token) if len(token) == 1 and token.isascii() else None

    def display(self, ids: Sequence[int]) -> str:
        r"""Bytes that are no UTF-8 are written as \xff: a model of bytes may generate them anywhere."""
        return bytes(i for i in ids if i < 256).decode(errors="backslashreplace")

    def pipeline(self) -> str:
        return byte_pipeline("<|endoftext|>", self.eod)


class NullTokenizer(Tokenizer):
    """For data that was tokenized elsewhere: ids 0..size-1, and id `size` ends a document, as in Megatron.

    tokenizer_model: the folder of a model of Hugging Face without a tokenizer; texts then end with its ids instead.
    """

    def __init__(self, vocab_size: int, tokenizer_model: str | None = None) -> None:
        self.vocab_size, self.eod = vocab_size + 1, vocab_size
        if tokenizer_model is not None:
            if not Path(tokenizer_model).is_dir():
                raise ConfigError(
                    f"--tokenizer-model {tokenizer_model} of the NullTokenizer is not a folder; without it, only id "
                    f"{vocab_size} ends a text (--tokenizer-type NullTokenizer --vocab-size {vocab_size})"
                )
            self.other_ends = ends_of(Path(tokenizer_model))

    @property
    def ends(self) -> frozenset[int]:
        return self.other_ends or super().ends

    def encode(self, text: str) -> list[int]:
        """The text must be ids separated by whitespace. Raises InvalidText for anything else."""
        words = text.split()
        wrong = next((word for word in words if not (word.isascii() and word.isdecimal())), None)
        if wrong is not None:
            raise InvalidText(
                f"the tokenizer is NullTokenizer, so a text is ids separated by blanks; found {shown(wrong)}; give a "
                "tokenizer of words with --tokenizer-type and its options"
            )
        with text_errors():
            ids = [int(word) for word in words]
        if ids and not 0 <= min(ids) <= max(ids) <= self.eod:
            raise InvalidText(
                f"the text has ids from {shown(min(ids))} to {shown(max(ids))}; valid ids are 0 to {self.eod}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class WhitespaceTokenizer(Tokenizer):
    """Words separated by whitespace, from a JSON vocabulary with <unk> and <|endoftext|> (machine-translation data)."""

    def __init__(self, vocab_file: str) -> None:
        self.content = read_file(vocab_file)
        self._ids = parse_json(self.content, f"the vocabulary {vocab_file}", ConfigError, _MAX_FILE_BYTES)
        if not isinstance(self._ids, dict) or not all(type(i) is int and i >= 0 for i in self._ids.values()):
            raise ConfigError(f"the vocabulary {vocab_file} must be a JSON object of words and their ids")
        for token in ("<unk>", "<|endoftext|>"):
            if token not in self._ids:
                raise ConfigError(f"the vocabulary {vocab_file} has no {token}")
        largest = max(self._ids.values())
        if largest >= MAX_VOCABULARY:  # before a dictionary of ids is made, whose hashes could be chosen to be equal
            raise ConfigError(
                f"the vocabulary {vocab_file} has the id {shown(largest)}; at most {MAX_VOCABULARY} are supported"
            )
        self._words = {i: word for word, i in self._ids.items()}
        if len(self._words) != len(self._ids):
            raise ConfigError(f"the vocabulary {vocab_file} assigns the same id to two words")
        self.vocab_size, self.eod = max(self._words) + 1, self._ids["<|endoftext|>"]

    def encode(self, text: str) -> list[int]:
        """The word <|endoftext|> in a text is encoded as <unk>: it does not end the document."""
        unknown = self._ids["<unk>"]
        ids = (self._ids.get(word, unknown) for word in text.split())
        return [unknown if i == self.eod else i for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words.get(i, "<unk>") for i in ids)

    def token_id(self, token: str) -> int | None:
        index: int | None = self._ids.get(token)
        return index

    def pipeline(self) -> str:
        from tokenizers import Tokenizer as Pipeline
        from tokenizers import models, pre_tokenizers

        pipeline = Pipeline(models.WordLevel(self._ids, unk_token="<unk>"))
        pipeline.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        pipeline.add_special_tokens(["<|endoftext|>"])
        return str(pipeline.to_str(pretty=True))


def byte_pipeline(end: str, eod: int) -> str:
    """A tokenizer.json whose ids 0..255 are the bytes of a text, and whose special token `end` has the id eod."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Pipeline

    # ByteLevel stands for each byte by a printable character: itself where it is printable, else one from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    pipeline = Pipeline(models.BPE({**{c: b for b, c in characters.items()}, end: eod}, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return str(pipeline.to_str(pretty=True))


def read_file(path: str) -> bytes:
    """The content of a tokenizer's file. Raises ConfigError if it cannot be read."""
    try:
        return read_bytes(Path(path), _MAX_FILE_BYTES, ConfigError)
    except FileNotFoundError:
        raise ConfigError(f"the tokenizer file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"the tokenizer file {path} cannot be read: {error.strerror}") from None


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = read_json(path, ConfigError)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def ends_of(folder: Path) -> frozenset[int]:
    """The ids with which the texts of the model in a folder end, as transformers reads them."""
    name = "generation_config.json" if (folder / "generation_config.json").is_file() else "config.json"
    ids = json_object(folder / name).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in ids if type(i) is int and 0 <= i < MAX_VOCABULARY)
