"""Finds and reads checkpoints: torch.distributed.checkpoint files in folders with Megatron's names.

`SAVE/iter_0000100/` is complete before `latest_checkpointed_iteration.txt` names it (see writer.py). Every file's
checksum is verified on load. Tensors are stored under parameter names in the coordinates of the full model, so that
neither their order nor the parallel layout matters.
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

from hal import Comm, HalError, SingleRankComm

from ..config.schema import ConfigError
from .safe_unpickle import read_tensors, stored_tensors
from .sharded_tensor import LocalShard

LATEST, MANIFEST, RELEASE = "latest_checkpointed_iteration.txt", "hal.json", "release"
FP32 = "optimizer.state.fp32_param."
"""Prefix of the names of the float32 master copies of 16-bit weights."""

T = TypeVar("T", Tensor, LocalShard)

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def folder_of(root: Path, iteration: int | str) -> Path:
    """The folder of the checkpoint of an iteration, or of the RELEASE."""
    return root / (RELEASE if iteration == RELEASE else f"iter_{iteration:07d}")


def tracked(root: Path) -> int | str | None:
    """The content of the tracker file: an iteration or RELEASE; None without a file. ConfigError if it is damaged."""
    tracker = root / LATEST
    if not tracker.exists():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigError(f"{tracker} should contain an iteration number or '{RELEASE}'; found {text[:40]!r}")
    return int(text)


def latest(root: Path) -> int | None:
    """The iteration of the latest checkpoint (0 for a release), or None. Raises ConfigError like `tracked`."""
    iteration = tracked(root)
    return 0 if isinstance(iteration, str) else iteration


def prune(root: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints of `root`, and never the one that the tracker file names."""
    folders = [p for p in root.glob("iter_*") if p.is_dir() and p.name[5:].isdecimal()]
    folders.sort(key=lambda p: int(p.name[5:]))  # sorted as numbers, because iterations above 9999999 have more digits
    newest = latest(root)
    for folder in folders[:-keep]:
        if int(folder.name[5:]) != newest:
            shutil.rmtree(folder)


def read_state(root: Path, world: Comm | None = None) -> tuple[Path, dict[str, Any]]:
    """(folder, state) of the latest checkpoint under `root`. The ranks share the verification of its files' checksums.

    Raises on every rank: ConfigError if there is none, HalError if a file is missing or damaged.
    """
    world = world or SingleRankComm()
    # Rank 0 sends either [folder, manifest] or the text of its error, so that all ranks raise.
    answer, caught = "", None
    if world.rank == 0:
        try:
            folder, manifest = _manifest(root)
            answer = json.dumps([str(folder), manifest])
        except (HalError, OSError) as error:
            caught, answer = error, json.dumps(str(error))
    received = json.loads(broadcast_text(world, answer, 0))
    if caught is not None:
        raise caught
    if isinstance(received, str):
        raise HalError(received)
    folder, manifest = Path(received[0]), received[1]
    files = sorted(set(manifest["sha256"]) - {MANIFEST})
    problem = next(
        filter(None, (_damage(folder, n, manifest["sha256"][n]) for n in files[world.rank :: world.size])), ""
    )
    # The lowest rank that found a problem broadcasts it to all; world.size means that there was no problem.
    failed = torch.tensor([world.rank if problem else world.size], device=world.device)
    first = int(world.all_reduce(failed, "min").item())
    if first < world.size:
        raise HalError(broadcast_text(world, problem, first))
    return folder, manifest["state"]


def _manifest(root: Path) -> tuple[Path, dict[str, Any]]:
    iteration = tracked(root)
    if iteration is None:
        raise ConfigError(f"--load {root}: there is no checkpoint ({LATEST} does not exist)")
    folder = folder_of(root, iteration)
    path = folder / MANIFEST
    if folder.is_dir() and not path.exists() and any(folder.glob("mp_rank_*")):
        raise ConfigError(f"the checkpoint {folder} is in Megatron's format; convert it with `hal convert`")
    try:
        manifest = json.loads(path.read_text())
        sums, state = manifest["sha256"], manifest["state"]
        intact = sums[MANIFEST] == state_checksum(state)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise HalError(f"the checkpoint file {path} cannot be read: {error}{_hint(folder)}") from None
    if not (isinstance(sums, dict) and all(n.isascii() and isinstance(s, str) for n, s in sums.items())):
        raise HalError(f"{path}: sha256 should contain a checksum for each file{_hint(folder)}")
    if not isinstance(state, dict) or type(state.get("iteration")) is not int or state["iteration"] < 0:
        raise HalError(f"{path}: state should be an object with an iteration number{_hint(folder)}")
    if not intact:
        raise HalError(f"the checkpoint file {path} is damaged{_hint(folder)}")
    return folder, manifest


def _damage(folder: Path, name: str, checksum: str) -> str:
    path = folder / name
    if path.is_file() and file_checksum(path) == checksum:
        return ""
    return f"the checkpoint file {path} is {'damaged' if path.is_file() else 'missing'}{_hint(folder)}"


def _hint(folder: Path) -> str:
    return f"; to load an older checkpoint, write its iteration into {folder.parent / LATEST}"


def sources(tensors: Mapping[str, T], folder: Path, *, moments: bool) -> dict[str, T]:
    """The tensors of a run to load, by their names in the checkpoint in `folder`.

    Weights are loaded from float32 master copies if the checkpoint or the run has them, so that a model of another
    precision loses no accuracy; the caller then rounds the 16-bit weights. moments: also the optimizer's moments.
    """
    stored = stored_tensors(folder)
    masters = {n.removeprefix(FP32): x for n, x in tensors.items() if n.startswith(FP32)}
    weights = masters or {n: x for n, x in tensors.items() if not n.startswith("optimizer.")}
    by_stored_name = {FP32 + n if FP32 + n in stored else n: x for n, x in weights.items()}
    return {**by_stored_name, **{n: x for n, x in tensors.items() if moments and ".exp_avg" in n}}


def load_tensors(folder: Path, tensors: Mapping[str, Tensor | LocalShard]) -> None:
    """Fills `tensors` in place, each rank its own. Raises HalError for names or shapes that the checkpoint lacks."""
    stored = stored_tensors(folder)
    for name, tensor in tensors.items():
        info = stored.get(name)
        if info is None or tuple(info.size) != tuple(tensor.shape):
            stored_as = "no tensor" if info is None else f"shape {tuple(info.size)}"
            raise HalError(
                f"the checkpoint {folder} has {stored_as} for {name}, this model has {tuple(tensor.shape)}; give the "
                "model options that it was saved with"
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


def broadcast_integers(world: Comm, values: list[int], source: int = 0) -> list[int]:
    """The integers of rank `source`, on every rank. All ranks must pass the same number of them."""
    sent = torch.tensor(values, dtype=torch.int64, device=world.device)
    numbers: list[int] = world.broadcast(sent, source).tolist()
    return numbers


def broadcast_text(world: Comm, text: str, source: int) -> str:
    """The text of rank `source`, on every rank."""
    content = list(text.encode())
    (length,) = broadcast_integers(world, [len(content)], source)
    return bytes(broadcast_integers(world, content if world.rank == source else [0] * length, source)).decode()
