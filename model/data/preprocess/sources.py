"""Reads documents from files: loose JSON lines, WikiExtractor's output or plain text, optionally compressed.

A document is yielded as bytes with the position where it begins. Decoding is left to the workers, so that an invalid
document does not stop the reading of the next one. Errors in the structure of a file are yielded as `Broken`.
"""

from __future__ import annotations

import bz2
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...common.optional_packages import optional_package
from ...config.schema import ConfigError

FORMATS = ("json", "wiki", "text")
DOCUMENTS = ("paragraph", "line", "file")
_LONGEST = 1 << 28
"""Bytes of the longest line that is read."""
_SNIFF = 1 << 12


@dataclass(frozen=True)
class Raw:
    """An undecoded document. line: where it begins (from 1); json: whether it is a JSON line or plain text."""

    path: Path
    line: int
    content: bytes
    json: bool


@dataclass(frozen=True)
class Broken:
    """An invalid document: where it begins, and what is wrong with it."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def find(inputs: list[str]) -> list[Path]:
    """The input files: files, all files in folders (sorted by path), and matches of patterns such as 'part-*.gz'.

    Raises ConfigError for an input that matches no file.
    """
    paths: list[Path] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        elif path.is_file():
            files = [path]
        else:
            root = Path(path.anchor) if path.is_absolute() else Path()
            pattern = str(path.relative_to(root)) if path.is_absolute() else given
            files = sorted(p for p in root.glob(pattern) if p.is_file()) if set("*?[") & set(given) else []
        if not files:
            raise ConfigError(f"--input {given} names no file")
        paths += files
    return paths


class Reader:
    """Iterates over the documents of a file. `position` is the number of its bytes on disk read so far."""

    def __init__(self, path: Path, format: str | None, documents: str) -> None:
        self.path, self.position, self._documents = path, 0, documents
        self._format = format
        self._line = 0

    def __iter__(self) -> Iterator[Raw | Broken]:
        """Raises ConfigError if the file's format cannot be detected."""
        try:
            with open(self.path, "rb") as disk:
                stream = _decompressed(self.path, disk)
                format = self._format or _guess(self.path, stream)
                yield from _SPLITTERS[format](self, self._lines(stream, disk))
        except (OSError, EOFError, zlib.error, _decompression_error()) as error:
            yield Broken(self.path, self._line + 1, f"the rest of the file cannot be read: {error}")

    def _lines(self, stream: IO[bytes], disk: IO[bytes]) -> Iterator[bytes]:
        while line := stream.readline(_LONGEST):
            if len(line) == _LONGEST:  # a decompression bomb or binary data must not exhaust memory
                raise OSError(f"a line of more than {_LONGEST >> 20} MiB")
            self._line += 1
            self.position = disk.tell()
            yield line

    # Splitting lines into documents, by format.

    def _json(self, lines: Iterator[bytes]) -> Iterator[Raw | Broken]:
        for line in lines:
            if line.strip():
                yield Raw(self.path, self._line, line, json=True)

    def _wiki(self, lines: Iterator[bytes]) -> Iterator[Raw | Broken]:
        """<doc id="1" url="..." title="T">, T, an empty line, the text, </doc>. The title line is not part of the text,
        as in WikiExtractor's --json."""
        begin, title = 0, b""
        body: list[bytes] = []
        for line in lines:
            stripped = line.strip()
            if stripped.startswith(b"<doc ") and stripped.endswith(b">"):
                if begin:
                    yield Broken(self.path, begin, "a <doc> that is not closed before the next begins")
                match = re.search(rb'title="(.*)"', stripped)
                begin, title, body = self._line, match[1] if match else b"", []
            elif stripped == b"</doc>":
                if not begin:
                    yield Broken(self.path, self._line, "a </doc> without a <doc>")
                    continue
                if body and body[0].strip() == title.strip():
                    body.pop(0)
                yield Raw(self.path, begin, b"".join(body).strip(b"\n"), json=False)
                begin = 0
            elif begin:
                body.append(line)
            elif stripped:
                yield Broken(self.path, self._line, "text outside of <doc>")
        if begin:
            yield Broken(self.path, begin, "a <doc> that is not closed; was the file truncated?")

    def _text(self, lines: Iterator[bytes]) -> Iterator[Raw | Broken]:
        begin = 1
        body: list[bytes] = []
        for line in lines:
            if self._documents == "line":
                if line.strip():
                    yield Raw(self.path, self._line, line.rstrip(b"\r\n"), json=False)
                continue
            if self._documents == "paragraph" and not line.strip():
                if body:
                    yield Raw(self.path, begin, b"".join(body), json=False)
                body = []
                continue
            if not body:
                begin = self._line
            body.append(line)
        if b"".join(body).strip():
            yield Raw(self.path, begin, b"".join(body), json=False)


_SPLITTERS: dict[str, Callable[[Reader, Iterator[bytes]], Iterator[Raw | Broken]]] = {
    "json": Reader._json,
    "wiki": Reader._wiki,
    "text": Reader._text,
}


def _decompressed(path: Path, disk: IO[bytes]) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=disk)
    if path.suffix == ".bz2":
        return bz2.BZ2File(disk)
    if path.suffix == ".zst":
        import io

        return io.BufferedReader(_zstandard().ZstdDecompressor().stream_reader(disk, read_across_frames=True))
    return disk


def _zstandard() -> Any:
    with optional_package(".zst files need zstandard", "torch-hal[train]", ConfigError):
        import zstandard
    return zstandard


def _decompression_error() -> type[Exception]:
    try:
        import zstandard
    except ImportError:
        return OSError
    error: type[Exception] = zstandard.ZstdError
    return error


def _guess(path: Path, stream: Any) -> str:
    """Detects the format from the file's name or its first bytes. Content that is neither JSON nor <doc> is not assumed
    to be plain text, since it may be a damaged file."""
    name = path.name.removesuffix(path.suffix) if path.suffix in (".gz", ".bz2", ".zst") else path.name
    known = {".json": "json", ".jsonl": "json", ".txt": "text"}.get(Path(name).suffix)
    if known:
        return known
    start = (stream.peek(_SNIFF) if hasattr(stream, "peek") else b"")[:_SNIFF].lstrip()
    if start.startswith(b"{") or not start:
        return "json"
    if start.startswith(b"<doc "):
        return "wiki"
    raise ConfigError(f"--input {path}: its format cannot be detected; give --input-format {', '.join(FORMATS)}")
