"""Runs unmodified megatron-core (from PyPI, extra `megatron`) on any HAL backend.

`with hal_device():` redirects the torch.cuda names that it uses to the active backend; `gpt_layer_spec` and
`HalSpecProvider` build its GPTModel from HAL's ops; `hal_ops()` replaces the parts that megatron-core does not build
from a spec. Importing this package imports neither megatron-core nor a vendor package.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "CORE": "cuda_patches",
    "hal_device": "cuda_patches",
    "hal_ops": "op_patches",
    "join_world": "init_distributed",
    "HalSpecProvider": "spec",
    "get_gpt_layer_hal_spec": "spec",
    "gpt_block_spec": "spec",
    "gpt_layer_spec": "spec",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name from its module on first use: most modules import megatron-core, which takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Cached, because megatron-core's --spec reads the module's dictionary after this.
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
