"""Compiling kernels into a cache on first use.

Guarantees: each result is compiled once per machine, and a file under its final name is complete, even if processes
crash or build concurrently.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hal.errors import BackendUnavailable

_COMPILERS = {
    "C": ("CC", ("gcc", "clang", "cc"), "Debian/Ubuntu: apt install gcc; Fedora: dnf install gcc"),
    "C++": ("CXX", ("g++", "clang++", "c++"), "Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++"),
}
"""Language -> (environment variable that names a compiler, default commands, how to install one)."""


def cache_directory(name: str) -> Path:
    """`$HAL_CACHE_DIR`, else `$XDG_CACHE_HOME/hal`, else `~/.cache/hal`, + /name; created with mode 0700.

    Raises BackendUnavailable for a directory that another user could have written to: loading from it would run their
    code.
    """
    asked = os.environ.get("HAL_CACHE_DIR")
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hal"
    hint = "Set HAL_CACHE_DIR to a directory that only you can write to."
    for directory in (base, base / name):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = directory.stat()
        except OSError as error:
            raise BackendUnavailable(f"cannot use the cache directory {directory}: {error}. {hint}") from error
        if info.st_uid != os.geteuid():
            raise BackendUnavailable(
                f"the cache directory {directory} belongs to user {info.st_uid}, not to you. {hint}"
            )
        if info.st_mode & 0o022:
            mode = oct(info.st_mode & 0o777)
            raise BackendUnavailable(f"the cache directory {directory} is writable by others (mode {mode}). {hint}")
    return base / name


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the operating system releases it when the holder dies."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_once(target: Path, build: Callable[[Path], Path]) -> Path:
    """Returns `target`, a file or folder in a cache, built by `build` if it does not exist, in one process at a time.

    build(work): creates the result in the empty folder `work` and returns its path there. Only the finished result is
    renamed to `target`. Leftovers of crashed processes are removed.
    """
    if target.exists():
        return target
    # Checked before locking, so that the usual case takes no lock, and again while holding it.
    with locked(target.parent / "lock"):
        if target.exists():  # another process built it while this one waited
            return target
        for leftover in target.parent.glob("build-*"):  # only the holder of the lock builds: these are from crashes
            shutil.rmtree(leftover, ignore_errors=True)
        work = target.parent / f"build-{target.stem}"
        work.mkdir(mode=0o700)
        try:
            os.rename(build(work), target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def find_compiler(language: str, purpose: str) -> list[str]:
    """The command of the compiler for "C" or "C++": `$CC` or `$CXX` if set, else the first usual compiler that exists.

    Raises BackendUnavailable if there is none; `purpose` begins its message ("cpu_ref compiles its kernels").
    """
    variable, commands, hint = _COMPILERS[language]
    asked = shlex.split(os.environ.get(variable, ""))
    for command in [asked] if asked else [[c] for c in commands]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    tried = f"${variable}={shlex.join(asked)}" if asked else ", ".join(commands)
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


def announce(text: str) -> None:
    """Prints a message about a slow step to stderr, because stdout is reserved for the output of the command."""
    print(f"hal: {text}", file=sys.stderr, flush=True)
