"""Megatron's indexed datasets (an .idx and a .bin file), validated on reading, and HAL's note about their origin.

`read_index` verifies that every sequence lies inside the .bin before the file is mapped, so that no later access can be
out of bounds. The format: magic, version 1, a dtype code, the numbers of sequences and of document ends, then int32
lengths, int64 byte offsets and int64 document ends. The note PREFIX.json is HAL's; Megatron does not read it.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from hal.untrusted import read_json

from ..config.schema import ConfigError
from .tokenizers.tokenizer import NullTokenizer, Tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = 34
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_SCAN_BYTES = 1 << 28


@dataclass(frozen=True)
class Index:
    """A complete and consistent pair of files. lengths: int32, tokens per sequence; pointers: int64, byte offsets into
    the .bin; documents: int64, document i consists of the sequences documents[i]..documents[i+1]-1."""

    prefix: Path
    dtype: numpy.dtype[Any]
    lengths: numpy.ndarray
    pointers: numpy.ndarray
    documents: numpy.ndarray

    def tokens(self, sequence: int) -> numpy.ndarray:
        """The token ids of a sequence."""
        return numpy.fromfile(
            f"{self.prefix}.bin",
            dtype=self.dtype,
            count=int(self.lengths[sequence]),
            offset=int(self.pointers[sequence]),
        )


def read_index(prefix: Path) -> Index:
    """The index of PREFIX.idx and PREFIX.bin. Raises ConfigError, with the reason, unless both are valid."""
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            hint = " --data-path takes the name without .bin or .idx." if prefix.suffix in (".bin", ".idx") else ""
            raise ConfigError(f"the data file {path} does not exist.{hint}")
    try:
        content, size = numpy.fromfile(idx, dtype=numpy.uint8), bin_.stat().st_size
    except OSError as error:
        raise ConfigError(f"the data file {idx} cannot be read: {error.strerror}") from None
    header = content[:_HEADER].tobytes()
    if len(header) < _HEADER or header[:9] != _MAGIC:
        raise ConfigError(f"{idx} is not a Megatron index: it does not start with {_MAGIC[:7].decode()}")
    version, code, sequences, ends = struct.unpack("<QBQQ", header[9:])
    if version != 1 or code not in _DTYPES or _DTYPES[code][0] == "f":
        raise ConfigError(f"{idx} has version {version} and token type {code}; HAL reads version 1 with integer tokens")
    needed = _HEADER + sequences * 12 + ends * 8
    if len(content) not in (needed, needed + sequences):  # a multimodal index has one more byte per sequence
        raise ConfigError(f"{idx} is damaged: {sequences} sequences need {needed} bytes, the file has {len(content)}")
    first_pointer, first_end = _HEADER + 4 * sequences, _HEADER + 12 * sequences
    lengths = content[_HEADER:first_pointer].copy().view("<i4")
    pointers = content[first_pointer:first_end].copy().view("<i8")
    documents = content[first_end:needed].copy().view("<i8")
    index = Index(prefix, numpy.dtype("<" + _DTYPES[code]), lengths, pointers, documents)
    _check(index, size)
    return index


def _check(index: Index, size: int) -> None:
    name = f"{index.prefix}.idx"
    lengths, pointers, documents = index.lengths, index.pointers, index.documents
    if len(lengths) == 0:
        raise ConfigError(f"{index.prefix}.bin does not match {name}: the index has no sequences")
    if lengths.min() < 0 or pointers.min() < 0:
        n = int(numpy.flatnonzero((lengths < 0) | (pointers < 0))[0])
        raise ConfigError(f"{name} is damaged: sequence {n} has length {lengths[n]} at byte {pointers[n]}")
    # Each number is compared before two are added: a sum of corrupt numbers may overflow.
    beyond = (pointers > size) | (lengths.astype(numpy.int64) * index.dtype.itemsize > size - pointers)
    if beyond.any():
        n = int(numpy.flatnonzero(beyond)[0])
        needed = int(pointers[n]) + int(lengths[n]) * index.dtype.itemsize
        raise ConfigError(
            f"{index.prefix}.bin does not match {name}: sequence {n} of {len(lengths)} ends at byte {needed}, the file "
            f"has {size}; was it cut off?"
        )
    if (pointers % index.dtype.itemsize).any():
        raise ConfigError(f"{name} is damaged: a sequence begins inside a token")
    ordered = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    # Compared, because a difference of corrupt numbers may overflow.
    if not ordered or (documents[1:] < documents[:-1]).any():
        raise ConfigError(f"{name} is damaged: its document ends do not increase from 0 to {len(lengths)}")


def check_ids(index: Index, vocabulary: int) -> None:
    """Raises ConfigError for ids outside 0..vocabulary-1. Files of more than _SCAN_BYTES are not scanned; their ids are
    checked batch by batch (Split.fetch)."""
    path = f"{index.prefix}.bin"
    if 0 < os.stat(path).st_size <= _SCAN_BYTES:
        ids = numpy.fromfile(path, dtype=index.dtype)
        require_ids(int(ids.min()), int(ids.max()), vocabulary)


def require_ids(low: int, top: int, vocabulary: int) -> None:
    """Raises ConfigError unless ids from `low` to `top` fit the vocabulary."""
    if low < 0:
        raise ConfigError(f"the data has token id {low}: it is damaged, or was written with another integer type")
    if top >= vocabulary:
        raise ConfigError(
            f"the vocabulary is too small for the data, which has token id {top}: the tokenizer has {vocabulary} ids; "
            f"give the tokenizer that the data was made with (--tokenizer-type, --vocab-file, --vocab-size)"
        )


def note_path(prefix: Path) -> Path:
    """The path of a dataset's note."""
    return Path(f"{prefix}.json")


def read_note(prefix: Path) -> dict[str, Any] | None:
    """The note of a dataset, or None without one (files written by Megatron). Raises ConfigError if it is damaged."""
    path = note_path(prefix)
    if not path.is_file():
        return None
    try:
        note = read_json(path, ConfigError)
        tokenizer = note["tokenizer"]
        if not isinstance(tokenizer["type"], str) or not isinstance(tokenizer["fingerprint"], str):
            raise TypeError
    except (OSError, KeyError, TypeError, ConfigError):
        raise ConfigError(
            f"{path} is not a valid note on how {prefix.name}.bin was made; remove it to use the data without checking "
            f"its tokenizer"
        ) from None
    return dict(note)


def require_match(prefix: Path, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if according to its note the data was written with another tokenizer.

    A NullTokenizer matches every tokenizer with the same end-of-document id.
    """
    note = read_note(prefix)
    if note is None or note["tokenizer"]["fingerprint"] == tokenizer.fingerprint:
        return
    if isinstance(tokenizer, NullTokenizer) and note["tokenizer"].get("eod") == tokenizer.eod:
        return
    own = note["tokenizer"]
    same = own["type"] == type(tokenizer).__name__
    raise ConfigError(
        f"{prefix} was made with {'another ' if same else ''}{own['type']} (fingerprint {own['fingerprint']}, "
        f"{own.get('vocab_size')} ids), this run has {type(tokenizer).__name__} (fingerprint {tokenizer.fingerprint}, "
        f"{tokenizer.vocab_size} ids), in which the ids stand for other tokens. Give the tokenizer that the data was "
        f"made with, or preprocess the text again"
    )
