"""Tokenizes text into .bin/.idx files: the built-in corpus (Python's standard library) and any UTF-8 file.

Results are cached in HAL's cache folder. A split (training, validation, test) is a range of the index's sequences.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..common.atomic_files import cache_dir, made_once
from ..config.schema import ConfigError
from .megatron_datasets import indexed_dataset
from .tokenizers.tokenizer import InvalidText, Tokenizer

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_PIECE = 4096
"""Characters per sequence of a text file: splits are ranges of sequences, so one long sequence could not be split."""


def standard_library(tokenizer: Tokenizer) -> Path:
    """Prefix of the .bin/.idx of this Python's standard library, with one document per file of `sources()`."""
    root, files = sources()
    stamps = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    name = f"stdlib-{platform.python_version()}-{_digest(repr((stamps, tokenizer.unique_identifiers)).encode())}"
    documents = ([(tokenizer.encode(p.read_text(encoding="utf-8", errors="replace")))] for p in files)
    return _cached(name, documents, tokenizer)


def sources() -> tuple[Path, list[Path]]:
    """The standard library's folder and its .py files without tests, sorted by path. ConfigError if there are none."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]  # site-packages may have 100,000 files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    if not files:
        raise ConfigError(
            f"this Python has no standard library sources under {root}, so there is no built-in corpus; "
            f"give --text-file or --data-path"
        )
    return root, files


def text_file(path: str, tokenizer: Tokenizer) -> Path:
    """Prefix of the .bin/.idx of a UTF-8 file: one document, cut at line ends into sequences of some kilobytes.

    Raises ConfigError for a file that is empty, missing, or not UTF-8 (naming the byte).
    """
    if Path(path).is_char_device():
        raise ConfigError(f"--text-file {path} is a device, whose input may never end; give a file or a pipe")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--text-file {path} cannot be read: {error.strerror}") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"--text-file {path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} "
            f"(line {line}); convert it, e.g. with iconv"
        ) from None
    if not text.strip():
        raise ConfigError(f"--text-file {path} contains no text")
    name = f"text-{_digest(content + repr(tokenizer.unique_identifiers).encode())}"
    try:
        ids = [tokenizer.encode(piece) for piece in _pieces(text)]
    except InvalidText as error:
        raise ConfigError(f"--text-file {path}: {error}") from None
    return _cached(name, [ids], tokenizer)


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of at least _PIECE characters that end after a newline."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _cached(name: str, documents: Iterable[list[list[int]]], tokenizer: Tokenizer) -> Path:
    """documents: each a list of sequences of ids; the eod id is appended to the last sequence of each document."""
    import numpy

    def fill(folder: Path) -> None:
        dtype = numpy.uint16 if tokenizer.vocab_size < 65500 else numpy.int32
        builder = indexed_dataset().IndexedDatasetBuilder(str(folder / "text.bin"), dtype=dtype)
        for sequences in documents:
            sequences[-1].append(tokenizer.eod)
            ids = numpy.array([i for ids in sequences for i in ids], dtype=dtype)
            builder.add_document(ids, [len(ids) for ids in sequences])
        builder.finalize(str(folder / "text.idx"))

    return made_once(cache_dir("corpus") / name, fill) / "text"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
