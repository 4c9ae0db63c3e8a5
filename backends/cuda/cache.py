"""Where compiled kernels are kept, and the lock that lets one process at a time fill it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import hal


def cache_directory(name: str) -> Path:
    """`$HAL_CACHE_DIR`, else `$XDG_CACHE_HOME/hal`, else `~/.cache/hal`, + /name; created with mode 0700.

    Raises BackendUnavailable for a directory that another user could have written to: what is loaded from it runs here.
    """
    asked = os.environ.get("HAL_CACHE_DIR")
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hal"
    hint = "Set HAL_CACHE_DIR to a directory that only you can write to."
    for directory in (base, base / name):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = directory.stat()
        except OSError as error:
            raise hal.BackendUnavailable(f"cannot use the cache directory {directory}: {error}. {hint}") from error
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise hal.BackendUnavailable(f"the cache directory {directory} can be written to by others. {hint}")
    return base / name


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the operating system releases it when the holder dies."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
