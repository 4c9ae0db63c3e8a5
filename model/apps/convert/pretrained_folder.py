"""A Hugging Face folder as the --load of a training run: it is converted once, into HAL's cache.

A run then loads it as any release, under every parallel layout.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...checkpoint import reader
from ...common.atomic_files import cache_dir, made_once
from ...config.schema import GivenOptions
from . import hal_format, huggingface


def prepare(values: GivenOptions) -> None:
    """Replaces a --load that is a Hugging Face folder by its conversion. Raises HalError for a model that HAL does not
    have, or a damaged folder."""
    folder = Path(values.get("load") or "")
    if "load" not in values or not (folder / "config.json").is_file() or reader.newest(folder) is not None:
        return
    # The vocabulary is padded as far as its shards need it: such rows are zeros, and their logits part of the softmax.
    divisor = values.get("make_vocab_size_divisible_by") or values.get("tensor_model_parallel_size") or 1
    converted = cache_dir("converted") / _key(folder, divisor)
    made_once(converted, lambda new: hal_format.write(huggingface.read(folder), new, divisible_by=divisor))
    values["load"] = str(converted)
    values.origins["load"] = f"{values.origins.get('load', 'command line')}: {folder}, converted"
    if values.get("save") is not None and Path(values["save"]) == folder:
        values.notes.append(f"--save {folder}: checkpoints of HAL are written beside the files of Hugging Face")


def _key(folder: Path, divisor: int) -> str:
    """What identifies a conversion: the path of the folder, the names, sizes and times of the files that are read, and
    what the vocabulary is made divisible by."""
    digest = hashlib.sha256(f"{divisor} {folder.resolve()}".encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".txt"):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]
