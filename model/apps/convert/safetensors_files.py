"""Reads and writes the files of a Hugging Face folder: config.json and one or more safetensors files. No pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.untrusted import contained, read_json

from ...common.atomic_files import publish_folder, write_text
from ...common.optional_packages import optional_package
from .weights import ConversionError, LazyTensors, require

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
"""The largest file; transformers' save_pretrained has the same order of magnitude."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _library() -> Any:
    with optional_package("the Hugging Face format needs safetensors", "torch-hal[convert]"):
        import safetensors.torch
    return safetensors


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises ConversionError if it is not a JSON object."""
    return read_object(folder / "config.json")


def read_tensors(folder: Path) -> LazyTensors:
    """All tensors of the model, each read when it is asked for. Raises ConversionError for missing or damaged files, or
    if there are only pickles."""
    index, tensors = folder / _INDEX, LazyTensors()
    if not index.is_file():
        pickles = [p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
        if not (folder / _ONE).is_file() and pickles:
            raise ConversionError(
                f"{folder} has its weights only in pickles ({', '.join(sorted(pickles)[:3])}), which can run code when "
                "they are loaded; save the model with safe_serialization=True (safetensors) and convert that"
            )
        _open_file(folder / _ONE, tensors)
        return tensors
    weight_map = _weight_map(index)
    for name in sorted(set(weight_map.values())):
        _open_file(folder / name, tensors)
    missing = sorted(set(weight_map) - set(tensors))
    require(not missing, f"{index} lists {len(missing)} tensors that no file contains ({', '.join(missing[:3])})")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The file that holds each tensor, by the tensor's name."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index} has no weight_map")
    files = {name: str(file) for name, file in weight_map.items()}
    # A file name that contains a path could refer to a file outside the folder.
    bad = [n for n in sorted(set(files.values())) if Path(n).name != n or not n.endswith(".safetensors")]
    require(not bad, f"{index} names {bad[:3]}, which are not safetensors files in its folder")
    return files


Groups = Iterable[tuple[Mapping[str, Tensor], Callable[[], Sequence[Tensor]]]]
"""Tensors that are written together: without data by name, and a function that returns them with data."""


@contextmanager
def write(folder: Path, config: Mapping[str, Any], groups: Groups, shard_bytes: int = SHARD_BYTES) -> Iterator[Path]:
    """Writes a model to a new folder, atomically: it appears with what the caller adds to the yielded one.

    The tensors are in files of at most `shard_bytes` (or one group), and only those of one group are in memory.
    """
    files: list[list[tuple[Mapping[str, Tensor], Callable[[], Sequence[Tensor]]]]] = [[]]
    size = total = 0
    for metas, load in groups:
        nbytes = sum(t.nbytes for t in metas.values())
        if files[-1] and size + nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append((metas, load))
        size, total = size + nbytes, total + nbytes
    with publish_folder(folder) as new:
        write_text(new / "config.json", json.dumps(config, indent=2) + "\n")
        weight_map: dict[str, str] = {}
        for number, content in enumerate(files, 1):
            name = _ONE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            _write_file(new / name, content)
            weight_map.update({tensor: name for metas, _ in content for tensor in metas})
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_text(new / _INDEX, json.dumps(index, indent=2) + "\n")
        yield new


def _write_file(path: Path, groups: Groups) -> None:
    """A safetensors file: the length of the header, the header (JSON), and the tensors' bytes in the order of it.

    Written here because the library's save_file needs all tensors at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for metas, _ in groups:
        for name, t in metas.items():
            header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
            end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for metas, load in groups:
            for (name, meta), tensor in zip(metas.items(), load(), strict=True):
                assert (tensor.shape, tensor.dtype) == (meta.shape, meta.dtype), name
                file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _open_file(path: Path, tensors: LazyTensors) -> None:
    """Adds the tensors of a file to `tensors`."""
    library = _library()
    if not path.is_file():
        raise ConversionError(f"{path} does not exist")
    problem = f"{path} is not a safetensors file, or is damaged"

    def load(name: str) -> Tensor:
        with contained(problem, ConversionError), library.safe_open(path, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    with contained(problem, ConversionError), library.safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype())
            require(dtype is not None, f"{path}: {name} is of dtype {part.get_dtype()}, which is not converted")
            tensors.add(name, partial(load, name), torch.empty(part.get_shape(), dtype=dtype, device="meta"))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConversionError for a file that cannot be read or has something else."""
    try:
        content = read_json(path, ConversionError)
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from None
    require(isinstance(content, dict), f"{path} is not a JSON object")
    return dict(content)
