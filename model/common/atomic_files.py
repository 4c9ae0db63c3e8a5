"""Atomic replacement of files: written to a temporary name, flushed to disk, then renamed, with fixed permissions.

A reader sees either the old or the new content in full, even if the writer is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hal import HalError
from hal.untrusted import changeable_by_others, who_can_replace

FILE_MODE, FOLDER_MODE = 0o640, 0o750

_DIGESTS = "digests.json"
_BLOCKS, _BLOCK = 256, 1 << 16


def cache_dir(*parts: str) -> Path:
    """A folder of HAL's cache ($HAL_CACHE_DIR, else $XDG_CACHE_HOME/hal, else ~/.cache/hal), created if needed.

    Raises HalError if it cannot be created, or if another user could replace its content.
    """
    own, xdg = os.environ.get("HAL_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else Path(xdg or Path.home() / ".cache") / "hal"
    try:
        folder = make_folder(root.joinpath(*parts))
        problem = who_can_replace(folder)
    except OSError as error:
        hint = "set HAL_CACHE_DIR to a folder that you can write to"
        raise HalError(f"the cache folder {root} cannot be created ({error.strerror}); {hint}") from None
    if problem:
        raise HalError(
            f"the cache folder {folder} is not safe: {problem}; set HAL_CACHE_DIR to one that only you can write to"
        )
    return folder


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Limits the permissions of files that libraries create (events, logs) to FILE_MODE and FOLDER_MODE."""
    before = os.umask(0o777)
    os.umask(before | (0o777 & ~FOLDER_MODE))
    try:
        yield
    finally:
        os.umask(before)


def make_folder(path: Path) -> Path:
    """Creates a folder and its parents; those that it creates get FOLDER_MODE."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)  # never more permissive than this, not even before the chmod
        folder.chmod(FOLDER_MODE)
    return path


def require_writable(folder: Path) -> None:
    """Raises OSError unless a file can be created in `folder`."""
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
        if isinstance(error, OSError):  # name the requested file instead of the temporary one
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `path` when the block ends without an error.

    If another process has created `path` in the meantime, the existing folder is kept.
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
    """Flushes the folder `new`, fixes its permissions, and renames it to `path`."""
    settle(new)
    new.rename(path)
    sync_folder(path.parent)


def made_once(folder: Path, fill: Callable[[Path], object]) -> Path:
    """Returns `folder`, filled by `fill` if it does not exist yet or is damaged. One process fills it while the others
    wait.

    The lock is taken on the folder's parent, so it leaves no file behind, and the kernel releases it if the holder
    dies. On a file system without locks several processes may run `fill`; one complete result is published.
    """
    if not _intact(folder):
        with _locked(make_folder(folder.parent)):
            if not _intact(folder):
                if folder.is_dir():
                    shutil.rmtree(folder)
                with publish_folder(folder) as new:
                    fill(new)
                    (new / _DIGESTS).write_text(json.dumps(_digests(new)))
    return folder


def _digests(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != _DIGESTS)
    return {str(p.relative_to(folder)): sampled_digest(p)[0] for p in files}


def _intact(folder: Path) -> bool:
    """Whether the files of a folder are those that `made_once` finished, and no other user can change them.

    The digests alone do not show that: they are of samples, and lie beside the files.
    """
    try:
        if any(map(changeable_by_others, (folder, *folder.rglob("*")))):
            return False
        return bool(json.loads((folder / _DIGESTS).read_text()) == _digests(folder))
    except (OSError, ValueError, RecursionError):
        return False


def sampled_digest(path: Path) -> tuple[str, bool]:
    """(SHA-256 of a file's size and content, whether that covers every byte).

    Covers all of a file of up to 16 MiB, else 256 blocks of 64 KiB at equal distances, the first and the last included.
    """
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(f"{size}\n".encode())
    with open(path, "rb") as file:
        if size <= _BLOCKS * _BLOCK:
            digest.update(file.read())
            return digest.hexdigest(), True
        for n in range(_BLOCKS):
            file.seek((size - _BLOCK) * n // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest(), False


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
    """A random number for `beside`. A process id would not be unique across machines that share a folder."""
    return secrets.randbits(48)


def beside(path: Path, token: int) -> Path:
    """The temporary name, in the same folder, under which `path` is written first."""
    return path.with_name(f".{path.name}.{token:012x}.tmp")


def settle(folder: Path) -> None:
    """Sets the permissions of a folder's content and flushes it to disk."""
    for directory, _, names in os.walk(folder):
        for name in names:
            file = Path(directory, name)
            file.chmod(FILE_MODE)
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        os.chmod(directory, FOLDER_MODE)
        sync_folder(Path(directory))


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
