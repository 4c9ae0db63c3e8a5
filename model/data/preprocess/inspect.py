"""`hal data inspect`: validates and describes an indexed dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from hal import HalError

from ...config.schema import Config
from ..indexed_dataset import Index, check_ids, read_index, read_note, require_match
from ..tokenizers.build import build_tokenizer
from ..tokenizers.tokenizer import Tokenizer

_BAR, _SHOWN = 40, 300


def describe(prefix: Path, tokenizer: Tokenizer | None, samples: int) -> Iterator[str]:
    """Lines with counts, a histogram of sequence lengths, and the first `samples` documents, decoded if possible.

    tokenizer: the user's; None means the one named in the data's note. Raises ConfigError for damaged data and for a
    tokenizer that does not match the data.
    """
    index, note = read_index(prefix), read_note(prefix)
    documents = len(index.documents) - 1
    total = int(index.lengths.sum(dtype=numpy.int64))
    yield f"{prefix}: {documents:,} documents, {len(index.lengths):,} sequences, {total:,} tokens"
    yield f"  {index.dtype.name} ids, {total * index.dtype.itemsize:,} bytes"
    if note is not None:
        own = note["tokenizer"]
        yield f"  made with {own['type']} (fingerprint {own['fingerprint']}), {own.get('vocab_size')} ids"
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
    """Lengths in bins of powers of two, after the minimum, maximum and mean."""
    yield f"  tokens per sequence: {lengths.min()} to {lengths.max()}, mean {lengths.mean(dtype=float):.1f}"
    # Bin 0 is length 0, bin n is 2^(n-1) to 2^n - 1.
    bins = numpy.bincount(numpy.frexp(lengths.astype(float))[1])
    for n in range(int(numpy.flatnonzero(bins)[0]), len(bins)):
        low, top = (0, 0) if n == 0 else (1 << (n - 1), (1 << n) - 1)
        bar = "#" * -(-_BAR * int(bins[n]) // int(bins.max()))
        yield f"  {low:>9,} to {top:>9,}  {bins[n]:>9,}  {bar}".rstrip()


def _from_note(note: dict[str, Any]) -> tuple[Tokenizer | None, str]:
    try:
        tokenizer = build_tokenizer(Config(tokenizer_type=note["type"], **note.get("options", {})))
    except (HalError, TypeError, KeyError) as error:
        return None, f"{error}; give the tokenizer's options"
    if tokenizer.fingerprint != note["fingerprint"]:
        return None, "the tokenizer's files have changed since; give those that the data was made with"
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
