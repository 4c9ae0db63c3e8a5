"""Checks a SentencePiece model before its library reads it.

The library trusts the tables of a model: an offset outside the trie of its normalizer, or a chain of nested
user-defined symbols, reads memory that is not the model's and ends the process; so does a lack of memory. A model is a
message in the wire format of protocol buffers, which is read here as far as these tables need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy

MAX_MODEL_BYTES = 16 << 20
"""Largest model file. Those of 256,000 pieces have 5 MB; the library takes up to 5 s per MB."""
MAX_PIECE_BYTES = 4096
"""Most bytes of a piece, and of the text of an unknown one. The library's trie recurses once per byte."""
MAX_REPLACEMENT_BYTES = 1024
"""Most bytes that a normalizer may write for a character; those of SentencePiece's own rules write up to 33."""

_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_CHARSMAP = 2
_UNKNOWN_TEXT = 44
_USER_DEFINED = 4
"""Numbers of fields, and of a type of piece, in sentencepiece_model.proto."""

_MATCHES, _SYMBOLS = 32, 64
"""The results for which the library has room when it looks up a rule of the normalizer, or a user-defined symbol."""
_MAX_KEY_BYTES = 256
_MAX_UNITS = 1 << 20
"""Longest text that a rule replaces, and largest trie, in its units of four bytes; SentencePiece's own have 46,080."""


def require_safe(content: bytes) -> None:
    """Raises ValueError unless the library can read a model with this content, and encode any text with it, without
    leaving the model's tables, and in bounded memory."""
    if len(content) > MAX_MODEL_BYTES:
        raise ValueError(f"it has more than {MAX_MODEL_BYTES >> 20} MiB")
    symbols = []
    for number, message in _fields(content):
        if number == _PIECES:
            symbols += _symbols(message)
        elif number == _TRAINER:
            _require_short(text for n, text in _fields(message) if n == _UNKNOWN_TEXT)
        elif number in (_NORMALIZER, _DENORMALIZER):
            for n, charsmap in _fields(message):
                if n == _CHARSMAP and charsmap:
                    _check_charsmap(charsmap)
    _check_nesting(symbols)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of a message's fields; an integer appears as the bytes that it has in the message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        start, kind = at, tag & 7
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            length, start = _varint(message, at)
            at = start + length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"it has a field of the kind {kind}")
        if at > len(message):
            raise ValueError("it is cut off")
        yield tag >> 3, message[start:at]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(value, position after it) of the integer at a position."""
    value = shift = 0
    for byte in message[at : at + 10]:
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    raise ValueError("it is cut off, or has an integer of more than 64 bits")


def _require_short(texts: Iterator[bytes]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > MAX_PIECE_BYTES:
        raise ValueError(
            f"a piece, or the text of unknown ones, has {longest} bytes; at most {MAX_PIECE_BYTES} are read"
        )


def _symbols(piece: bytes) -> list[bytes]:
    """The text of a piece that is a user-defined symbol."""
    fields = list(_fields(piece))
    _require_short(text for number, text in fields if number == 1)
    if not any(number == 3 and kind and _varint(kind, 0)[0] == _USER_DEFINED for number, kind in fields):
        return []
    return [text for number, text in fields if number == 1]


def _check_nesting(symbols: Sequence[bytes]) -> None:
    """Raises ValueError if more symbols begin with one another than the library has room for, or if one has a 0."""
    prefixes: list[bytes] = []
    for symbol in sorted(symbols):
        if b"\0" in symbol:
            raise ValueError("a user-defined symbol contains the character 0")
        while prefixes and not symbol.startswith(prefixes[-1]):
            prefixes.pop()
        prefixes.append(symbol)
        if len(prefixes) > _SYMBOLS:
            raise ValueError(f"more than {_SYMBOLS} user-defined symbols begin with one another")


def _check_charsmap(charsmap: bytes) -> None:
    """charsmap: the length of a trie, the trie (darts-clone's double array), and the replacements, each ending with 0.

    A unit of the trie either has a value, an offset into the replacements, or a label and an offset to its children:
    the child for byte c is at (position ^ offset ^ c), if its label is c, and the value at (position ^ offset).
    """
    size = int.from_bytes(charsmap[:4], "little")
    replacements = charsmap[4 + size :]
    if not 0 < size <= 4 * _MAX_UNITS or size % 1024 or not replacements.endswith(b"\0"):
        raise ValueError(f"the table of its normalizer has {len(charsmap)} bytes with a trie of {size}")
    longest = max(map(len, replacements.split(b"\0")))
    if longest > MAX_REPLACEMENT_BYTES:
        raise ValueError(
            f"its normalizer can write {longest} bytes for a character; at most {MAX_REPLACEMENT_BYTES} are accepted, "
            "to bound the memory"
        )
    units = numpy.frombuffer(charsmap, "<u4", size // 4, 4).astype(numpy.int64)
    positions, has_value = numpy.arange(len(units)), (units >> 8 & 1).astype(bool)
    inner = units < 1 << 31
    # Tries have whole blocks of 256 units, so that with (position ^ offset) all children are inside.
    children = positions ^ (units >> 10 << ((units & 512) >> 6))
    outside = (children >= len(units)) & inner
    values = units[numpy.where(outside, 0, children) % len(units)] & ((1 << 31) - 1)
    if (outside | (inner & has_value & (values >= len(replacements)))).any():
        raise ValueError("the table of its normalizer has an offset outside it")
    labels = numpy.where(inner, units & 255, -1)
    _check_matches(children, labels, has_value)


def _check_matches(children: numpy.ndarray, labels: numpy.ndarray, has_value: numpy.ndarray) -> None:
    """Raises ValueError if a text can match more rules than the library has room for.

    children, labels, has_value: of each unit; the label is -1 for one that is a value.
    """
    positions = numpy.arange(len(labels))
    matches = numpy.zeros(len(labels), numpy.int64)  # of the rules on a way of so many bytes from the root to a unit
    reached = positions[:1]
    for _ in range(_MAX_KEY_BYTES + 1):
        if matches.max() > _MATCHES:
            raise ValueError(f"its normalizer has more than {_MATCHES} rules for the beginnings of one text")
        above = numpy.full(len(labels), -1)  # by the position of children
        numpy.maximum.at(above, children[reached], matches[reached])
        parent = numpy.where(labels < 0, -1, above[positions ^ numpy.maximum(labels, 0)])
        reached = positions[parent >= 0]
        if not len(reached):
            return
        matches[reached] = (parent + has_value)[reached]
    raise ValueError(f"its normalizer has a rule for a text of more than {_MAX_KEY_BYTES} bytes")
