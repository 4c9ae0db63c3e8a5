"""Which checkpoints of a folder led to the present state of a run, and which the run has abandoned by going back.

The lineage in a checkpoint's state lists the runs that led to it, first the one that began at iteration 0: for each, a
random id and the iteration at which it began. Every resumption appends an entry, so that the checkpoints that a run
wrote before it was resumed from an older one is distinguishable from its ancestors.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hal import HalError

from .reader import folder_of, iterations, read_manifest

Lineage = list[list[Any]]


def begin(before: Mapping[str, Any] | None = None) -> Lineage:
    """The lineage of a run that continues from a checkpoint with the state `before`, or starts anew."""
    entries, iteration = ([], 0) if before is None else (lineage_of(before), before["iteration"])
    return [*entries, [secrets.token_hex(6), iteration]]


def lineage_of(state: Mapping[str, Any]) -> Lineage:
    """The lineage in a checkpoint's state; empty if it has none (checkpoints of earlier versions, conversions)."""
    entries = state.get("lineage")
    valid = isinstance(entries, list) and all(
        isinstance(e, list) and len(e) == 2 and isinstance(e[0], str) and type(e[1]) is int for e in entries
    )
    return entries if valid and entries is not None else []


def led_to(state: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with `state` is `later` or one that it continues."""
    old, new = lineage_of(state), lineage_of(later)
    n = len(old)
    last = new[n][1] if n < len(new) else later["iteration"]
    return 0 < n <= len(new) and old == new[:n] and state["iteration"] <= last


def same_run(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two checkpoints go back to the same start at iteration 0."""
    return lineage_of(state)[:1] == lineage_of(other)[:1] != []


def foreign(root: Path, state: Mapping[str, Any]) -> list[int]:
    """The iterations, from that of `state` on, of which `root` has a checkpoint of another run."""
    later = []
    for iteration, other in _states(root):
        if iteration >= state["iteration"] and lineage_of(other) and not same_run(other, state):
            later.append(iteration)
    return later


def holds(folder: Path, state: Mapping[str, Any]) -> bool:
    """Whether an existing checkpoint has this `state`, so that it need not be written again.

    A run that went back because a checkpoint was damaged, or was told to, arrives at its iteration again, and must
    replace it.
    """
    entries = lineage_of(state)
    if not entries or entries[-1][1] == state["iteration"]:  # of unknown origin, or unchanged since it was loaded
        return True
    try:
        return led_to(read_manifest(folder)["state"], state)
    except (HalError, OSError):
        return False


def _states(root: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(iteration, state) of the checkpoints whose manifests can be read, in ascending order."""
    for iteration in iterations(root):
        with contextlib.suppress(HalError, OSError):
            yield iteration, read_manifest(folder_of(root, iteration))["state"]


def prune(root: Path, keep: int, state: Mapping[str, Any]) -> None:
    """Removes all but the `keep` newest of the checkpoints that led to `state`, and those that its run has abandoned
    and passed. Checkpoints of other runs, and folders without a readable manifest, stay."""
    ancestors = []
    for iteration, old in list(_states(root)):
        if led_to(old, state):
            ancestors.append(folder_of(root, iteration))
        elif same_run(old, state) and iteration <= state["iteration"]:
            shutil.rmtree(folder_of(root, iteration))
    for folder in ancestors[: len(ancestors) - keep]:
        shutil.rmtree(folder)
