"""Reads what other programs wrote: files and texts that may be damaged or made to do harm.

Every function bounds the memory and the time that its input can cost, and reports bad input as one line: the `error`
that the caller names, a kind of HalError.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import HalError

MAX_JSON_BYTES = 16 << 20
"""Largest JSON file. An adversarial one takes about 20 times its size in memory."""

MAX_TEXT_BYTES = 1 << 30
"""Largest text that is read in one piece: a file of prompts or of an evaluation."""

_SHOWN = 80
_MOST_LINKS = 40
"""Most symbolic links on the way to a file, as in Linux."""


def shown(value: object) -> str:
    """A value for an error message, cut to 80 characters; containers and objects appear as the name of their type."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print integers of many digits
            return f"an integer of {value.bit_length()} bits"
        text = repr(value[: _SHOWN + 1] if isinstance(value, (str, bytes)) else value)
        return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return type(value).__name__


def parse_integer(text: str, low: int, high: int, what: str, error: type[HalError] = HalError) -> int:
    """The integer that `text` writes in ASCII digits, between `low` and `high`."""
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 20 and low <= int(text) <= high:
        return int(text)
    raise error(f"{what} should be an integer in {low}..{high}; found {shown(text)}")


def has_own_hash(number: int) -> bool:
    """Whether no other such integer has its hash; others can be chosen so that a dictionary takes quadratic time."""
    return abs(number) < sys.hash_info.modulus


def read_bytes(path: Path, limit: int, error: type[HalError] = HalError) -> bytes:
    """The content of a file of at most `limit` bytes. Raises OSError like open()."""
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise error(f"{path} has more than {limit} bytes, the most that is read of such a file")
    return content


def read_text(path: Path, error: type[HalError] = HalError, limit: int = MAX_TEXT_BYTES) -> str:
    """The content of a UTF-8 file of at most `limit` bytes. Raises OSError like open()."""
    try:
        return read_bytes(path, limit, error).decode()
    except UnicodeDecodeError as reason:
        raise error(f"{path} is not UTF-8 text: {reason}") from None


def parse_json(content: bytes | str, what: str, error: type[HalError] = HalError, limit: int = MAX_JSON_BYTES) -> Any:
    """The value that a JSON text (UTF-8) of at most `limit` bytes or characters describes."""
    if len(content) > limit:
        raise error(f"{what} has more than {limit} bytes, the most that is read of such a file")
    try:
        return json.loads(content)
    except RecursionError:
        raise error(f"{what} is not valid JSON: it is nested too deeply") from None
    except ValueError as reason:  # a syntax error, other bytes than UTF-8, or a number of thousands of digits
        raise error(f"{what} is not valid JSON: {one_line(reason)}") from None


def read_json(path: Path, error: type[HalError] = HalError, limit: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON file. Raises OSError like open()."""
    return parse_json(read_bytes(path, limit, error), str(path), error, limit)


def who_can_replace(path: Path) -> str:
    """Why another user could replace the content of `path`, which exists: the owner or the mode of it, of a folder
    above it, or of a symbolic link on the way to it. Empty if only this user and root can."""
    remaining, links = [(path.absolute(), True)], 0
    while remaining:
        target, whole = remaining.pop()
        for place in (target, *target.parents):
            info = place.lstat()
            if info.st_uid not in (os.geteuid(), 0):
                return f"{place} belongs to user {info.st_uid}, not to you"
            if stat.S_ISLNK(info.st_mode):  # its own mode has no meaning
                links += 1
                if links > _MOST_LINKS:
                    return f"{place} is one of more than {_MOST_LINKS} symbolic links"
                remaining.append((place.parent / os.readlink(place), whole and place == target))
                continue
            # In a folder with the sticky bit, such as /tmp, users cannot rename what belongs to others.
            sticky = not (whole and place == target) and info.st_mode & stat.S_ISVTX
            if info.st_mode & 0o022 and not sticky:
                return f"{place} is writable by others (mode {oct(info.st_mode & 0o777)})"
    return ""


def changeable_by_others(path: Path) -> bool:
    """Whether another user than this one and root owns a file or folder, or may write to it; also for any link."""
    info = path.lstat()
    return info.st_uid not in (os.geteuid(), 0) or bool(info.st_mode & 0o022)


@contextlib.contextmanager
def contained(what: str, error: type[HalError] = HalError) -> Iterator[None]:
    """Reports every failure of a library that reads untrusted input as `error`: "{what}: {its first 200 characters}".

    A panic of a Rust library is an exception that is no Exception, so that `except Exception` would not catch it.
    """
    try:
        yield
    except (HalError, OSError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as reason:
        raise error(f"{what}: {one_line(reason)}") from None


def one_line(reason: BaseException) -> str:
    """The message of an exception on one line of at most 200 characters; its type if it has none."""
    return " ".join(str(reason).split())[:200] or type(reason).__name__
