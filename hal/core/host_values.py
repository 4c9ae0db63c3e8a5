"""Copies from the host that do not wait for the device, and contents of device tensors that the host knows."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .torch_versions import accelerator

_known: MutableMapping[Tensor, tuple[int, Any]] = WeakIdKeyDictionary()
"""Tensor on a device -> (its version when its content was known, the content as a list)."""


def to_device(x: Tensor, device: torch.device, *, known: bool = False) -> Tensor:
    """x, a tensor of the host (any shape and dtype), on `device`.

    A copy from ordinary host memory waits for all work of the device; one from pinned memory, which torch has for its
    accelerator only, is queued like other work. known: backends that need the values on the host, such as the lengths
    of packed sequences, get them without reading the copy, until it is changed.
    """
    if accelerator() != device.type:
        copy = x.to(device)
    else:
        copy = x.pin_memory().to(device, non_blocking=True)
    if known and copy.device.type != "cpu" and not copy.is_inference():
        _known[copy] = (copy._version, x.tolist())
    return copy


def host_value(x: Tensor) -> Any:
    """`x.tolist()`; of a tensor on a device, which has to be waited for, read again only after x has changed, and not
    at all if `hal.to_device(..., known=True)` has made it."""
    if x.device.type == "cpu" or x.is_inference():  # nothing to wait for; and inference tensors count no versions
        return x.tolist()
    content = _known.get(x)
    if content is None or content[0] != x._version:
        _known[x] = content = (x._version, x.tolist())
    return content[1]
