"""Files that are pickles by format, read without running anything they say.

Only the classes listed here are made, and none of them does anything when it is made; a file that names any other is
refused with its name. Tensors come through torch's weights_only unpickler.
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
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from hal import HalError


class UnsafeFile(HalError):
    """A file wants more than data: reading it could run code. Nothing of it was run."""


class Inert:
    """In place of an object of another program: takes whatever it is made with and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Nothing."""

    def extend(self, values: Any) -> None:
        """Nothing."""


# What the checkpoints of Megatron-LM hold besides tensors and numbers: enums, settings, states of random generators.
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
    own classes become Inert. Raises UnsafeFile for any other class or function, HalError for a damaged file."""
    allowed: list[Any] = [argparse.Namespace]
    with open(path, "rb") as file:
        magic = file.read(4)
    try:
        zipped = magic[:2] == b"PK"  # what torch writes since 1.6; only there can the names be looked at before
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
        raise HalError(f"{path} is no file of torch.save, or a damaged one: {reason[:200]}") from None


def _unsafe(path: Path, what: str) -> UnsafeFile:
    return UnsafeFile(
        f"{path} holds more than tensors and settings, and reading it could run code: it wants {what}. It was not "
        "read; save the model's state dict alone, or as safetensors"
    )


@contextlib.contextmanager
def _only(allowed: list[Any]) -> Iterator[None]:
    """Allows these classes beside torch's own, and not what other packages have allowed in this process."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals(allowed)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


class SafeReader(dcp.FileSystemReader):
    """Reads a distributed checkpoint's index without unpickling freely, and holds it to the files that are there.
    Tensors are read as torch does: safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Raises UnsafeFile or HalError for an index that is not what it should be."""
        path = Path(self.path) / ".metadata"
        with open(path, "rb") as file:
            try:
                found = _MetadataUnpickler(file, path).load()
            except (UnsafeFile, OSError):
                raise
            except Exception as error:
                raise HalError(f"{path} is no index of a distributed checkpoint, or a damaged one: {error}") from None
        check_index(found, path)
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found  # type: ignore[no-any-return]


def stored_tensors(folder: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """What a distributed checkpoint's index says of its tensors, by name. Raises UnsafeFile or HalError."""
    entries = SafeReader(folder).read_metadata().state_dict_metadata
    return {n: info for n, info in entries.items() if isinstance(info, metadata.TensorStorageMetadata)}


def empty_tensors(folder: Path, infos: Mapping[str, metadata.TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    """Room for these stored tensors. Raises HalError for any that the files cannot fill: nothing is allocated then."""
    for name, info in infos.items():
        stored = sum(math.prod(chunk.sizes) for chunk in info.chunks)
        if not 0 < math.prod(info.size) <= stored:
            raise HalError(
                f"{folder / '.metadata'} gives {name} the shape {tuple(info.size)}; {stored} numbers are there"
            )
    return {name: torch.empty(info.size, dtype=info.properties.dtype) for name, info in infos.items()}


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills `tensors` in place from a distributed checkpoint. Raises HalError for one that is damaged."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            # Each rank reads what it needs on its own: some hold pieces that others do not.
            dcp.load(dict(tensors), storage_reader=SafeReader(folder), no_dist=True)
    except dcp.api.CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, HalError) or not isinstance(cause, Exception):
            raise cause from None
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        raise HalError(f"the tensors of the checkpoint {folder} cannot be read: {reason}") from None


def check_index(found: Any, path: Path) -> None:
    """Raises HalError unless an index read from outside is well formed and asks for nothing that its files lack."""
    what = f"{path} is no index of a distributed checkpoint, or a damaged one"
    entries, places = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not (isinstance(found, metadata.Metadata) and isinstance(entries, dict) and isinstance(places, dict)):
        raise HalError(what)
    files: dict[str, int] = {}
    for key, place in places.items():
        name, key = getattr(place, "relative_path", None), getattr(key, "fqn", key)
        if not isinstance(place, filesystem._StorageInfo) or not isinstance(name, str):
            raise HalError(f"{what}: it has no place for {key}")
        if pathlib.PurePath(name).name != name:  # a file name with a path could point anywhere
            raise UnsafeFile(f"{path} places {key} outside its folder, in {name}")
        if name not in files:
            if not (path.parent / name).is_file():
                raise HalError(f"{path} names the file {name!r}, which does not exist")
            files[name] = (path.parent / name).stat().st_size
        numbers = place.offset, place.length
        if not (_counts(numbers) and sum(numbers) <= (path.parent / name).stat().st_size):
            raise HalError(f"{path} places {key} at byte and length {numbers} of {path.parent / name}: was it cut off?")
        files[name] -= place.length
        if files[name] < 0:
            raise HalError(f"{path} places more in {path.parent / name} than it holds")
        if place.transform_descriptors:
            raise HalError(f"{path} says that {key} is stored by {place.transform_descriptors!r}, which is not read")
    for name, info in entries.items():
        if not isinstance(name, str) or type(info) not in (
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
        ):
            raise HalError(f"{what}: it says nothing of {name!r}")
        # Bytes are never asked for; were they, torch would unpickle them freely.
        if isinstance(info, metadata.TensorStorageMetadata):
            _check_tensor(f"{what}: {name}", name, info, places)


def _check_tensor(what: str, name: str, info: metadata.TensorStorageMetadata, places: Mapping[Any, Any]) -> None:
    size, chunks = getattr(info, "size", None), getattr(info, "chunks", None)
    dtype = getattr(getattr(info, "properties", None), "dtype", None)
    if not (_counts(size) and isinstance(dtype, torch.dtype) and isinstance(chunks, list)):
        raise HalError(f"{what} has size {size}, type {dtype}")
    assert size is not None
    for chunk in chunks:
        at, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        inside = _counts(at) and _counts(sizes) and len(at) == len(sizes) == len(size)
        if not inside or any(a + n > whole for a, n, whole in zip(at, sizes, size)):
            raise HalError(f"{what} of size {tuple(size)} has a part of size {sizes} at {at}")
        place = places.get(metadata.MetadataIndex(name, at))
        if place is None or math.prod(sizes) * dtype.itemsize > place.length:
            raise HalError(f"{what}: its part of size {tuple(sizes)} at {tuple(at)} is not stored")


def _counts(numbers: Any) -> bool:
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
        raise UnsafeFile(f"{self._path} wants {module}.{name}, which an index has no need of; it was not read")
