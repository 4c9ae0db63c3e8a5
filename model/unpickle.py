"""Files that are pickles by format, read without running anything they say.

Only the classes listed here are made, and none of them does anything when it is made; a file that names any other is
refused with its name. Tensors come through torch's weights_only unpickler.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import pathlib
import pickle
from collections.abc import Iterator
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
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
        zipped = magic[:2] == b"PK"  # what torch writes since 1.6; only there can the names be looked at before
        with _only([]):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else []
        with _only([*allowed, *((Inert, n) for n in unknown if n.startswith(_IGNORED))]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except OSError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if "Unsupported" in reason or "blocked" in reason or "not an allowed global" in reason:
            start = max(0, reason.find("Unsupported"))
            raise UnsafeFile(
                f"{path} holds more than tensors and settings, and reading it could run code: "
                f"{reason[start : start + 160]}. It was not read; save the model's state dict alone, or as safetensors"
            ) from None
        raise HalError(f"{path} is no file of torch.save, or a damaged one: {reason[:200]}") from None


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
    """Reads a distributed checkpoint's index without unpickling freely. Tensors are read as torch does: safely."""

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
        if not isinstance(found, metadata.Metadata) or not isinstance(found.state_dict_metadata, dict):
            raise HalError(f"{path} is no index of a distributed checkpoint")
        for name, info in (found.storage_data or {}).items():
            # A file name with a path could point anywhere.
            if pathlib.PurePath(str(info.relative_path)).name != str(info.relative_path):
                raise UnsafeFile(f"{path} places {name} outside its folder, in {info.relative_path}")
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


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
