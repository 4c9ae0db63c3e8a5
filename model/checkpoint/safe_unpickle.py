"""Reads distributed checkpoints whose index is a pickle, without executing code from it.

The index is interpreted by restricted_pickle.py with the table below, and checked against the files that it names. An
index that references any other global is refused, and the error names it.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pathlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType

from hal import HalError
from hal.untrusted import has_own_hash, read_bytes, shown

from . import restricted_pickle
from .dcp import load_alone
from .restricted_pickle import INERT, Global, InvalidPickle, UnsafeFile
from .torch_archive import MAX_PICKLE_BYTES, are_counts, load_archive, shared_global


def _record(cls: type, *newer: str) -> Global:
    """A dataclass: its state fills its fields, and those that are missing are None. newer: fields that a release of
    torch may lack, but not a checkpoint of a later one."""
    names = [*(field.name for field in dataclasses.fields(cls)), *newer]

    def make() -> Any:
        value: Any = object.__new__(cls)
        value.__dict__.update(dict.fromkeys(names))
        return value

    def build(value: Any, state: Any) -> None:
        if not isinstance(state, dict):
            raise InvalidPickle(f"the state of {cls.__name__} is {shown(state)}")
        value.__dict__.update({name: state[name] for name in names if name in state})

    return Global(make, build)


def _is_offset(number: Any) -> bool:
    return type(number) is int and has_own_hash(number)


def _index_key() -> Global:
    make, fill, _ = _record(metadata.MetadataIndex)
    assert fill is not None

    def build(key: Any, state: Any) -> None:
        fill(key, state)
        offset = () if key.offset is None else key.offset
        if not (isinstance(key.fqn, str) and isinstance(offset, tuple) and all(map(_is_offset, offset))):
            # Its hash depends on both; that of a nested tuple can take forever, and large integers collide.
            raise InvalidPickle(f"the key of {shown(key.fqn)} has the offset {shown(key.offset)}")

    return Global(make, build)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise InvalidPickle(f"a tensor has the layout {shown(name)}")
    return torch.strided


def _path(*parts: Any) -> pathlib.PurePath:
    return pathlib.PurePosixPath(*parts)


_INDEX: dict[tuple[str, str], Global] = {
    **{
        (metadata.__name__, cls.__name__): _record(cls)
        for cls in (
            metadata.Metadata,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.StorageMeta,
        )
    },
    (metadata.__name__, "TensorProperties"): Global(
        lambda: object.__new__(metadata.TensorProperties), metadata.TensorProperties.__setstate__
    ),
    (metadata.__name__, "MetadataIndex"): _index_key(),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): Global(metadata._MEM_FORMAT_ENCODING),
    (filesystem.__name__, "_StorageInfo"): _record(filesystem._StorageInfo, "transform_descriptors"),
    ("torch.serialization", "_get_layout"): Global(_layout),
    ("pathlib", "PosixPath"): Global(_path),
    ("pathlib._local", "PosixPath"): Global(_path),
    ("pathlib", "Path"): Global(_path),
}
_IGNORED_IN_INDEX = ("megatron.core.dist_checkpointing.", "torch.distributed.checkpoint.planner")


def _of_index(module: str, name: str) -> Global:
    known = _INDEX.get((module, name)) or shared_global(module, name)
    if known is None and not module.startswith(_IGNORED_IN_INDEX):
        raise UnsafeFile(f"non-allowlisted global {module}.{name}")
    return known or INERT


class SafeReader(filesystem.FileSystemReader):
    """Reads a distributed checkpoint, validating its index against the files present, without Python's unpickler.

    The index is read once, so tensors that are read one by one should be read by one reader.
    """

    _index: metadata.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index. Raises UnsafeFile or HalError if it is invalid."""
        if self._index is None:
            self._index = self._read_index()
        self._index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._index

    def tensors(self) -> dict[str, metadata.TensorStorageMetadata]:
        """The tensors in the index, by name. Raises UnsafeFile or HalError."""
        entries = self.read_metadata().state_dict_metadata
        return {n: info for n, info in entries.items() if isinstance(info, metadata.TensorStorageMetadata)}

    def _read_index(self) -> metadata.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            content = read_bytes(path, MAX_PICKLE_BYTES)
            index: metadata.Metadata = restricted_pickle.load(
                io.BytesIO(content), _of_index, keys=(metadata.MetadataIndex,)
            )
        except UnsafeFile as error:
            raise UnsafeFile(f"{path} was refused: it references {error.args[0]}") from None
        except InvalidPickle as error:
            raise HalError(f"{_invalid(path)}: {error.args[0]}") from None
        check_index(index, path)
        return index

    def read_data(self, plan: Any, planner: Any) -> torch.futures.Future[None]:
        """Copies the requested tensors. Replaces torch's, which unpickles the tensors' files."""
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            path = Path(self.path) / place.relative_path
            if item.type == LoadItemType.BYTE_IO:
                raise HalError(f"{path} was refused: {shown(item.storage_index.fqn)} is no tensor")
            with open(path, "rb") as file:
                stored = load_archive(file, path, place.offset, place.length)
            window = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))
            target = planner.resolve_tensor(item).detach()
            if not isinstance(stored, torch.Tensor) or stored[window].shape != target.shape:
                raise HalError(f"{path} does not contain {shown(item.storage_index.fqn)} as its index describes it")
            target.copy_(stored[window])
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def stored_tensors(folder: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """The tensors in a distributed checkpoint's index, by name. Raises UnsafeFile or HalError."""
    return SafeReader(folder).tensors()


def empty_tensors(folder: Path, infos: Mapping[str, metadata.TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    """Uninitialised tensors to read these into. Raises HalError, before allocating, if the files contain less data than
    a shape requires."""
    check_stored(folder, infos)
    return {name: torch.empty(info.size, dtype=info.properties.dtype) for name, info in infos.items()}


def check_stored(folder: Path, infos: Mapping[str, metadata.TensorStorageMetadata]) -> None:
    """Raises HalError if the files contain less data than a shape requires."""
    for name, info in infos.items():
        stored = sum(math.prod(chunk.sizes) for chunk in info.chunks)
        if not 0 < math.prod(info.size) <= stored:
            raise HalError(
                f"{folder / '.metadata'} gives {shown(name)} the shape {tuple(info.size)}, but {stored} elements are "
                "stored"
            )


def read_tensors(source: SafeReader, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills `tensors` in place from a distributed checkpoint. Raises HalError if it is damaged."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            # Alone, because each rank reads its own shards: the names and shapes differ between ranks.
            load_alone(tensors, source)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, HalError) or not isinstance(cause, Exception):
            raise cause from None
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        raise HalError(f"the tensors of the checkpoint {source.path} cannot be read: {reason}") from None


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
            raise HalError(f"{_invalid(path)}: it does not describe {shown(name)}")
        # Byte entries are never requested; if they were, torch would unpickle them without restrictions.
        if isinstance(info, metadata.TensorStorageMetadata):
            _check_tensor(f"{_invalid(path)}: {shown(name)}", name, info, storage)


def _invalid(path: Path) -> str:
    return f"{path} is not an index of a distributed checkpoint, or is damaged"


def _check_storage(path: Path, key: Any, place: Any, free: dict[str, int]) -> None:
    """Checks the file, offset and length of one entry. free: by file, its bytes that no entry has claimed yet."""
    name = getattr(place, "relative_path", None)
    if not isinstance(place, filesystem._StorageInfo) or not isinstance(name, str):
        raise HalError(f"{_invalid(path)}: it has no storage location for {shown(key)}")
    file = path.parent / name
    if pathlib.PurePath(name).name != name:  # a file name that contains a path could refer to any file
        raise UnsafeFile(f"{path} places {shown(key)} outside its folder, in {shown(name)}")
    if not file.is_file():
        raise HalError(f"{path} names the file {shown(name)}, which does not exist")
    size = file.stat().st_size
    numbers = place.offset, place.length
    if not (are_counts(numbers) and sum(numbers) <= size):
        raise HalError(
            f"{path} places {shown(key)} at byte and length {', '.join(map(shown, numbers))} of {file}: was it cut off?"
        )
    # Entries must not overlap: otherwise a small file could expand to any number of large tensors.
    free[name] = free.get(name, size) - place.length
    if free[name] < 0:
        raise HalError(f"{path} places more in {file} than it holds")
    if place.transform_descriptors:
        raise HalError(f"{path} stores {shown(key)} with {shown(place.transform_descriptors)}, which is not supported")


def _check_tensor(what: str, name: str, info: metadata.TensorStorageMetadata, storage: Mapping[Any, Any]) -> None:
    size, chunks = getattr(info, "size", None), getattr(info, "chunks", None)
    dtype = getattr(getattr(info, "properties", None), "dtype", None)
    if not (are_counts(size) and isinstance(dtype, torch.dtype) and isinstance(chunks, list)):
        raise HalError(
            f"{what} has size {shown(size)}, type {dtype if isinstance(dtype, torch.dtype) else shown(dtype)}"
        )
    for chunk in chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not (are_counts(offsets) and are_counts(sizes) and len(offsets) == len(sizes) == len(size)) or any(
            start + length > whole for start, length, whole in zip(offsets, sizes, size)
        ):
            raise HalError(f"{what} of size {tuple(size)} has a chunk of size {shown(sizes)} at {shown(offsets)}")
        place = storage.get(metadata.MetadataIndex(name, offsets))
        if place is None or math.prod(sizes) * dtype.itemsize > place.length:
            raise HalError(f"{what}: its chunk of size {tuple(sizes)} at {tuple(offsets)} is not stored")
