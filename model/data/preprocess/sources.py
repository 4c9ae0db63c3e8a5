"""Documents in files: loose JSON lines, WikiExtractor's output, plain text, as they are or compressed.

A document comes as bytes with the place where it begins. Nothing is decoded here: that is the workers' share, and a
broken document must not stop the reading of the next. What is broken in the file itself is a `Broken`.
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

from ..config import ConfigError

FORMATS = ("json", "wiki", "text")
DOCUMENTS = ("paragraph", "line", "file")
_LONGEST = 1 << 28
_SNIFF = 1 << 12


@dataclass(frozen=True)
class Raw:
    """A document as the file has it. line: where it begins (from 1); json: whether it is JSON or the text itself."""

    path: Path
    line: int
    content: bytes
    json: bool


@dataclass(frozen=True)
class Broken:
    """Something that is no document, and why."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def find(inputs: list[str]) -> list[Path]:
    """The files that `inputs` name: files, folders (all they hold, in order of path) and patterns such as 'part-*.gz'.

    Raises ConfigError for one that names nothing.
    """
    found: list[Path] = []
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
        found += files
    return found


class Reader:
    """Reads a file's documents. `position` is how many of its bytes on disk were read so far."""

    def __init__(self, path: Path, format: str | None, documents: str) -> None:
        self.path, self.position, self._documents = path, 0, documents
        self._format = format
        self._line = 0

    def __iter__(self) -> Iterator[Raw | Broken]:
        """Raises ConfigError if the file's format is not known."""
        try:
            with open(self.path, "rb") as disk:
                stream = _decompressed(self.path, disk)
                format = self._format or _guess(self.path, stream)
                yield from _SPLITTERS[format](self, self._lines(stream, disk))
        except (OSError, EOFError, zlib.error, _decompression_error()) as error:
            yield Broken(self.path, self._line + 1, f"the file cannot be read on: {error}")

    def _lines(self, stream: IO[bytes], disk: IO[bytes]) -> Iterator[bytes]:
        while line := stream.readline(_LONGEST):
            if len(line) == _LONGEST:  # a bomb, or no text; it must not fill the memory
                raise OSError(f"a line of more than {_LONGEST >> 20} MiB")
            self._line += 1
            self.position = disk.tell()
            yield line

    # How a format cuts lines into documents.

    def _json(self, lines: Iterator[bytes]) -> Iterator[Raw | Broken]:
        for line in lines:
            if line.strip():
                yield Raw(self.path, self._line, line, json=True)

    def _wiki(self, lines: Iterator[bytes]) -> Iterator[Raw | Broken]:
        """<doc id="1" url="..." title="T">, T, an empty line, the text, </doc>; the title is not part of the text, as
        in WikiExtractor's --json."""
        begun, title, body = 0, b"", []
        for line in lines:
            stripped = line.strip()
            if stripped.startswith(b"<doc ") and stripped.endswith(b">"):
                if begun:
                    yield Broken(self.path, begun, "a <doc> that does not end before the next begins")
                match = re.search(rb'title="(.*)"', stripped)
                begun, title, body = self._line, match[1] if match else b"", []
            elif stripped == b"</doc>":
                if not begun:
                    yield Broken(self.path, self._line, "a </doc> without a <doc>")
                    continue
                if body and body[0].strip() == title.strip():
                    body.pop(0)
                yield Raw(self.path, begun, b"".join(body).strip(b"\n"), json=False)
                begun = 0
            elif begun:
                body.append(line)
            elif stripped:
                yield Broken(self.path, self._line, "text outside of <doc>")
        if begun:
            yield Broken(self.path, begun, "a <doc> that does not end; was the file cut off?")

    def _text(self, lines: Iterator[bytes]) -> Iterator[Raw | Broken]:
        begun, body = 1, []
        for line in lines:
            if self._documents == "line":
                if line.strip():
                    yield Raw(self.path, self._line, line.rstrip(b"\r\n"), json=False)
                continue
            if self._documents == "paragraph" and not line.strip():
                if body:
                    yield Raw(self.path, begun, b"".join(body), json=False)
                body = []
                continue
            if not body:
                begun = self._line
            body.append(line)
        if b"".join(body).strip():
            yield Raw(self.path, begun, b"".join(body), json=False)


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
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f".zst files need zstandard ({error}); install it with: pip install 'torch-hal[train]'"
        ) from None
    return zstandard


def _decompression_error() -> type[Exception]:
    try:
        import zstandard
    except ImportError:
        return OSError
    error: type[Exception] = zstandard.ZstdError
    return error


def _guess(path: Path, stream: Any) -> str:
    """By the name, else by the first bytes. What is neither JSON nor <doc> is not taken for text unasked: it may be
    damaged."""
    name = path.name.removesuffix(path.suffix) if path.suffix in (".gz", ".bz2", ".zst") else path.name
    known = {".json": "json", ".jsonl": "json", ".txt": "text"}.get(Path(name).suffix)
    if known:
        return known
    start = (stream.peek(_SNIFF) if hasattr(stream, "peek") else b"")[:_SNIFF].lstrip()
    if start.startswith(b"{") or not start:
        return "json"
    if start.startswith(b"<doc "):
        return "wiki"
    raise ConfigError(f"--input {path}: its format is not clear; give --input-format {', '.join(FORMATS)}")
