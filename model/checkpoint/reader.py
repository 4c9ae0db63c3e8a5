"""Finds and reads checkpoints: torch.distributed.checkpoint files in folders with Megatron's names.

`SAVE/iter_0000100/` is complete before `latest_checkpointed_iteration.txt` names it (see writer.py). Every file's
checksum is verified on load; if that fails, or if the tracker file is lost, the newest intact checkpoint is used.
Tensors are stored under parameter names in the coordinates of the full model, so that neither their order nor the
parallel layout matters.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hal import Comm, HalError, SingleRankComm
from hal.untrusted import read_json

from ..config.schema import ConfigError
from .safe_unpickle import SafeReader, read_tensors, stored_tensors
from .sharded_tensor import LocalShard

LATEST, MANIFEST, RELEASE = "latest_checkpointed_iteration.txt", "hal.json", "release"
FP32 = "optimizer.state.fp32_param."
"""Prefix of the names of the float32 master copies of 16-bit weights."""

_TRACKER_CHARACTERS = 100
"""The most characters of a valid tracker file; of a longer one no more are read."""

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
    with open(tracker, errors="replace") as file:
        read = file.read(_TRACKER_CHARACTERS + 1)
    text = read.strip()
    if text == RELEASE:
        return RELEASE
    if len(read) > _TRACKER_CHARACTERS or not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigError(f"{tracker} should contain an iteration number or '{RELEASE}'; found {text[:40]!r}")
    return int(text)


def iterations(root: Path) -> list[int]:
    """The iterations of the folders of `root` that have a manifest, in ascending order."""
    folders = (p for p in root.glob("iter_*") if p.name[5:].isdecimal() and p.name.isascii())
    # Sorted as numbers, because iterations above 9999999 have more digits.
    return sorted(int(p.name[5:]) for p in folders if len(p.name) < 24 and (p / MANIFEST).is_file())


def candidates(root: Path) -> list[int | str]:
    """The checkpoints of `root` in the order in which they are tried: the one that the tracker file names and older
    ones; without a valid tracker file all of them, the newest first."""
    complete: list[int | str] = [*reversed(iterations(root))]
    if (root / RELEASE / MANIFEST).is_file():
        complete.append(RELEASE)
    try:
        named = tracked(root)
    except ConfigError:
        named = None
    if named is None:
        return complete
    return [named, *(i for i in complete if isinstance(named, int) and isinstance(i, int) and i < named)]


def newest(root: Path) -> int | None:
    """The iteration of the checkpoint of `root` that would be tried first (0 for a release); None without any."""
    first = next(iter(candidates(root)), None)
    return 0 if isinstance(first, str) else first


def read_state(root: Path, world: Comm | None = None) -> tuple[Path, dict[str, Any]]:
    """(folder, state) of the latest checkpoint under `root` that is intact; a warning names those that are not.

    The ranks share the verification of the checksums. Raises on every rank: ConfigError if there is no checkpoint,
    HalError if none is intact.
    """
    world = world or SingleRankComm()
    remaining, problems = candidates(root) if world.rank == 0 else [], []
    if world.rank == 0:
        try:
            if tracked(root) is None and remaining:
                problems.append(f"{root / LATEST} is missing")
        except ConfigError as error:
            problems.append(error.args[0])
    while True:
        # Rank 0 sends [folder, manifest], or the text of the error that all ranks raise.
        answer: Any = None
        while answer is None and remaining:
            try:
                folder = folder_of(root, remaining.pop(0))
                answer = [str(folder), read_manifest(folder)]
            except (HalError, OSError) as error:
                problems.append(error.args[0] if isinstance(error, HalError) else str(error))
        received = json.loads(broadcast_text(world, json.dumps(answer or "; ".join(problems)), 0))
        if isinstance(received, str):
            if not received:
                raise ConfigError(f"--load {root}: there is no checkpoint ({LATEST} does not exist)")
            raise HalError(received)
        folder, manifest = Path(received[0]), received[1]
        problem = _verified(folder, manifest["sha256"], world)
        if not problem:
            break
        problems.append(problem)
    if problems and world.rank == 0:
        warnings.warn(f"{'; '.join(problems)}. Loading {folder} instead", RuntimeWarning, stacklevel=2)
    return folder, manifest["state"]


def _verified(folder: Path, sums: Mapping[str, str], world: Comm) -> str:
    """Verifies the files of a checkpoint, each rank its share. Returns the first problem, or "", on every rank."""
    files = sorted(set(sums) - {MANIFEST})
    problem = next(filter(None, (_damage(folder, n, sums[n]) for n in files[world.rank :: world.size])), "")
    # The lowest rank that found a problem broadcasts it to all; world.size means that there was no problem.
    failed = torch.tensor([world.rank if problem else world.size], device=world.device)
    first = int(world.all_reduce(failed, "min").item())
    return broadcast_text(world, problem, first) if first < world.size else ""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: its state, and the checksums of its files, which are not verified here.

    Raises ConfigError for another format, HalError if the manifest is damaged.
    """
    path = folder / MANIFEST
    if folder.is_dir() and not path.exists() and any(folder.glob("mp_rank_*")):
        raise ConfigError(f"the checkpoint {folder} is in Megatron's format; convert it with `hal convert`")
    try:
        manifest = read_json(path)
        sums, state = manifest["sha256"], manifest["state"]
        intact = sums[MANIFEST] == state_checksum(state)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, HalError) as error:
        reason = error.args[0] if isinstance(error, HalError) else error
        raise HalError(f"the checkpoint file {path} cannot be read: {reason}") from None
    if not (isinstance(sums, dict) and all(n.isascii() and isinstance(s, str) for n, s in sums.items())):
        raise HalError(f"{path}: sha256 should contain a checksum for each file")
    if not isinstance(state, dict) or type(state.get("iteration")) is not int or state["iteration"] < 0:
        raise HalError(f"{path}: state should be an object with an iteration number")
    if not intact:
        raise HalError(f"the checkpoint file {path} is damaged")
    return dict(manifest)


