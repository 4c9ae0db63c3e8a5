"""Hugging Face folders as files: config.json and safetensors, one file or several. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hal import HalError

from ..files import publish_folder, write_text
from .weights import ConversionError, require

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise HalError(
            f"Hugging Face's format needs safetensors ({error}); install it with: pip install 'torch-hal[convert]'"
        ) from None
    return safetensors


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model. Raises ConversionError if it is none."""
    return _read_json(folder / "config.json")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model. Raises ConversionError for missing or broken files, or if there are pickles only."""
    index = folder / _INDEX
    if index.is_file():
        listed = _read_json(index).get("weight_map")
        require(isinstance(listed, dict) and bool(listed), f"{index} has no weight_map")
        names = sorted({str(name) for name in listed.values()})
        # A name with a path could point anywhere.
        bad = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
        require(not bad, f"{index} names {bad[:3]}, which are no safetensors files of its folder")
    else:
        names = [_ONE]
        pickles = [p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
        if not (folder / _ONE).is_file() and pickles:
            raise ConversionError(
                f"{folder} has its weights only in pickles ({', '.join(sorted(pickles)[:3])}), which can run code when "
                "they are read; save the model with safe_serialization=True (safetensors) and convert that"
            )
    found: dict[str, Tensor] = {}
    for name in names:
        found.update(_read_file(folder / name))
    if index.is_file():
        missing = sorted(set(listed) - set(found))
        require(not missing, f"{index} lists {len(missing)} tensors that no file holds ({', '.join(missing[:3])})")
    return found


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A new folder with a model; it appears whole or not at all."""
    library = _library()
    with publish_folder(folder) as beside:
        write_text(beside / "config.json", json.dumps(config, indent=2) + "\n")
        whole = {name: t.contiguous() for name, t in tensors.items()}
        library.torch.save_file(whole, beside / _ONE, metadata={"format": "pt"})


def _read_file(path: Path) -> dict[str, Tensor]:
    library = _library()
    if not path.is_file():
        raise ConversionError(f"{path} does not exist")
    try:
        return dict(library.torch.load_file(path))
    except (library.SafetensorError, ValueError, OSError) as error:
        raise ConversionError(f"{path} is no safetensors file, or a damaged one: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None
    require(isinstance(content, dict), f"{path} holds no JSON object")
    return dict(content)
