"""A Hugging Face folder as the --load of a command: it is converted once, into HAL's cache.

The command then loads it as any release, under every parallel layout.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...checkpoint import reader
from ...common.atomic_files import cache_dir, made_once, private
from ...config.schema import GivenOptions
from . import hal_format, huggingface

_VERSION = 2
"""Changes when the same folder gives another conversion, so that those of older versions are not used."""


def prepare(values: GivenOptions) -> None:
    """Replaces a --load that is a Hugging Face folder by its conversion. Raises HalError for a model that HAL does not
    have, or a damaged folder."""
    folder = Path(values.get("load") or "")
    # The vocabulary is padded as far as its shards need it: such rows are zeros, and their logits part of the softmax.
    divisor = values.get("make_vocab_size_divisible_by") or values.get("tensor_model_parallel_size") or 1
    load = None if "load" not in values else converted(folder, divisor)
    if load is None:
        return
    values["load"] = str(load)
    values.origins["load"] = f"{values.origins.get('load', 'command line')}: {folder}, converted"
    if values.get("save") is not None and Path(values["save"]) == folder:
        values.notes.append(f"--save {folder}: checkpoints of HAL are written beside the files of Hugging Face")


def converted(folder: Path, divisor: int = 1) -> Path | None:
    """The conversion of a Hugging Face folder, which is made if there is none yet; None for any other folder.

    divisor: the vocabulary is padded to a multiple of it.
    """
    if not (folder / "config.json").is_file() or reader.newest(folder) is not None:
        return None
    with private():
        result = cache_dir("converted") / _key(folder, divisor)
        return made_once(result, lambda new: hal_format.write(huggingface.read(folder), new, divisible_by=divisor))


def _key(folder: Path, divisor: int) -> str:
    """What identifies a conversion: the path of the folder, the names, sizes and times of the files that are read, and
    what the vocabulary is made divisible by."""
    digest = hashlib.sha256(f"{_VERSION} {divisor} {folder.resolve()}".encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".txt", ".model"):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]
