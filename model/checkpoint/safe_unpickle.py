"""Reads files whose format is pickle without executing code from them.

Only allowlisted classes are instantiated, none of which has side effects on construction. A file that references any
other global is refused, and the error names it. Tensors are read by torch's weights_only unpickler.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import pathlib
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from hal import HalError


class UnsafeFile(HalError):
    """A file references code, so that unpickling it could execute that code. It was not unpickled."""


class Inert:
    """A placeholder for objects of other programs: accepts and ignores all constructor arguments and state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Does nothing."""

    def extend(self, values: Any) -> None:
        """Does nothing."""


# Globals in Megatron-LM's checkpoints besides tensors and numbers: enums, settings, states of random generators.
_IGNORED = ("megatron.", "numpy", "signal.", "types.SimpleNamespace", "pathlib.", "enum.", "_codecs.encode")

_DCP = "torch.distributed.checkpoint"
_METADATA = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "Path")}


def load_state(path: Path) -> Any:
    """The content of a torch.save file: containers, numbers, tensors and argparse's Namespace; objects of Megatron's
    classes become Inert. Raises UnsafeFile for any other class or function, HalError for a damaged file."""
    allowed: list[Any] = [argparse.Namespace]
    with open(path, "rb") as file:
        magic = file.read(4)
    try:
        # torch writes zip files since 1.6. Only these can list the globals they reference before they are unpickled.
        zipped = magic[:2] == b"PK"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _only(allowed):
                unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else []
            foreign = [n for n in unknown if not n.startswith(_IGNORED)]
            if foreign:
                raise _unsafe(path, ", ".join(sorted(foreign)[:5]))
            with _only([*allowed, *((Inert, n) for n in unknown)]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UnsafeFile:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        named = re.search(r"GLOBAL (\S+)", reason)
        if named or "Unsupported operand" in reason or "not an allowed" in reason:
            raise _unsafe(path, named[1] if named else reason[-160:]) from None
        raise HalError(f"{path} is not a torch.save file, or is damaged: {reason[:200]}") from None


def _unsafe(path: Path, names: str) -> UnsafeFile:
    return UnsafeFile(
        f"{path} was refused, since unpickling it could run code: it references non-allowlisted global {names}. Save "
        "only the model's state dict, or use safetensors"
    )


@contextlib.contextmanager
def _only(allowed: list[Any]) -> Iterator[None]:
    """Allows these classes and torch's own, but not those that other packages have allowed in this process."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals(allowed)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


class SafeReader(filesystem.FileSystemReader):
    """Reads a distributed checkpoint's index with a restricted unpickler, and validates it against the files present.

    Tensors are read by the base class, which is safe.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Raises UnsafeFile or HalError for an invalid index."""
        path = Path(self.path) / ".metadata"
        with open(path, "rb") as file:
            try:
                index: metadata.Metadata = _MetadataUnpickler(file, path).load()
            except (UnsafeFile, OSError):
                raise
            except Exception as error:
                raise HalError(f"{_invalid(path)}: {error}") from None
        check_index(index, path)
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


