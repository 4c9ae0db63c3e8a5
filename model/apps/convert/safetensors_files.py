"""Reads and writes the files of a Hugging Face folder: config.json and one or more safetensors files. No pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from hal.untrusted import contained, read_json

from ...common.atomic_files import publish_folder, write_text
from ...common.optional_packages import optional_package
from .weights import ConversionError, require

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _library() -> Any:
    with optional_package("the Hugging Face format needs safetensors", "torch-hal[convert]"):
        import safetensors.torch
    return safetensors


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises ConversionError if it is not a JSON object."""
    return _read_json(folder / "config.json")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the model. Raises ConversionError for missing or damaged files, or if there are only pickles."""
    index = folder / _INDEX
    if not index.is_file():
        pickles = [p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
        if not (folder / _ONE).is_file() and pickles:
            raise ConversionError(
                f"{folder} has its weights only in pickles ({', '.join(sorted(pickles)[:3])}), which can run code when "
                "they are loaded; save the model with safe_serialization=True (safetensors) and convert that"
            )
        return _read_file(folder / _ONE)
    weight_map = _weight_map(index)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        tensors.update(_read_file(folder / name))
    missing = sorted(set(weight_map) - set(tensors))
    require(not missing, f"{index} lists {len(missing)} tensors that no file contains ({', '.join(missing[:3])})")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The file that holds each tensor, by the tensor's name."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index} has no weight_map")
    files = {name: str(file) for name, file in weight_map.items()}
    # A file name that contains a path could refer to a file outside the folder.
    bad = [n for n in sorted(set(files.values())) if Path(n).name != n or not n.endswith(".safetensors")]
    require(not bad, f"{index} names {bad[:3]}, which are not safetensors files in its folder")
    return files


@contextmanager
def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Path]:
    """Writes a model to a new folder, atomically: it appears with what the caller adds to the yielded one."""
    library = _library()
    with publish_folder(folder) as new:
        write_text(new / "config.json", json.dumps(config, indent=2) + "\n")
        contiguous = {name: t.contiguous() for name, t in tensors.items()}
        library.torch.save_file(contiguous, new / _ONE, metadata={"format": "pt"})
        yield new


def _read_file(path: Path) -> dict[str, Tensor]:
    library = _library()
    if not path.is_file():
        raise ConversionError(f"{path} does not exist")
    with contained(f"{path} is not a safetensors file, or is damaged", ConversionError):
        return dict(library.torch.load_file(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, ConversionError)
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from None
    require(isinstance(content, dict), f"{path} is not a JSON object")
    return dict(content)
