"""`hal data inspect`: what an indexed dataset holds, in lines to read. It is checked whole before anything is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from hal import HalError

from ..config import Config
from ..indexed import Index, check_ids, read_index, read_note, require_match
from ..tokenizer import Tokenizer, build_tokenizer

_BAR, _SHOWN = 40, 300


def describe(prefix: Path, tokenizer: Tokenizer | None, samples: int) -> Iterator[str]:
    """Counts, a histogram of the sequences' lengths, and the first `samples` documents, decoded if it is known how.

    tokenizer: the user's; None = the one the note beside the data names. Raises ConfigError for damaged data and for a
    tokenizer that the data was not made with.
    """
    index, note = read_index(prefix), read_note(prefix)
    documents = len(index.documents) - 1
    total = int(index.lengths.sum(dtype=numpy.int64))
    yield f"{prefix}: {documents:,} documents, {len(index.lengths):,} sequences, {total:,} tokens"
    yield f"  {index.dtype.name} ids, {total * index.dtype.itemsize:,} bytes"
    if note is not None:
        made = note["tokenizer"]
        yield f"  made with {made['type']} (fingerprint {made['fingerprint']}), {made.get('vocab_size')} ids"
    empty = int((numpy.diff(index.documents) == 0).sum())
    if empty:
        yield f"  {empty:,} documents are empty"
    yield from histogram(index.lengths)
    if tokenizer is None and note is not None:
        tokenizer, why = _from_note(note["tokenizer"])
        if tokenizer is None:
            yield f"samples are shown as ids: {why}"
    if tokenizer is not None:
        require_match(prefix, tokenizer)
        check_ids(index, tokenizer.vocab_size)
    for n in range(min(samples, documents)):
        yield f"document {n}: {_sample(index, n, tokenizer)}"


def histogram(lengths: numpy.ndarray) -> Iterator[str]:
    """Lengths counted in powers of two, with shortest, mean and longest."""
    yield f"  tokens per sequence: {lengths.min()} to {lengths.max()}, mean {lengths.mean(dtype=float):.1f}"
    # Class 0 is length 0, class c is 2^(c-1) to 2^c - 1.
    classes = numpy.bincount(numpy.frexp(lengths.astype(float))[1])
    for c in range(int(numpy.flatnonzero(classes)[0]), len(classes)):
        low, top = (0, 0) if c == 0 else (1 << (c - 1), (1 << c) - 1)
        bar = "#" * -(-_BAR * int(classes[c]) // int(classes.max()))
        yield f"  {low:>9,} to {top:>9,}  {classes[c]:>9,}  {bar}".rstrip()


def _from_note(made: dict[str, Any]) -> tuple[Tokenizer | None, str]:
    try:
        tokenizer = build_tokenizer(Config(tokenizer_type=made["type"], **made.get("options", {})))
    except (HalError, TypeError, KeyError) as error:
        return None, f"{error}; give the tokenizer's options"
    if tokenizer.fingerprint != made["fingerprint"]:
        return None, "the tokenizer's files have changed since; give the ones the data was made with"
    return tokenizer, ""


def _sample(index: Index, document: int, tokenizer: Tokenizer | None) -> str:
    first, end = index.documents[document : document + 2]
    ids: list[int] = []
    for sequence in range(int(first), int(end)):
        ids += index.tokens(sequence)[: _SHOWN - len(ids)].tolist()
        if len(ids) >= _SHOWN:
            break
    text = " ".join(map(str, ids)) if tokenizer is None else repr(tokenizer.decode(ids))
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
