"""Writes checkpoints that survive a kill at any moment, in the background if asked.

A checkpoint is written beside, by all ranks together, flushed, renamed, and only then named as the latest. A failed
save is never silent: it raises SaveFailed, on every rank, at the next call at the latest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import hal
from hal import Comm, HalError, Solo

from .checkpoint import LATEST, MANIFEST, file_checksum, folder_of, prune, state_checksum, told, tracked
from .files import beside, make_folder, new_token, publish, write_text
from .parallel.pieces import Piece


class SaveFailed(HalError):
    """A checkpoint could not be written; those before it are whole."""


class _Written(list):  # type: ignore[type-arg]
    """A rank's WriteResults on their way to the lead, with the checksums of the files it wrote."""

    sums: dict[str, str]


class _Writer(dcp.FileSystemWriter):
    """Each rank writes and sums up its own files in `folder`; when all have, `publish(sums)` is called on the lead.

    torch passes on what fails in that call, or on any rank, so all ranks have a checkpoint or all have the error.
    """

    def __init__(self, folder: Path, publish: Callable[[dict[str, str]], None]) -> None:
        super().__init__(folder)
        self.folder, self.publish = folder, publish

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies in host memory, for a save in the background; training goes on in the originals."""
        return {name: x.copied() if isinstance(x, Piece) else _copied(x) for name, x in state_dict.items()}

    def prepare_local_plan(self, plan: Any) -> Any:
        make_folder(self.folder)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = _Written(super().write_data(plan, planner).wait())
        written.sums = {p.name: file_checksum(p) for p in sorted(self.folder.glob(f"{plan.storage_data.prefix}*"))}
        result: torch.futures.Future[Any] = torch.futures.Future()
        result.set_result(written)
        return result

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        sums = {name: checksum for written in results for name, checksum in written.sums.items()}
        self.publish({**sums, ".metadata": file_checksum(self.folder / ".metadata")})


def _copied(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())


class Saver:
    """Writes checkpoints, one after the other. Every rank of `world` has one and calls its methods alike.

    background: `save` returns when the tensors are copied; `finished` and `wait` tell of the rest, and raise SaveFailed
    if it failed, CollectiveTimeout if a rank stayed away. keep: how many checkpoints stay (None: all). timeout: seconds
    for a rank to wait for the others.
    """

    def __init__(
        self, world: Comm | None = None, *, background: bool = False, keep: int | None = None, timeout: float = 600.0
    ) -> None:
        self.world, self.background, self.keep = world or Solo(), background, keep
        self._timeout, self._own_group = timeout, None
        self._under_way: tuple[Path, _Writer, Future[Any]] | None = None
        self._finished: list[Path] = []

    def save(
        self, root: Path, iteration: int | str, tensors: Mapping[str, Tensor | Piece], state: Mapping[str, Any]
    ) -> Path:
        """Makes `tensors` (by name; on many ranks the pieces that this one writes) and `state` (JSON) the latest
        checkpoint of `root`, and returns its folder. A save still under way is waited for."""
        self.wait()
        folder, lead = folder_of(root, iteration), self.world.rank == 0
        if lead:
            _make_room(root, iteration)
        exists, token = told(self.world, [int(folder.exists()), new_token()])
        if exists:
            if lead:
                write_text(root / LATEST, f"{iteration}\n")
            return folder
        state = dict(state)

        def complete(sums: dict[str, str]) -> None:
            _publish(writer.folder, folder, iteration, state, sums)
            if self.keep is not None:
                prune(root, self.keep)

        writer = _Writer(beside(folder, token), complete)
        how: dict[str, Any] = {"storage_writer": writer, "no_dist": self.world.size == 1}
        if not self.background:
            self._conclude(folder, writer, lambda: dcp.save(dict(tensors), **how))
        else:
            saving: Any = dcp.async_save(dict(tensors), **how, process_group=self._group())
            self._under_way = folder, writer, saving
        return folder

    def finished(self) -> list[Path]:
        """The checkpoints that have become whole since the last call; does not wait for more."""
        if self._under_way is not None and self._under_way[2].done():
            self.wait()
        done, self._finished = self._finished, []
        return done

    def wait(self) -> None:
        """Returns when no save is under way."""
        if self._under_way is not None:
            (folder, writer, saving), self._under_way = self._under_way, None
            self._conclude(folder, writer, saving.result)

    def _group(self) -> Any:
        """A process group for the background: what training sends meanwhile must not mix with it."""
        if self.world.size > 1 and self._own_group is None:
            comm = hal.torch_comm(hal.GLOO, timeout=self._timeout)
            assert isinstance(comm, hal.TorchComm)
            self._own_group = comm.group
        return self._own_group

    def _conclude(self, folder: Path, writer: _Writer, run: Callable[[], Any]) -> None:
        try:
            run()
        except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
            if self.world.rank == 0:
                shutil.rmtree(writer.folder, ignore_errors=True)
            lost = None
            if isinstance(error, RuntimeError):
                lost = hal.engine_failure(error, f"save of {folder.name}", self._timeout)
            if lost is not None:
                raise lost from error
            raise SaveFailed(
                f"the checkpoint {folder} could not be written: {_cause(error)}. {_space(folder)}What was saved "
                "before it is whole: make room (or give another --save) and continue with --load"
            ) from error
        self._finished.append(folder)


def save(root: Path, iteration: int | str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """As Saver.save of one process."""
    return Saver().save(root, iteration, tensors, state)


def _cause(error: BaseException) -> str:
    failures = error.failures if isinstance(error, dcp.api.CheckpointException) else {}
    for rank, (first, _) in failures.items():
        return f"{first or type(first).__name__}" + (f" (rank {rank})" if len(failures) > 1 or rank else "")
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _space(folder: Path) -> str:
    """A sentence if the disk is full: what torch says of it is about its file format."""
    free = shutil.disk_usage(folder.parent).free if folder.parent.is_dir() else None
    return f"Its disk has {free / 2**20:.1f} MiB left. " if free is not None and free < 64 << 20 else ""


def _make_room(root: Path, iteration: int | str) -> None:
    make_folder(root)
    for leftover in root.glob(".*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    folder = folder_of(root, iteration)
    if folder.exists() and tracked(root) != iteration:
        # Renamed into place by a run that was killed before it could name it: nobody refers to it.
        shutil.rmtree(folder)


def _publish(new: Path, folder: Path, iteration: int | str, state: dict[str, Any], sums: dict[str, str]) -> None:
    manifest = {"state": state, "sha256": {**sums, MANIFEST: state_checksum(state)}}
    (new / MANIFEST).write_text(json.dumps(manifest))
    publish(new, folder)
    write_text(folder.parent / LATEST, f"{iteration}\n")
