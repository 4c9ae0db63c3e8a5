"""Runs Megatron-LM's scripts under `hal launch` on HAL; a script is one of them if it imports `megatron.training`.

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

TRAINING = "megatron.training"


def mark_path(folder: Path) -> Path:
    """A file that exists in a job's folder once one of its processes has imported `megatron.training`."""
    return folder / "megatron"


@contextlib.contextmanager
def routed_when_imported(mark: Path) -> Iterator[None]:
    """A context for a launched script: on import of `megatron.training`, enters `running_script` and creates `mark`.

    `hal.model.megatron.scripts.running_script` routes megatron-core to the backend (HAL_BACKEND) until the context
    ends. Without a chosen backend nothing happens.
    """
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
    """Advice for a failed script that used megatron-core without routing it to the backend; else ""."""
    unrouted = "megatron.core" in sys.modules and "hal.model.megatron.cuda_patches" not in sys.modules
    if "HAL_BACKEND" not in os.environ or not unrouted:
        return ""
    return (
        "hal launch: this script uses megatron.core but neither megatron.training nor hal.model.megatron's "
        "hal_device(), so that megatron-core uses an NVIDIA device; see docs/megatron.md\n"
    )


class _Once(MetaPathFinder):
    """Finds `megatron.training` with the other finders, and loads it inside `running_script`, once."""

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
        specs = (other.find_spec(name, path, target) for other in sys.meta_path if other is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            scripts = importlib.import_module("hal.model.megatron.scripts")
            self.stack.enter_context(scripts.running_script(sys.argv, lambda: load(module)))
            self.mark.touch()
            self.retire()  # only now: a script may look for the module without loading it, or retry a failed import

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
