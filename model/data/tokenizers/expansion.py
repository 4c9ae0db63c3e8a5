"""Bounds how much longer the steps of a tokenizer.json can make a text, without running them.

A chain of replacements multiplies a text: ten steps that write eight characters for each one need 2^30 times its
memory, and the library that runs them ends the process when there is no more. The bound is the product of the steps'
own bounds, in bytes per byte, so that a valid file is never refused for the texts it happens to meet.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from ...config.schema import ConfigError

MAX_EXPANSION = 8192
"""Most bytes per byte of a text. The largest of common files is ALBERT's, for which the bound below is 4,356."""
MAX_DECODED = 64
"""Most bytes that the decoder may make of a byte of a token. Common files have 1 to 4."""
MAX_TOKEN = 1 << 16
"""Most characters of a token; common files have up to about 500, long runs of blanks."""

_FIXED = {
    # Unicode's compatibility forms: U+FDFA has 3 bytes, and its form 33. The others triple a character at most.
    "NFKC": 11.0,
    "NFKD": 11.0,
    "NFC": 3.0,
    "NFD": 3.0,
    "Lowercase": 1.5,
    # Decomposes, and surrounds Chinese characters by blanks.
    "BertNormalizer": 5.0,
    # A character of one or two bytes for each byte, and perhaps a blank before a word.
    "ByteLevel": 3.0,
    # A blank for an empty suffix or delimiter, or before a word.
    "BPEDecoder": 2.0,
    "CTC": 2.0,
    "WordPiece": 2.0,
}


def require_bounded(pipeline: Any, path: object) -> None:
    """Raises ConfigError if a tokenizer of the library `tokenizers`, read from `path`, exceeds the limits."""
    grown = _expansion(pipeline.normalizer) * _expansion(pipeline.pre_tokenizer)
    if grown > MAX_EXPANSION:
        raise ConfigError(
            f"{path} was refused: its normalizer and pre_tokenizer can make a text {grown:.3g} times as long; at most "
            f"{MAX_EXPANSION} are accepted, to bound the memory"
        )
    decoded = _expansion(pipeline.decoder, decodes=True)
    if decoded > MAX_DECODED:
        raise ConfigError(
            f"{path} was refused: its decoder can make a token {decoded:.3g} times as long; at most {MAX_DECODED} are "
            "accepted, to bound the memory"
        )


def _expansion(step: Any, *, decodes: bool = False) -> float:
    return 1.0 if step is None else _bound(json.loads(step.__getstate__()), decodes)


def _bound(step: dict[str, Any], decodes: bool) -> float:
    """The bound of one step, given as its part of a tokenizer.json."""
    kind = step["type"]
    if kind == "Sequence":
        bound = 1.0
        for part in next(value for value in step.values() if isinstance(value, list)):
            bound *= _bound(part, decodes)
        return bound
    if kind == "Replace":
        return _replacement(step["pattern"], len(step["content"].encode()))
    if kind == "Prepend":
        return 1.0 + len(step["prepend"].encode())
    if kind == "Metaspace":  # it writes the character for each blank and before each word; decoding removes it
        return 1.0 if decodes else 1.0 + len(step["replacement"].encode())
    if kind == "Precompiled":
        return _longest_replacement(base64.b64decode(step["precompiled_charsmap"]))
    return 1.0 if decodes and kind == "ByteLevel" else _FIXED.get(kind, 1.0)


def _replacement(pattern: dict[str, str], length: int) -> float:
    text = pattern.get("String", "")
    if text:
        return max(1.0, length / len(text.encode()))
    return 1.0 + length  # an expression, or an empty text, can match between any two bytes


def _longest_replacement(charsmap: bytes) -> float:
    """charsmap: the length of a trie, the trie, and the replacements of characters, each of which ends with a 0."""
    (trie,) = struct.unpack_from("<I", charsmap)
    return float(max(1, *map(len, charsmap[4 + trie :].split(b"\0"))))
