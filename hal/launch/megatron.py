"""Megatron-LM's scripts under `hal launch`: importing `megatron.training` is what tells them from others.

However a script comes to that import (by itself, with -m, through runpy or another module), from there to its end it
runs on the backend that the launcher was given.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

TRAINING = "megatron.training"


def mark_path(folder: Path) -> Path:
    """What a job's folder holds as soon as one of its processes has turned out to run a Megatron-LM script."""
    return folder / "megatron"


@contextlib.contextmanager
def routed_when_imported(mark: Path) -> Iterator[None]:
    """What a launched script runs in: if it imports `megatron.training`, on a chosen backend (HAL_BACKEND), then in
    `hal.model.megatron.scripts.running_script`, and `mark` is left. Whatever was routed is undone at the end."""
    if "HAL_BACKEND" not in os.environ:
        yield
        return
    with contextlib.ExitStack() as stack:
        finder = _Once(stack, mark)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            finder.retire()


def hint() -> str:
    """What to say when a script failed that used megatron-core and had nothing routed; else nothing."""
    unrouted = "megatron.core" in sys.modules and "hal.model.megatron.routing" not in sys.modules
    if "HAL_BACKEND" not in os.environ or not unrouted:
        return ""
    return (
        "hal launch: this script uses megatron.core but neither megatron.training nor hal.model.megatron's "
        "hal_device(), so that megatron-core asks for an NVIDIA device; see docs/megatron.md\n"
    )


class _Once(MetaPathFinder):
    """Finds `megatron.training` as the other finders do, and loads it inside `running_script`, once."""

    def __init__(self, stack: contextlib.ExitStack, mark: Path) -> None:
        self.stack, self.mark = stack, mark

    def retire(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRAINING:
            return None
        found = (other.find_spec(name, path, target) for other in sys.meta_path if other is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            scripts = importlib.import_module("hal.model.megatron.scripts")
            self.stack.enter_context(scripts.running_script(sys.argv, lambda: load(module)))
            self.mark.touch()
            self.retire()  # not before: whoever only asks whether it is there, or fails to import it, may come again

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
