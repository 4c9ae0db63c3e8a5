"""Checkpoints by torch.distributed.checkpoint, under Megatron's names, that survive a kill at any moment.

`SAVE/iter_0000100/` appears complete (written beside, flushed, renamed) before `latest_checkpointed_iteration.txt`
names it. Checksums are verified on load. Tensors are stored under parameter names, so nothing depends on their order.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hal import HalError

from .config import ConfigError
from .files import make_folder, publish_folder, write_text

LATEST, MANIFEST = "latest_checkpointed_iteration.txt", "hal.json"


def folder_of(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lives."""
    return root / f"iter_{iteration:07d}"


def latest(root: Path) -> int | None:
    """The iteration of the newest complete checkpoint, or None. Raises ConfigError for a damaged tracker file."""
    tracker = root / LATEST
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise ConfigError(f"{tracker} should hold an iteration number; it holds {text[:40]!r}")
    return int(text)


def save(root: Path, iteration: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Writes a checkpoint of `tensors` (by name) and `state` (JSON), then makes it the latest."""
    make_folder(root)
    for leftover in root.glob(".*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    folder = folder_of(root, iteration)
    if folder.exists() and latest(root) != iteration:
        # Renamed into place by a run that was killed before it could name it: nobody refers to it.
        shutil.rmtree(folder)
    if not folder.exists():
        with publish_folder(folder) as beside:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(dict(tensors), checkpoint_id=beside, no_dist=True)
            sums = {p.name: _checksum(p) for p in sorted(beside.iterdir())}
            (beside / MANIFEST).write_text(json.dumps({"state": state, "sha256": sums}))
    write_text(root / LATEST, f"{iteration}\n")
    return folder


def prune(root: Path, keep: int) -> None:
    """Removes the oldest checkpoints of `root` but the `keep` newest, which include the latest."""
    folders = sorted(p for p in root.glob("iter_*") if p.is_dir() and p.name[5:].isdigit())
    newest = latest(root)
    for folder in folders[:-keep]:
        if int(folder.name[5:]) != newest:
            shutil.rmtree(folder)


def read_state(root: Path) -> tuple[Path, dict[str, Any]]:
    """(folder, state) of the latest checkpoint under `root`, with every file's checksum verified.

    Raises ConfigError if there is none, HalError if a file is missing or damaged.
    """
    iteration = latest(root)
    if iteration is None:
        raise ConfigError(f"--load {root}: there is no checkpoint ({LATEST} does not exist)")
    folder = folder_of(root, iteration)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        state, sums = manifest["state"], manifest["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise HalError(f"the checkpoint {folder} cannot be read: {error}") from None
    for name, checksum in sums.items():
        path = folder / name
        if not path.is_file() or _checksum(path) != checksum:
            raise HalError(
                f"the checkpoint file {path} is {'damaged' if path.is_file() else 'missing'}; to use an older "
                f"checkpoint, write its iteration into {root / LATEST}"
            )
    return folder, state


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fills `tensors` in place. Raises HalError for names or shapes that the checkpoint does not have."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        size = getattr(stored.get(name), "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            found = "nothing" if size is None else f"shape {tuple(size)}"
            raise HalError(
                f"the checkpoint {folder} has {found} for {name}, this model {tuple(tensor.shape)}; "
                f"give the model options it was saved with"
            )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()
