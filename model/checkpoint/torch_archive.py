"""Reads files of torch.save without executing code from them.

The pickle inside is interpreted by restricted_pickle.py with the table below. Tensors are views of the file's bytes, so
that no file takes more memory than its size.
"""

from __future__ import annotations

import argparse
import collections
import io
import math
import os
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from hal import HalError
from hal.untrusted import contained, shown

from . import restricted_pickle
from .restricted_pickle import INERT, Global, InvalidPickle, UnsafeFile

MAX_PICKLE_BYTES = 64 << 20
"""Largest pickle that is read: an index, or a torch.save file without its tensors. An adversarial one takes about 300
times its size in memory."""

_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""The first two values of the files that torch wrote before 1.6 (torch.serialization.MAGIC_NUMBER)."""


def are_counts(numbers: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether these are sizes or offsets: integers of at least 0."""
    return isinstance(numbers, tuple) and len(numbers) <= 64 and all(type(n) is int and n >= 0 for n in numbers)


def _size(lengths: Any) -> torch.Size:
    # A length of 2^63 or more would be accepted here and raise an error when it is read.
    if not (isinstance(lengths, tuple) and all(type(n) is int and abs(n) < 2**63 for n in lengths)):
        raise InvalidPickle(f"a size is {shown(lengths)}")
    return torch.Size(lengths)


def shared_global(module: str, name: str) -> Global | None:
    """The globals of both kinds of files."""
    dtype = getattr(torch, name, None) if module == "torch" else None
    if isinstance(dtype, torch.dtype):
        return Global(value=dtype)
    known = {
        ("torch", "Size"): Global(_size),
        ("collections", "OrderedDict"): Global(collections.OrderedDict[Any, Any], INERT.build),
    }
    return known.get((module, name))


class _Storage(NamedTuple):
    """A tensor's memory in a file. dtype: uint8 for a storage without a type."""

    dtype: torch.dtype
    bytes: torch.UntypedStorage


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    """The tensor that torch._utils._rebuild_tensor_v2 and v3 make. v3 appends its dtype to two more arguments."""
    typed = [value for value in rest if isinstance(value, torch.dtype)]
    valid = (
        isinstance(storage, _Storage)
        and type(offset) is int
        and offset >= 0
        and are_counts(size)
        and are_counts(stride)
    )
    if not valid or len(size) != len(stride) or len(typed) > 1:
        raise InvalidPickle("a tensor has no valid shape")
    dtype = typed[0] if typed else storage.dtype
    last = offset + sum((n - 1) * step for n, step in zip(size, stride)) if math.prod(size) else offset - 1
    if (last + 1) * dtype.itemsize > storage.bytes.nbytes():
        raise InvalidPickle(f"a tensor of shape {tuple(size)} is larger than its storage")
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage.bytes, offset, size, stride)
    return tensor


