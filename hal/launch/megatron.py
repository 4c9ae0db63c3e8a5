"""Runs scripts of megatron-core and Megatron-LM under `hal launch` on HAL: those that import `megatron.core`.

From that import on, however it happens (in the script, with -m, through runpy or another module), the script runs on
the backend that was given to the launcher.
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

CORE, TRAINING = "megatron.core", "megatron.training"
SAVER = "saver_base"
"""The module of Megatron-LM's tools/checkpoint/convert.py that writes checkpoints."""


def mark_path(folder: Path) -> Path:
    """A file that exists in a job's folder once one of its processes has imported `megatron.training`."""
    return folder / "megatron"


@contextlib.contextmanager
def routed_when_imported(mark: Path) -> Iterator[None]:
    """A context for a launched script. When it imports `megatron.core`, device calls are redirected to the backend
    (HAL_BACKEND), by `hal.model.megatron.scripts.running_core`, until the context ends; when it imports
    `megatron.training`, which creates `mark`, `running_training` is entered as well. The import of `saver_base` raises
    what `refuse_converter` raises. Without a chosen backend nothing happens.
    """
    if "HAL_BACKEND" not in os.environ:
        yield
        return
    with contextlib.ExitStack() as stack:
        finder = _Routing(stack, mark)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)


class _Routing(MetaPathFinder):
    """Finds the packages with the other finders, and enters their contexts once they have been imported."""

    def __init__(self, stack: contextlib.ExitStack, mark: Path) -> None:
        self.stack, self.mark = stack, mark
        self.awaited = {CORE, TRAINING, SAVER}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        specs = (other.find_spec(name, path, target) for other in sys.meta_path if other is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        if name == SAVER and Path(spec.origin or "").parent.name != "checkpoint":
            return spec  # another program's
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if name == TRAINING:
                importlib.import_module(CORE)
                self._enter(CORE)  # if it had been imported before this script ran
            load(module)
            # Not before the module runs, because a script may look for it without loading it, or retry a failed import.
            self._enter(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _enter(self, name: str) -> None:
        if name not in self.awaited:
            return
        self.awaited.discard(name)
        scripts = importlib.import_module("hal.model.megatron.scripts")
        if name == CORE:
            self.stack.enter_context(scripts.running_core(sys.argv))
        elif name == SAVER:
            scripts.refuse_converter()
        else:
            self.stack.enter_context(scripts.running_training())
            self.mark.touch()
