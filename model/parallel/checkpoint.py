"""Checkpoints written by all ranks together: the same files, names and guarantees as those of one process.

Rank 0 makes the folder, every rank writes its pieces, rank 0 adds checksums and publishes it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hal import Comm, HalError

from .. import checkpoint
from ..files import beside, make_folder, new_token, publish_folder, write_text
from .pieces import Piece


def save(
    root: Path, iteration: int, tensors: Mapping[str, Piece | Tensor], state: Mapping[str, Any], world: Comm
) -> Path:
    """As checkpoint.save; every rank passes the pieces that it, and no other rank, is to write."""
    folder, lead = checkpoint.folder_of(root, iteration), world.rank == 0
    if lead:
        make_folder(root)
        for leftover in root.glob(".*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if folder.exists() and checkpoint.latest(root) != iteration:
            shutil.rmtree(folder)
    exists, token = _told(world, [int(folder.exists()), new_token()])
    if not exists:
        with contextlib.ExitStack() as stack:
            new = beside(folder, token)
            if lead:
                stack.enter_context(publish_folder(folder, token))
            world.barrier()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(dict(tensors), checkpoint_id=new)
            world.barrier()
            if lead:
                sums = {p.name: checkpoint._checksum(p) for p in sorted(new.iterdir())}
                (new / checkpoint.MANIFEST).write_text(json.dumps({"state": state, "sha256": sums}))
    if lead:
        write_text(root / checkpoint.LATEST, f"{iteration}\n")
    world.barrier()
    return folder


def read_state(root: Path, world: Comm) -> tuple[Path, dict[str, Any]]:
    """As checkpoint.read_state; rank 0 verifies the checksums for all, and all raise if it does."""
    problem = ""
    if world.rank == 0:
        try:
            checkpoint.read_state(root)
        except (HalError, OSError) as error:
            problem = str(error)
    text = problem.encode()
    (length,) = _told(world, [len(text)])
    if length:
        codes = world.broadcast(torch.tensor(list(text) if world.rank == 0 else [0] * length, device=world.device))
        raise HalError(bytes(codes.tolist()).decode())
    iteration = checkpoint.latest(root)
    assert iteration is not None
    folder = checkpoint.folder_of(root, iteration)
    return folder, json.loads((folder / checkpoint.MANIFEST).read_text())["state"]


def load_tensors(folder: Path, tensors: Mapping[str, Piece]) -> None:
    """Fills the pieces from a checkpoint of any layout. Raises HalError for names or shapes that it does not have."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, part in tensors.items():
        size = getattr(stored.get(name), "size", None)
        if size is None or tuple(size) != tuple(part.size()):
            found = "nothing" if size is None else f"shape {tuple(size)}"
            raise HalError(
                f"the checkpoint {folder} has {found} for {name}, this model {tuple(part.size())}; "
                "give the model options it was saved with"
            )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # Each rank reads what it needs on its own: some hold pieces that others do not.
        dcp.load(dict(tensors), checkpoint_id=folder, no_dist=True)


def _told(world: Comm, values: list[int]) -> list[int]:
    """Rank 0's values, on every rank."""
    numbers: list[int] = world.broadcast(torch.tensor(values, dtype=torch.int64, device=world.device)).tolist()
    return numbers