def _parameter(data: Any, *rest: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data
    raise InvalidPickle("a parameter is no tensor")


def _of_type(function: Any, *rest: Any) -> Any:
    """The tensor that torch._tensor._rebuild_from_type_v2 makes of (function, type, arguments, attributes)."""
    _, arguments, *_ = rest
    if function is not _rebuilt or not isinstance(arguments, tuple):
        raise InvalidPickle("a tensor is of an unknown type")
    return _rebuilt(*arguments)


_TYPED = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_STATE: dict[tuple[str, str], Global] = {
    **{("torch", name): Global(value=dtype) for name, dtype in _TYPED.items()},
    ("torch.storage", "UntypedStorage"): Global(value=torch.uint8),
    **{
        ("torch._utils", f"_rebuild_tensor{version}"): Global(_rebuilt, value=_rebuilt)
        for version in ("", "_v2", "_v3")
    },
    ("torch._utils", "_rebuild_parameter"): Global(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Global(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Global(_of_type),
    ("argparse", "Namespace"): Global(argparse.Namespace, lambda namespace, state: namespace.__dict__.update(state)),
}
# Megatron-LM's enums, settings and states of random generators; containers and numbers that no reader here needs.
_IGNORED_IN_STATE = ("megatron.", "numpy", "signal.", "types.SimpleNamespace", "pathlib.", "enum.", "_codecs.encode")
_BUILTINS = ("set", "bytes", "bytearray", "complex", "slice", "object")
_INERT_NAMES = {
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _BUILTINS),
    "collections.Counter",
    "collections.defaultdict",
    "torch.device",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
}


def _of_state(module: str, name: str) -> Global:
    known, full = _STATE.get((module, name)) or shared_global(module, name), f"{module}.{name}"
    if known is None and full not in _INERT_NAMES and not full.startswith(_IGNORED_IN_STATE):
        raise UnsafeFile(f"non-allowlisted global {full}")
    return known or INERT


def load_state(path: Path) -> Any:
    """The content of a torch.save file: containers, numbers, tensors and argparse's Namespace; objects of Megatron's
    classes become Inert. Raises UnsafeFile for any other class or function, HalError for a damaged file.

    Tensors are private views of the file, which must not shrink while they are in use.
    """
    with open(path, "rb") as file:
        return load_archive(file, path, 0, path.stat().st_size)


def load_archive(file: Any, path: Path, start: int, length: int) -> Any:
    """The content of the torch.save file at a range of bytes of `path`."""
    what = f"{path} is not a torch.save file, or is damaged"
    try:
        with contained(what):
            magic = os.pread(file.fileno(), 2, start)
            return (_archived if magic == b"PK" else _legacy)(file, path, start, length)
    except UnsafeFile as error:
        raise UnsafeFile(
            f"{path} was refused, since unpickling it could run code: it references {error.args[0]}. Save only the "
            "model's state dict, or use safetensors"
        ) from None
    except InvalidPickle as error:
        raise HalError(f"{what}: {error.args[0]}") from None


class _View(io.RawIOBase):
    """A range of bytes of a file, as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        content = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class _Contents:
    """The storages of a file: views of its bytes, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: Any = None

    def storage(self, dtype: torch.dtype, first: int, count: int) -> _Storage:
        """The storage of `count` elements from byte `first` on."""
        if self._bytes is None:
            self._bytes = torch.UntypedStorage.from_file(str(self._path), False, self._path.stat().st_size)
        last = first + count * dtype.itemsize
        if last > self._bytes.nbytes():
            raise InvalidPickle("a storage lies beyond its end")
        content = self._bytes[first:last]
        # Kernels may require addresses that are multiples of the element size.
        return _Storage(dtype, content.clone() if first % dtype.itemsize else content)


def _identity(identity: Any, length: int) -> tuple[torch.dtype, str, int]:
    """(dtype, name, elements) of the persistent id ("storage", type, name, device, elements, ...) of a storage."""
    if isinstance(identity, tuple) and len(identity) == length:
        _, dtype, name, _, count, *_ = identity
        if isinstance(dtype, torch.dtype) and isinstance(name, str) and type(count) is int and count >= 0:
            return dtype, name, count
    raise InvalidPickle("it refers to an object outside the file that is no storage")


def _archived(file: Any, path: Path, start: int, length: int) -> Any:
    """The content of a zip file as torch.save writes it: stored members data.pkl, byteorder, data/0, ..."""
    archive, contents = zipfile.ZipFile(_View(file, start, length)), _Contents(path)
    infos = archive.infolist()
    members = {info.filename.partition("/")[2]: info for info in infos}
    # torch.save compresses nothing; compressed or overlapping members can expand to any size.
    stored = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
    if not stored or sum(info.file_size for info in infos) > length:
        raise InvalidPickle("its members take more space than the file, or are compressed")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise InvalidPickle("it was written on a big-endian machine")
    if members["data.pkl"].file_size > MAX_PICKLE_BYTES:
        raise InvalidPickle(f"its data.pkl has more than {MAX_PICKLE_BYTES} bytes, the most that is read")

    def storage(identity: Any) -> _Storage:
        dtype, name, count = _identity(identity, 5)
        info = members.get(f"data/{name}")
        if info is None or count * dtype.itemsize > info.file_size:
            raise InvalidPickle(f"it does not contain the {shown(count)} elements of storage {shown(name)}")
        header = os.pread(file.fileno(), 30, start + info.header_offset)
        first = start + info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        return contents.storage(dtype, first, count)

    return restricted_pickle.load(io.BytesIO(archive.read(members["data.pkl"])), _of_state, storage)


def _legacy(file: Any, path: Path, start: int, length: int) -> Any:
    """The content of a file of torch before 1.6: pickles of a magic number, a version, facts about the machine, the
    content, and the names of the storages; then for each storage its number of elements and its bytes."""
    stream, contents = io.BufferedReader(_View(file, start, min(length, MAX_PICKLE_BYTES))), _Contents(path)
    if stream.peek(2)[:2] != b"\x80\x02" or restricted_pickle.load(stream, _of_state) != _LEGACY_MAGIC:
        raise InvalidPickle("it does not start as one")
    if restricted_pickle.load(stream, _of_state) != _LEGACY_PROTOCOL:
        raise InvalidPickle("it is of an unknown version")
    restricted_pickle.load(stream, _of_state)
    begin = stream.tell()
    dtypes: dict[str, torch.dtype] = {}
    places: dict[str, tuple[int, int]] = {}

    def surveyed(module: str, name: str) -> Global:
        return INERT._replace(value=_of_state(module, name).value or INERT.value)

    def survey(identity: Any) -> Any:
        dtype, name, _ = _identity(identity, 6)
        dtypes[name] = dtype
        return INERT.value

    def storage(identity: Any) -> _Storage:
        dtype, name, count = _identity(identity, 6)
        at, stored = places[name]
        if count > stored or dtype != dtypes[name] or identity[5] is not None:
            raise InvalidPickle(f"it does not contain the {shown(count)} elements of storage {shown(name)}")
        return contents.storage(dtype, at, count)

    # The places of the storages follow the content that refers to them, so that it is read twice.
    restricted_pickle.load(stream, surveyed, survey)
    names = restricted_pickle.load(stream, _of_state)
    at = start + stream.tell()
    for name in names:
        (count,) = struct.unpack("<q", os.pread(file.fileno(), 8, at))
        places[name] = at + 8, count
        at += 8 + count * dtypes[name].itemsize
        if count < 0 or at > start + length:
            raise InvalidPickle(f"its storage {shown(name)} lies beyond its end")
    stream.seek(begin)
    return restricted_pickle.load(stream, _of_state, storage)
