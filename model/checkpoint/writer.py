"""Writes checkpoints atomically, optionally in the background.

All ranks write into a temporary folder, which is flushed and renamed. The tracker file is updated only after that. A
failed save raises SaveFailed on every rank, at the latest at the next call.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import hal
from hal import Comm, HalError, SingleRankComm

from ..common.atomic_files import beside, make_folder, new_token, publish, write_text
from ..config.schema import ConfigError
from .dcp import ALONE, save_alone
from .lineage import holds, prune
from .reader import (
    LATEST,
    MANIFEST,
    broadcast_integers,
    file_checksum,
    folder_of,
    state_checksum,
    tracked,
)
from .sharded_tensor import DeferredTensor, LocalShard


class SaveFailed(HalError):
    """A checkpoint could not be written; earlier ones are intact."""


class _Written(list):  # type: ignore[type-arg]
    """A rank's WriteResults, with the checksums of the files that it wrote, as sent to the coordinator."""

    sums: dict[str, str]


class _Writer(FileSystemWriter):
    """Each rank writes its own files in `folder` and computes their checksums; then the coordinator calls `publish`.

    torch propagates an error in that call, or on any rank, to all ranks: either all have a checkpoint or all raise.
    """

    def __init__(self, folder: Path, publish: Callable[[dict[str, str]], None], *, single_file: bool) -> None:
        # torch keeps all tensors of a file in memory until the file is complete.
        super().__init__(folder, single_file_per_rank=single_file)
        self.folder, self.publish = folder, publish

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies in host memory for a background save, so that training can modify the originals."""
        return {name: x.copied() if isinstance(x, LocalShard) else _copied(x) for name, x in state_dict.items()}

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
    """Writes checkpoints, one after the other. Every rank of `world` has a Saver and calls the same methods.

    background: `save` returns when the tensors are copied; `finished` and `wait` report completion, and raise
    SaveFailed if the save failed, CollectiveTimeout if a rank did not take part. keep: number of checkpoints to keep
    (None: all). timeout: seconds to wait for the other ranks.
    """

    def __init__(
        self, world: Comm | None = None, *, background: bool = False, keep: int | None = None, timeout: float = 600.0
    ) -> None:
        self.world, self.background, self.keep = world or SingleRankComm(), background, keep
        self._timeout = timeout
        self._own_group: torch.distributed.ProcessGroup | None = None
        self._in_progress: tuple[Path, _Writer, Future[Any]] | None = None
        self._finished: list[Path] = []

    def save(
        self, root: Path, iteration: int | str, tensors: Mapping[str, Tensor | LocalShard], state: Mapping[str, Any]
    ) -> Path:
        """Writes `tensors` (by name; this rank's shards; deferred ones to a file each, so that one at a time is in
        memory) and `state` (JSON) as the latest checkpoint of `root`, and
        returns its folder. Waits first for a save that is still in progress."""
        self.wait()
        folder, root_rank = folder_of(root, iteration), self.world.rank == 0
        if root_rank:
            _make_room(root, iteration, state)
        exists, token = broadcast_integers(self.world, [int(folder.exists()), new_token()])
        if exists:
            if root_rank:
                write_text(root / LATEST, f"{iteration}\n")
            return folder
        state = dict(state)

        def complete(sums: dict[str, str]) -> None:
            _publish(writer.folder, folder, iteration, state, sums)
            if self.keep is not None:
                prune(root, self.keep, state)

        deferred = any(isinstance(x, DeferredTensor) for x in tensors.values())
        writer = _Writer(beside(folder, token), complete, single_file=not deferred)
        alone = self.world.size == 1
        if self.background:
            options = ALONE if alone else {"process_group": self._group()}
            saving: Any = saver.async_save(dict(tensors), storage_writer=writer, **options)
            self._in_progress = folder, writer, saving
        elif alone:
            self._conclude(folder, writer, lambda: save_alone(tensors, writer))
        else:
            self._conclude(folder, writer, lambda: saver.save(dict(tensors), storage_writer=writer))
        return folder

    def finished(self) -> list[Path]:
        """The checkpoints completed since the last call. Does not wait."""
        if self._in_progress is not None and self._in_progress[2].done():
            self.wait()
        done, self._finished = self._finished, []
        return done

    def wait(self) -> None:
        """Returns when no save is in progress."""
        if self._in_progress is not None:
            (folder, writer, saving), self._in_progress = self._in_progress, None
            self._conclude(folder, writer, saving.result)

    def _group(self) -> Any:
        """A separate process group for background saves, so that their messages cannot interleave with training's."""
        if self.world.size > 1 and self._own_group is None:
            comm = hal.torch_comm(hal.GLOO, timeout=self._timeout)
            assert isinstance(comm, hal.TorchComm)
            self._own_group = comm.group
        return self._own_group

    def _conclude(self, folder: Path, writer: _Writer, run: Callable[[], Any]) -> None:
        try:
            run()
        except (CheckpointException, OSError, RuntimeError) as error:
            if self.world.rank == 0:
                shutil.rmtree(writer.folder, ignore_errors=True)
            if isinstance(error, RuntimeError):
                collective_failure = hal.engine_failure(error, f"save of {folder.name}", self._timeout)
                if collective_failure is not None:
                    raise collective_failure from error
            raise SaveFailed(
                f"the checkpoint {folder} could not be written: {_cause(error)}. {_space(folder)}Earlier checkpoints "
                "are intact: free some space (or give another --save) and resume with --load"
            ) from error
        self._finished.append(folder)


def save(root: Path, iteration: int | str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Saver.save in a single process."""
    return Saver().save(root, iteration, tensors, state)


def _cause(error: BaseException) -> str:
    failures = error.failures if isinstance(error, CheckpointException) else {}
    for rank, (first, _) in failures.items():
        return f"{first or type(first).__name__}" + (f" (rank {rank})" if len(failures) > 1 or rank else "")
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _space(folder: Path) -> str:
    """A note if the disk is almost full, because torch's error does not mention that."""
    free = shutil.disk_usage(folder.parent).free if folder.parent.is_dir() else None
    return f"Its disk has {free / 2**20:.1f} MiB left. " if free is not None and free < 64 << 20 else ""


def _make_room(root: Path, iteration: int | str, state: Mapping[str, Any]) -> None:
    make_folder(root)
    for leftover in root.glob(".*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    folder = folder_of(root, iteration)
    if folder.exists() and (_tracked(root) != iteration or not holds(folder, state)):
        # A run was killed after the rename and before the tracker file named the folder, or has gone back before it,
        # perhaps because it is damaged.
        shutil.rmtree(folder)


def _tracked(root: Path) -> int | str | None:
    try:
        return tracked(root)
    except ConfigError:  # damaged; replaced by this save
        return None


def _publish(new: Path, folder: Path, iteration: int | str, state: dict[str, Any], sums: dict[str, str]) -> None:
    manifest = {"state": state, "sha256": {**sums, MANIFEST: state_checksum(state)}}
    (new / MANIFEST).write_text(json.dumps(manifest))
    publish(new, folder)
    write_text(folder.parent / LATEST, f"{iteration}\n")
