"""Checkpoints of torch.distributed.checkpoint under Megatron's names, as files: which there are, and reading them.

`SAVE/iter_0000100/` is complete before `latest_checkpointed_iteration.txt` names it (see saving.py). Every file's
checksum is verified on load. Tensors are stored under parameter names in whole-model coordinates, so nothing depends
on their order or on the layout.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hal import Comm, HalError, Solo

from .config import ConfigError
from .parallel.pieces import Piece
from .unpickle import read_tensors, stored_tensors

LATEST, MANIFEST, RELEASE = "latest_checkpointed_iteration.txt", "hal.json", "release"
FP32 = "optimizer.state.fp32_param."
"""Prefix of the names of float32 copies of 16-bit weights."""

T = TypeVar("T", Tensor, Piece)

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def folder_of(root: Path, iteration: int | str) -> Path:
    """Where the checkpoint of an iteration, or the RELEASE, lives."""
    return root / (RELEASE if iteration == RELEASE else f"iter_{iteration:07d}")


def tracked(root: Path) -> int | str | None:
    """What the tracker file names: an iteration, RELEASE, or None without such a file. ConfigError if damaged."""
    tracker = root / LATEST
    if not tracker.exists():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigError(f"{tracker} should hold an iteration number or '{RELEASE}'; it holds {text[:40]!r}")
    return int(text)


def latest(root: Path) -> int | None:
    """The iteration of the newest complete checkpoint (a release is at 0), or None. ConfigError as `tracked`."""
    found = tracked(root)
    return 0 if isinstance(found, str) else found


def prune(root: Path, keep: int) -> None:
    """Removes the oldest checkpoints of `root` but the `keep` newest, which include the latest."""
    folders = sorted(p for p in root.glob("iter_*") if p.is_dir() and p.name[5:].isdigit())
    newest = latest(root)
    for folder in folders[:-keep]:
        if int(folder.name[5:]) != newest:
            shutil.rmtree(folder)


def read_state(root: Path, world: Comm | None = None) -> tuple[Path, dict[str, Any]]:
    """(folder, state) of the latest checkpoint under `root`, with every file's checksum verified, by all ranks' work.

    Raises, on every rank, ConfigError if there is none, HalError if a file is missing or damaged.
    """
    world = world or Solo()
    answer, caught = "", None
    if world.rank == 0:
        try:
            folder, manifest = _manifest(root)
            answer = json.dumps([str(folder), manifest])
        except (HalError, OSError) as error:
            caught, answer = error, json.dumps(str(error))
    found = json.loads(told_text(world, answer, 0))
    if caught is not None:
        raise caught
    if isinstance(found, str):
        raise HalError(found)
    folder, manifest = Path(found[0]), found[1]
    files = sorted(set(manifest["sha256"]) - {MANIFEST})
    problem = next(
        filter(None, (_damage(folder, n, manifest["sha256"][n]) for n in files[world.rank :: world.size])), ""
    )
    alarm = torch.tensor([world.rank if problem else world.size], device=world.device)
    first = int(world.all_reduce(alarm, "min").item())
    if first < world.size:
        raise HalError(told_text(world, problem, first))
    return folder, manifest["state"]


def _manifest(root: Path) -> tuple[Path, dict[str, Any]]:
    at = tracked(root)
    if at is None:
        raise ConfigError(f"--load {root}: there is no checkpoint ({LATEST} does not exist)")
    folder = folder_of(root, at)
    path = folder / MANIFEST
    if folder.is_dir() and not path.exists() and any(folder.glob("mp_rank_*")):
        raise ConfigError(f"the checkpoint {folder} is in Megatron's format; `hal convert` makes one of HAL's from it")
    try:
        manifest = json.loads(path.read_text())
        sums, state = manifest["sha256"], manifest["state"]
        whole = sums[MANIFEST] == state_checksum(state)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise HalError(f"the checkpoint file {path} cannot be read: {error}{_way_out(folder)}") from None
    if not (isinstance(sums, dict) and all(n.isascii() and isinstance(s, str) for n, s in sums.items())):
        raise HalError(f"{path}: sha256 should hold a checksum for each file{_way_out(folder)}")
    if not isinstance(state, dict) or type(state.get("iteration")) is not int or state["iteration"] < 0:
        raise HalError(f"{path}: state should be an object with the number of an iteration{_way_out(folder)}")
    if not whole:
        raise HalError(f"the checkpoint file {path} is damaged{_way_out(folder)}")
    return folder, manifest


def _damage(folder: Path, name: str, checksum: str) -> str:
    path = folder / name
    if path.is_file() and file_checksum(path) == checksum:
        return ""
    return f"the checkpoint file {path} is {'damaged' if path.is_file() else 'missing'}{_way_out(folder)}"


def _way_out(folder: Path) -> str:
    return f"; to use an older checkpoint, write its iteration into {folder.parent / LATEST}"


def sources(tensors: Mapping[str, T], folder: Path, *, moments: bool) -> dict[str, T]:
    """What to load of a run's `tensors`, by the name under which the checkpoint in `folder` has it.

    Weights come from their float32 copies where either side has some: a model of another precision starts as exactly
    as it can. The 16-bit weights themselves are for the caller to round. moments: the optimizer's too.
    """
    stored = stored_tensors(folder)
    masters = {n.removeprefix(FP32): x for n, x in tensors.items() if n.startswith(FP32)}
    weights = masters or {n: x for n, x in tensors.items() if not n.startswith("optimizer.")}
    found = {FP32 + n if FP32 + n in stored else n: x for n, x in weights.items()}
    return {**found, **{n: x for n, x in tensors.items() if moments and ".exp_avg" in n}}


def load_tensors(folder: Path, tensors: Mapping[str, Tensor | Piece]) -> None:
    """Fills `tensors` in place, each rank its own. Raises HalError for names or shapes the checkpoint does not have."""
    stored = stored_tensors(folder)
    for name, tensor in tensors.items():
        info = stored.get(name)
        if info is None or tuple(info.size) != tuple(tensor.shape):
            found = "nothing" if info is None else f"shape {tuple(info.size)}"
            raise HalError(
                f"the checkpoint {folder} has {found} for {name}, this model {tuple(tensor.shape)}; "
                f"give the model options it was saved with"
            )
    read_tensors(folder, tensors)


def file_checksum(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def state_checksum(state: Any) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def told(world: Comm, values: list[int], source: int = 0) -> list[int]:
    """The numbers of rank `source`, on every rank."""
    sent = torch.tensor(values, dtype=torch.int64, device=world.device)
    numbers: list[int] = world.broadcast(sent, source).tolist()
    return numbers


def told_text(world: Comm, text: str, source: int) -> str:
    """The text of rank `source`, on every rank."""
    content = list(text.encode())
    (length,) = told(world, [len(content)], source)
    return bytes(told(world, content if world.rank == source else [0] * length, source)).decode()