def _damage(folder: Path, name: str, checksum: str) -> str:
    path = folder / name
    if Path(name).name == name and path.is_file() and file_checksum(path) == checksum:
        return ""
    return f"the checkpoint file {path} is {'damaged' if path.is_file() else 'missing'}"


def sources(tensors: Mapping[str, T], folder: Path, *, moments: bool) -> dict[str, T]:
    """The tensors of a run to load, by their names in the checkpoint in `folder`.

    Weights are loaded from float32 master copies if the checkpoint or the run has them, so that a model of another
    precision loses no accuracy; the caller then rounds the 16-bit weights. moments: also the optimizer's moments.
    Histories of float8's scales, without which they begin anew, are not read from a checkpoint of another recipe.
    """
    stored = stored_tensors(folder)
    tensors = {n: x for n, x in tensors.items() if n in stored or not n.endswith(".amax_history")}
    masters = {n.removeprefix(FP32): x for n, x in tensors.items() if n.startswith(FP32)}
    weights = {n: x for n, x in tensors.items() if not n.startswith("optimizer.")} | masters
    by_stored_name = {FP32 + n if FP32 + n in stored else n: x for n, x in weights.items()}
    return {**by_stored_name, **{n: x for n, x in tensors.items() if moments and ".exp_avg" in n}}


def load_tensors(folder: Path, tensors: Mapping[str, Tensor | LocalShard]) -> None:
    """Fills `tensors` in place, each rank its own. Raises HalError for names or shapes that the checkpoint lacks."""
    source = SafeReader(folder)
    stored = source.tensors()
    for name, tensor in tensors.items():
        info = stored.get(name)
        if info is None or tuple(info.size) != tuple(tensor.shape):
            stored_as = "no tensor" if info is None else f"shape {tuple(info.size)}"
            raise HalError(
                f"the checkpoint {folder} has {stored_as} for {name}, this model has {tuple(tensor.shape)}; give the "
                "model options that it was saved with"
            )
    read_tensors(source, tensors)


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