def stored_tensors(folder: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """The tensors in a distributed checkpoint's index, by name. Raises UnsafeFile or HalError."""
    entries = SafeReader(folder).read_metadata().state_dict_metadata
    return {n: info for n, info in entries.items() if isinstance(info, metadata.TensorStorageMetadata)}


def empty_tensors(folder: Path, infos: Mapping[str, metadata.TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    """Uninitialised tensors to read these into. Raises HalError, before allocating, if the files contain less data than
    a shape requires."""
    for name, info in infos.items():
        stored = sum(math.prod(chunk.sizes) for chunk in info.chunks)
        if not 0 < math.prod(info.size) <= stored:
            raise HalError(
                f"{folder / '.metadata'} gives {name} the shape {tuple(info.size)}, but {stored} elements are stored"
            )
    return {name: torch.empty(info.size, dtype=info.properties.dtype) for name, info in infos.items()}


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills `tensors` in place from a distributed checkpoint. Raises HalError if it is damaged."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            # no_dist: each rank reads its own shards; the names and shapes differ between ranks.
            load(dict(tensors), storage_reader=SafeReader(folder), no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, HalError) or not isinstance(cause, Exception):
            raise cause from None
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        raise HalError(f"the tensors of the checkpoint {folder} cannot be read: {reason}") from None


def check_index(index: Any, path: Path) -> None:
    """Raises HalError unless an untrusted index is well formed and refers only to data that its files hold."""
    entries, storage = getattr(index, "state_dict_metadata", None), getattr(index, "storage_data", None)
    if not (isinstance(index, metadata.Metadata) and isinstance(entries, dict) and isinstance(storage, dict)):
        raise HalError(_invalid(path))
    free: dict[str, int] = {}
    for key, place in storage.items():
        _check_storage(path, getattr(key, "fqn", key), place, free)
    for name, info in entries.items():
        if not isinstance(name, str) or type(info) not in (
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
        ):
            raise HalError(f"{_invalid(path)}: it does not describe {name!r}")
        # Byte entries are never requested; if they were, torch would unpickle them without restrictions.
        if isinstance(info, metadata.TensorStorageMetadata):
            _check_tensor(f"{_invalid(path)}: {name}", name, info, storage)


def _invalid(path: Path) -> str:
    return f"{path} is not an index of a distributed checkpoint, or is damaged"


def _check_storage(path: Path, key: Any, place: Any, free: dict[str, int]) -> None:
    """Checks the file, offset and length of one entry. free: by file, its bytes that no entry has claimed yet."""
    name = getattr(place, "relative_path", None)
    if not isinstance(place, filesystem._StorageInfo) or not isinstance(name, str):
        raise HalError(f"{_invalid(path)}: it has no storage location for {key}")
    file = path.parent / name
    if pathlib.PurePath(name).name != name:  # a file name that contains a path could refer to any file
        raise UnsafeFile(f"{path} places {key} outside its folder, in {name}")
    if not file.is_file():
        raise HalError(f"{path} names the file {name!r}, which does not exist")
    size = file.stat().st_size
    numbers = place.offset, place.length
    if not (_counts(numbers) and sum(numbers) <= size):
        raise HalError(f"{path} places {key} at byte and length {numbers} of {file}: was it cut off?")
    # Entries must not overlap: otherwise a small file could expand to any number of large tensors.
    free[name] = free.get(name, size) - place.length
    if free[name] < 0:
        raise HalError(f"{path} places more in {file} than it holds")
    if place.transform_descriptors:
        raise HalError(f"{path} stores {key} with {place.transform_descriptors!r}, which is not supported")


def _check_tensor(what: str, name: str, info: metadata.TensorStorageMetadata, storage: Mapping[Any, Any]) -> None:
    size, chunks = getattr(info, "size", None), getattr(info, "chunks", None)
    dtype = getattr(getattr(info, "properties", None), "dtype", None)
    if not (_counts(size) and isinstance(dtype, torch.dtype) and isinstance(chunks, list)):
        raise HalError(f"{what} has size {size}, type {dtype}")
    for chunk in chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not (_counts(offsets) and _counts(sizes) and len(offsets) == len(sizes) == len(size)) or any(
            start + length > whole for start, length, whole in zip(offsets, sizes, size)
        ):
            raise HalError(f"{what} of size {tuple(size)} has a chunk of size {sizes} at {offsets}")
        place = storage.get(metadata.MetadataIndex(name, offsets))
        if place is None or math.prod(sizes) * dtype.itemsize > place.length:
            raise HalError(f"{what}: its chunk of size {tuple(sizes)} at {tuple(offsets)} is not stored")


def _counts(numbers: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether these are sizes or offsets: integers of at least 0."""
    return isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _METADATA:
            return _METADATA[module, name]
        if (module, name) in _PATHS:
            return pathlib.PurePosixPath
        if module.startswith(("megatron.core.dist_checkpointing.", f"{_DCP}.planner")):
            return Inert
        raise UnsafeFile(f"{self._path} was refused: it references non-allowlisted global {module}.{name}")
