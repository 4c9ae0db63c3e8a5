"""Stock megatron-core (from PyPI, extra `megatron`) on any HAL backend.

`with hal_device():` routes the torch names it uses to the active backend; `gpt_layer_spec` and `HalSpecProvider` make
its GPTModel run on HAL's ops; `hal_ops()` does so where megatron-core takes no spec. Importing this package imports
neither megatron-core nor a device.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "CORE": "routing",
    "hal_device": "routing",
    "hal_ops": "placing",
    "join_world": "world",
    "HalSpecProvider": "spec",
    "get_gpt_layer_hal_spec": "spec",
    "gpt_block_spec": "spec",
    "gpt_layer_spec": "spec",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """The public names, each from its own file: most of them import megatron-core, which takes seconds."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept, for megatron-core's --spec looks into the module's dictionary after asking for the name.
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    return value
