"""Files that others may be reading: written beside, flushed to disk, then renamed, with fixed permissions.

A reader sees the old content or the new one, never a part of it, whenever the writer is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hal import HalError

FILE_MODE, FOLDER_MODE = 0o640, 0o750


def cache_dir(*parts: str) -> Path:
    """A folder of HAL's cache ($HAL_CACHE_DIR, else $XDG_CACHE_HOME/hal, else ~/.cache/hal), made if needed.

    Raises HalError if it cannot be.
    """
    asked, shared = os.environ.get("HAL_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    root = Path(asked) if asked else Path(shared or Path.home() / ".cache") / "hal"
    try:
        return make_folder(root.joinpath(*parts))
    except OSError as error:
        hint = "set HAL_CACHE_DIR to a folder that you can write to"
        raise HalError(f"the cache folder {root} cannot be made ({error.strerror}); {hint}") from None


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Within it, files that others write for us (events, logs) are no more open than FILE_MODE and FOLDER_MODE."""
    before = os.umask(0o777)
    os.umask(before | (0o777 & ~FOLDER_MODE))
    try:
        yield
    finally:
        os.umask(before)


def make_folder(path: Path) -> Path:
    """Makes a folder and its parents; the ones it makes get FOLDER_MODE."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)  # so that it is never more open, not even for a moment
        folder.chmod(FOLDER_MODE)
    return path


def require_writable(folder: Path) -> None:
    """Raises OSError unless a file can be made in `folder`."""
    probe = beside(folder / "probe", new_token())
    probe.touch()
    probe.unlink()


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file's content atomically."""
    new = beside(path, new_token())
    try:
        with open(new, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.chmod(FILE_MODE)
        new.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if isinstance(error, OSError):  # of the file that was asked for, not of the one beside it
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill; it appears as `path`, complete, when the block ends without an error.

    If `path` exists by then (another process was faster), that one stays.
    """
    new = beside(make_folder(path.parent) / path.name, new_token())
    new.mkdir(FOLDER_MODE)
    try:
        yield new
        try:
            publish(new, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def publish(new: Path, path: Path) -> None:
    """Flushes the folder `new`, fixes its permissions, and gives it the name `path`."""
    settle(new)
    new.rename(path)
    sync_folder(path.parent)


def made_once(folder: Path, fill: Callable[[Path], object]) -> Path:
    """`folder`, filled by `fill` unless it is there: one process does it, others that want it at that time wait.

    The lock is on the folder's parent, so nothing is left of it, and the kernel drops it if its holder dies. Where a
    file system has no locks, several processes may fill; still one whole result appears.
    """
    if not folder.is_dir():
        with _locked(make_folder(folder.parent)):
            if not folder.is_dir():
                with publish_folder(folder) as beside:
                    fill(beside)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def new_token() -> int:
    """A number for `beside`: random, as processes of several machines may share a folder and have equal numbers."""
    return secrets.randbits(48)


def beside(path: Path, token: int) -> Path:
    """Where what will become `path` is written first."""
    return path.with_name(f".{path.name}.{token:012x}.tmp")


def settle(folder: Path) -> None:
    """Fixes the permissions of a folder's content and flushes it to disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            file.chmod(FILE_MODE)
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        os.chmod(place, FOLDER_MODE)
        sync_folder(Path(place))


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
