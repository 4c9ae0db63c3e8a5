"""The examples of one file as arrays of token ids: encoded once into HAL's cache, then mapped into memory.

All wrong lines of a file are reported in one error.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy

from ...common.atomic_files import made_once
from ...config.schema import Config, ConfigError
from ..gpt_dataset import data_cache
from ..preprocess.sources import Broken, Reader
from ..tokenizers.tokenizer import MAX_VOCABULARY
from .examples import BadExample, parse
from .rendering import Renderer

_LISTED = 20
"""Wrong lines that an error lists."""


class EncodedFile:
    """The examples of a file, in its order.

    bounds: int64 [examples + 1], where the ids of each example begin. first_counted: int64 [examples], the first token
    of each that the loss counts, at least 1. lines: int64 [examples], where they are in the file.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self._ids = numpy.memmap(folder / "ids.bin", dtype=numpy.int32, mode="r")
        self.bounds, self.first_counted, self.lines = (
            numpy.load(folder / f"{name}.npy", allow_pickle=False) for name in ("bounds", "first_counted", "lines")
        )

    def __len__(self) -> int:
        return len(self.lines)

    def example(self, n: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(ids int64 [tokens], whether the loss counts each, bool [tokens]) of example n."""
        stored = self._ids[self.bounds[n] : self.bounds[n + 1]].astype(numpy.int64)
        counted = stored >= 0
        return numpy.where(counted, stored, ~stored), counted


def encode_file(config: Config, path: Path, renderer: Renderer) -> EncodedFile:
    """The examples of a file of JSON lines (optionally .gz, .bz2 or .zst). One process encodes them while others wait.

    Raises ConfigError for a file that does not exist, has no example, or has lines that are none.
    """
    try:
        status = path.stat()
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"the examples {path} cannot be read: {error.strerror}") from None
    root = data_cache(config, "examples")
    identity = str(path.absolute()), status.st_size, status.st_mtime_ns, renderer.fingerprint
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    return EncodedFile(path, made_once(root / f"examples-{key}", lambda folder: _encode(path, renderer, folder)))


def _encode(path: Path, renderer: Renderer, folder: Path) -> None:
    bounds, first_counted, lines = [0], list[int](), list[int]()
    problems, wrong = list[str](), 0
    with open(folder / "ids.bin", "wb") as file:
        for raw in Reader(path, "json", "line"):
            if isinstance(raw, Broken):
                wrong, problems = wrong + 1, [*problems, str(raw)][:_LISTED]
                continue
            try:
                ids, counted = renderer.encode(parse(raw.content))
            except BadExample as error:
                wrong, problems = wrong + 1, [*problems, f"{path}:{raw.line}: {error.text}"][:_LISTED]
                continue
            if not 0 <= min(ids) <= max(ids) < MAX_VOCABULARY:
                raise ConfigError(f"{path}:{raw.line}: the tokenizer gave an id outside of 0 to {MAX_VOCABULARY - 1}")
            # A token that the loss does not count is stored as its complement, which is negative.
            stored = numpy.array([i if count else ~i for i, count in zip(ids, counted)], numpy.int32)
            file.write(stored.tobytes())
            bounds.append(bounds[-1] + len(ids))
            first_counted.append(counted.index(True, 1))
            lines.append(raw.line)
    if wrong:
        more = f"\n  and {wrong - _LISTED} more" if wrong > _LISTED else ""
        raise ConfigError(
            f"{wrong} of the {wrong + len(lines)} lines of {path} are no examples:\n  " + "\n  ".join(problems) + more
        )
    if not lines:
        raise ConfigError(f"{path} has no examples: it is empty")
    for name, values in (("bounds", bounds), ("first_counted", first_counted), ("lines", lines)):
        numpy.save(folder / f"{name}.npy", numpy.array(values, numpy.int64))
