"""Lazy imports of megatron-core's datasets, without their warnings.

The import takes some seconds and warns about accelerator packages that datasets do not use.
"""

from __future__ import annotations

import warnings
from types import ModuleType

from ..common.optional_packages import optional_package


def _import(name: str) -> ModuleType:
    import importlib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with optional_package("training data needs megatron-core, which cannot be imported", "torch-hal[train]"):
            return importlib.import_module(f"megatron.core.datasets.{name}")


def indexed_dataset() -> ModuleType:
    """megatron.core.datasets.indexed_dataset."""
    return _import("indexed_dataset")


def gpt_dataset() -> ModuleType:
    """megatron.core.datasets.gpt_dataset."""
    return _import("gpt_dataset")


def helpers() -> ModuleType:
    """megatron.core.datasets.helpers."""
    return _import("helpers")
