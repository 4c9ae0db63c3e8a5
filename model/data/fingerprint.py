"""Fingerprints of data files, by which a resumed run notices that its data are not those it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.atomic_files import sampled_digest


def of_prefix(prefix: Path) -> dict[str, Any]:
    """Of a pair of PREFIX.idx and PREFIX.bin: the prefix, the size and modification time (ns) of the .bin, the SHA-256
    of both files, and whether these cover every byte."""
    return _of(prefix, [Path(f"{prefix}{suffix}") for suffix in (".idx", ".bin")])


def of_file(path: Path) -> dict[str, Any]:
    """The same of a single file."""
    return _of(path, [path])


def _of(name: Path, files: list[Path]) -> dict[str, Any]:
    stat = files[-1].stat()
    digests = [sampled_digest(file) for file in files]
    return {
        "prefix": str(name),
        "bytes": stat.st_size,
        "modified": stat.st_mtime_ns,
        "sha256": [digest for digest, _ in digests],
        "complete": all(complete for _, complete in digests),
    }
