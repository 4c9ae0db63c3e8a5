"""Compiling kernels into a cache on first use.

Guarantees: each result is compiled once per machine; a file under its final name is complete, even if processes crash
or build concurrently; and only files whose digest is right, in folders that no other user can change, are used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hal.errors import BackendUnavailable
from hal.untrusted import who_can_replace

_CLEAR = "\r\x1b[K"
"""Moves a terminal's cursor to the start of the line and clears it."""

_COMPILERS = {
    "C": ("CC", ("gcc", "clang", "cc"), "Debian/Ubuntu: apt install gcc; Fedora: dnf install gcc"),
    "C++": ("CXX", ("g++", "clang++", "c++"), "Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++"),
}
"""Language -> (environment variable that names a compiler, default commands, how to install one)."""


def cache_directory(name: str) -> Path:
    """`$HAL_CACHE_DIR`, else `$XDG_CACHE_HOME/hal`, else `~/.cache/hal`, + /name; created with mode 0700.

    Raises BackendUnavailable for a directory that another user could have written to, or could replace through a folder
    above it: loading from it would run their code.
    """
    override = os.environ.get("HAL_CACHE_DIR")
    base = Path(override) if override else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hal"
    hint = "Set HAL_CACHE_DIR to a directory that only you can write to."
    try:
        for directory in (base, base / name):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = who_can_replace(base / name)
    except OSError as error:
        raise BackendUnavailable(f"cannot use the cache directory {base / name}: {error}. {hint}") from error
    if problem:
        raise BackendUnavailable(f"the cache directory {base / name} is not safe: {problem}. {hint}")
    return base / name


def place(result: Path, target: Path) -> None:
    """Moves a finished file or folder to its name in a cache, with its digest beside it, for `intact`.

    Replaces what is there. A crash leaves either nothing under the final name or a complete result.
    """
    for file in (result, *result.rglob("*")):
        file.chmod(0o700 if file.is_dir() else 0o600)
    part = target.with_name(f"{target.name}.sha256.{os.getpid()}")
    part.write_text(_digest(result))
    if target.is_dir():
        shutil.rmtree(target)
    # The digest comes first: a result without one, or with that of another, is not intact.
    os.rename(part, _digest_path(target))
    os.rename(result, target)


def intact(target: Path) -> bool:
    """Whether a file or folder of a cache is as `place` left it. One that was cut off ends the process that maps it."""
    try:
        owned = all(p.lstat().st_uid == os.geteuid() for p in (target, *target.rglob("*")))
        return owned and _digest_path(target).read_bytes() == _digest(target).encode()
    except OSError:
        return False


def _digest_path(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _digest(target: Path) -> str:
    """The names, modes and contents of the files of a cache's entry."""
    digest = hashlib.sha256()
    for file in sorted([target, *target.rglob("*")]):
        name = "" if file == target else str(file.relative_to(target))
        digest.update(f"{name} {file.lstat().st_mode:o}\0".encode())
        if file.is_file():
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the operating system releases it when the holder dies."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_once(target: Path, build: Callable[[Path], Path]) -> Path:
    """Returns `target`, a file or folder in a cache, built by `build` if it does not exist or is damaged.

    One process builds at a time.

    build(work): creates the result in the empty folder `work` and returns its path there. Only the finished result is
    renamed to `target`. Leftovers of crashed processes are removed.
    """
    if intact(target):
        return target
    # Checked before locking, so that the usual case takes no lock, and again while holding it.
    with locked(target.parent / "lock"):
        if intact(target):  # another process built it while this one waited
            return target
        for leftover in target.parent.glob("build-*"):  # only the holder of the lock builds: these are from crashes
            shutil.rmtree(leftover, ignore_errors=True)
        work = target.parent / f"build-{target.stem}"
        work.mkdir(mode=0o700)
        try:
            place(build(work), target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def find_compiler(language: str, purpose: str) -> list[str]:
    """The command of the compiler for "C" or "C++": `$CC` or `$CXX` if set, else the first usual compiler that exists.

    Raises BackendUnavailable if there is none; `purpose` begins its message ("cpu_ref compiles its kernels").
    """
    variable, commands, hint = _COMPILERS[language]
    override = shlex.split(os.environ.get(variable, ""))
    for command in [override] if override else [[c] for c in commands]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    tried = f"${variable}={shlex.join(override)}" if override else ", ".join(commands)
    raise BackendUnavailable(
        f"{purpose} and found no {language} compiler (tried {tried}). Install one ({hint}) or point {variable} at one."
    )


def compiler_version(compiler: list[str]) -> str:
    """The output of `compiler --version`, which is part of a cache's key."""
    return subprocess.run([*compiler, "--version"], check=False, capture_output=True, text=True).stdout


def run_compiler(command: list[str], what: str) -> None:
    """Runs a compiler on `what`. Raises BackendUnavailable with the command and the compiler's messages if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BackendUnavailable(
            f"the compiler failed (exit {done.returncode}) on {what}.\n{shlex.join(command)}\n{done.stderr}"
        )


def announce(text: str, *, step: bool = False) -> None:
    """Prints a message about a slow step to stderr, because stdout is reserved for the output of the command.

    step: the message is one of many about the same work; on a terminal, the next message takes its line.
    """
    terminal = sys.stderr.isatty()
    print(
        f"{_CLEAR if terminal else ''}hal: {text}", end="" if step and terminal else "\n", file=sys.stderr, flush=True
    )
