"""Parts of SentencePiece models in their wire format, which their trainer would not write."""

import struct

import numpy

PIECES, TRAINER, NORMALIZER, DENORMALIZER = 1, 2, 3, 5


def varint(value):
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number, content):
    """A field of a message; fields that are added to one replace or extend its own."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def charsmap(units=None, replacements=b"b\0"):
    """A table of a normalizer. units: of its trie, by position; the others have the value 0."""
    trie = numpy.full(512, 1 << 31, "<u4")
    for position, unit in (units or {0: inner(256)}).items():
        trie[position] = unit
    return field(2, struct.pack("<I", trie.nbytes) + trie.tobytes() + replacements)


def inner(offset, label=0, value=False):
    return offset << 10 | value << 8 | label


A = ord("a")
REPLACED = {0: inner(256), 256 ^ A: inner(A ^ 512 - 1, A, value=True)}
"""The trie of a rule for "a": its children, and so the value, are at 256 ^ 511."""
