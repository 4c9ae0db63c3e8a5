"""`hal data preprocess`: text files to PREFIX_KEY_document (or _sentence) .bin and .idx, in Megatron's format.

The files are written in a hidden temporary folder and renamed when complete, the .idx last. An interrupted or failed
run leaves nothing behind; a killed run leaves only that folder, which the next run removes. The order of documents does
not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hal import HalError

from ...common.atomic_files import beside, make_folder, new_token, settle, sync_folder
from ...common.stop_request import StopRequest
from ...config.schema import ConfigError
from ..indexed_dataset import note_path
from ..megatron_datasets import indexed_dataset
from .encode import Chunk, Encoder, Encoding, dtype_of
from .sources import Broken, Raw, Reader, find

_CHUNK_DOCUMENTS, _CHUNK_BYTES = 256, 1 << 20


class Interrupted(HalError):
    """The user stopped the run; nothing was written."""


@dataclass(frozen=True)
class Job:
    """Inputs and outputs of a run. format: one of sources.FORMATS, or None to detect it from the files."""

    inputs: list[str]
    output_prefix: str
    encoding: Encoding
    format: str | None = None
    documents: str = "paragraph"
    workers: int = 1
    on_error: str = "refuse"
    divisible_by: int = 128


@dataclass
class Result:
    """The results of a run: output prefixes by key, and counts over the documents of all keys."""

    prefixes: dict[str, Path]
    documents: int = 0
    empty: int = 0
    broken: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0


Progress = Callable[[Result, float], None]
"""Called after every chunk with the counts so far and the fraction of the input read, 0 to 1."""


def preprocess(job: Job, progress: Progress, complain: Callable[[str], None]) -> Result:
    """Runs a job. Raises ConfigError for invalid input, Interrupted after SIGINT or SIGTERM; then no output is left.

    complain: called with every broken document that --on-error skip leaves out.
    """
    files = find(job.inputs)
    prefix = Path(job.output_prefix)
    level = "document" if job.encoding.language is None else "sentence"
    targets = {key: prefix.with_name(f"{prefix.name}_{key}_{level}") for key in job.encoding.keys}
    for target in targets.values():
        for path in (Path(f"{target}.idx"), Path(f"{target}.bin"), note_path(target)):
            if path.exists():
                raise ConfigError(f"{path} exists; remove it, or give another --output-prefix")
    encoder = Encoder(job.encoding)  # so that invalid vocabularies are reported before workers start
    result = Result(targets)
    with StopRequest() as stop, _output_folder(prefix.parent), _temporary_folder(prefix) as folder:
        writers = {key: _Writer(folder / key, encoder.tokenizer.vocab_size) for key in targets}
        began = time.perf_counter()
        try:
            for chunk, fraction in _encoded(job, files, encoder, lambda: stop.asked):
                _count(result, chunk, job.on_error, complain)
                for key, encoded in chunk.encoded.items():
                    writers[key].add(encoded)
                result.empty += sum(n == 0 for e in chunk.encoded.values() for n in e.sequences)
                result.tokens += sum(len(e.ids) for e in chunk.encoded.values())
                result.seconds = time.perf_counter() - began
                progress(result, fraction)
        finally:
            for writer in writers.values():
                writer.close()
        if result.tokens == 0:
            raise ConfigError(f"--input {' '.join(job.inputs)} contains no text")
        for key in targets:
            writers[key].finish(_note(job, encoder, key, writers[key]))
        _publish(folder, targets)
    return result


def _count(result: Result, chunk: Chunk, on_error: str, complain: Callable[[str], None]) -> None:
    for broken in chunk.broken:
        if on_error == "refuse":
            raise ConfigError(f"{broken}; nothing was written (--on-error skip leaves out such documents)")
        complain(f"skipped {broken}")
    result.broken += len(chunk.broken)
    result.documents += chunk.documents
    result.bytes += chunk.bytes


def _note(job: Job, encoder: Encoder, key: str, writer: _Writer) -> dict[str, Any]:
    tokenizer, size = encoder.tokenizer, encoder.tokenizer.vocab_size
    options = {name: value for name, value in job.encoding.tokenizer.items() if name != "tokenizer_type"}
    files = {n: str(Path(v).absolute()) for n, v in options.items() if isinstance(v, str)}
    return {
        "tokenizer": {
            "type": job.encoding.tokenizer["tokenizer_type"],
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": size,
            "padded_vocab_size": -(-size // job.divisible_by) * job.divisible_by,
            "eod": tokenizer.eod,
            "options": {**options, **files},
        },
        "key": key,
        "append_eod": job.encoding.append_eod,
        "sentences": job.encoding.language,
        "documents": writer.documents,
        "sequences": writer.sequences,
        "tokens": writer.tokens,
    }


class _Writer:
    """Writes the files of one key."""

    def __init__(self, prefix: Path, vocabulary: int) -> None:
        self.prefix, self.documents, self.sequences, self.tokens = prefix, 0, 0, 0
        self._builder = indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype_of(vocabulary))

    def add(self, encoded: Any) -> None:
        """Appends documents (encode.Encoded)."""
        token = sequence = 0
        for count in encoded.sequences:
            lengths = encoded.lengths[sequence : sequence + count]
            size = sum(lengths)
            self._builder.add_document(encoded.ids[token : token + size], lengths)
            token, sequence = token + size, sequence + count
        self.documents, self.sequences = self.documents + len(encoded.sequences), self.sequences + sequence
        self.tokens += token

    def close(self) -> None:
        self._builder.data_file.close()

    def finish(self, note: dict[str, Any]) -> None:
        self._builder.finalize(f"{self.prefix}.idx")
        Path(f"{self.prefix}.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def _publish(folder: Path, targets: dict[str, Path]) -> None:
    settle(folder)
    moved: list[Path] = []
    try:
        # The .idx is renamed last, so that if it exists, the other files exist too.
        for suffix in (".bin", ".json", ".idx"):
            for key, target in targets.items():
                path = Path(f"{target}{suffix}")
                (folder / f"{key}{suffix}").rename(path)
                moved.append(path)
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise
    sync_folder(folder.parent)


@contextlib.contextmanager
def _output_folder(folder: Path) -> Iterator[None]:
    """Creates a folder and its parents; if the block raises, removes those that it created."""
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        make_folder(folder)
        yield
    except BaseException:
        for path in new:
            with contextlib.suppress(OSError):  # another run is using it by now
                path.rmdir()
        raise


@contextlib.contextmanager
def _temporary_folder(prefix: Path) -> Iterator[Path]:
    """A locked hidden folder next to the output, removed at the end. Also removes unlocked folders of killed runs."""
    for leftover in prefix.parent.glob(beside(prefix, 0).name.replace("0" * 12, "*")):
        handle = os.open(leftover, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
    folder = beside(prefix, new_token())
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _encoded(
    job: Job, files: list[Path], encoder: Encoder, stop: Callable[[], str | None]
) -> Iterator[tuple[Chunk, float]]:
    """Encoded chunks in the order of the input, each with the fraction of the input read by then."""
    chunks = _chunks(job, files)
    if job.workers == 1:
        for raws, broken, fraction in chunks:
            _require_running(stop())
            yield _merge(encoder(raws), broken), fraction
        return
    with ProcessPoolExecutor(
        job.workers, mp_context=get_context("fork"), initializer=_start, initargs=(job.encoding,)
    ) as pool:
        pending: deque[tuple[Future[Chunk], list[Broken], float]] = deque()
        try:
            for raws, broken, fraction in chunks:
                _require_running(stop())
                pending.append((pool.submit(_work, raws), broken, fraction))
                # Enough chunks to keep every worker busy, but a bounded number, because the input may exceed memory.
                if len(pending) >= 4 * job.workers:
                    yield _next(pending, stop)
            while pending:
                yield _next(pending, stop)
        except BrokenProcessPool:
            _require_running(stop())
            raise HalError(
                f"a worker was killed, perhaps by lack of memory; use fewer --workers than {job.workers}"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _next(
    pending: deque[tuple[Future[Chunk], list[Broken], float]], stop: Callable[[], str | None]
) -> tuple[Chunk, float]:
    future, broken, fraction = pending.popleft()
    while not wait([future], timeout=0.2).done:
        _require_running(stop())
    return _merge(future.result(), broken), fraction


def _require_running(signal_name: str | None) -> None:
    if signal_name is not None:
        raise Interrupted(f"stopped by {signal_name}; nothing was written")


def _merge(chunk: Chunk, broken: list[Broken]) -> Chunk:
    """The chunk with the errors that the reader found added, sorted by position."""
    if broken:
        chunk.broken.extend(broken)
        chunk.broken.sort(key=lambda b: (str(b.path), b.line))
    return chunk


def _chunks(job: Job, files: list[Path]) -> Iterator[tuple[list[Raw], list[Broken], float]]:
    total = sum(p.stat().st_size for p in files) or 1
    before, raws, broken, size = 0, [], [], 0
    for path in files:
        reader = Reader(path, job.format, job.documents)
        for item in reader:
            if isinstance(item, Broken):
                broken.append(item)
            else:
                raws.append(item)
                size += len(item.content)
            if len(raws) >= _CHUNK_DOCUMENTS or size >= _CHUNK_BYTES or broken:
                yield raws, broken, (before + reader.position) / total
                raws, broken, size = [], [], 0
        before += path.stat().st_size
    if raws:
        yield raws, broken, 1.0


_worker: Encoder


def _start(encoding: Encoding) -> None:
    global _worker
    # SIGINT is sent to the entire process group, but only the parent handles it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    _worker = Encoder(encoding)


def _work(raws: list[Raw]) -> Chunk:
    return _worker(raws)
