"""The operations of torch (aten) that a device needs besides HAL's ops: one small call of each, and a check of them.

aten_ops.json lists the operations that the trainer, generation and checkpoints run on the device; aten_recorder.py
writes it. No model is needed to check a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from hal.core.backend import Backend

LIST = Path(__file__).with_name("aten_ops.json")
UNINITIALISED = ("empty", "new_empty")
"""Beginnings of the names of operations whose results have no particular values."""


@dataclass(frozen=True)
class AtenFinding:
    """Whether one operation runs on the device and has the values that it has on the host; `error` if not."""

    name: str
    ok: bool
    error: str = ""


def listed() -> dict[str, dict[str, Any]]:
    """Operation, with its overload -> {"used by": list of phases, "args": ..., "kwargs": ...} of its smallest call."""
    operations: dict[str, dict[str, Any]] = json.loads(LIST.read_text())
    return operations


def check_aten(backend: Backend) -> list[AtenFinding]:
    """Runs every listed operation once on the backend's device, and compares its result with that on the host.

    Operations whose recorded call needs a dtype that the device does not have are left out.
    """
    device, dtypes, findings = backend.device(backend.local_index()), backend.capabilities().dtypes, []
    for name, call in listed().items():
        if all(dtype in dtypes for dtype in _dtypes(call)):
            findings.append(_check(name, call, device, backend.synchronize))
    return findings


def _dtypes(call: Any) -> list[torch.dtype]:
    return [x for x in tree_iter(tree_map(_as_dtype, call)) if isinstance(x, torch.dtype)]


def _as_dtype(value: Any) -> Any:
    return getattr(torch, value, None) if isinstance(value, str) else None


def _check(name: str, call: dict[str, Any], device: torch.device, synchronize: Callable[[], None]) -> AtenFinding:
    packet, overload = name.split(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload)
    host = torch.device("cpu")
    expected = operation(*decode(call["args"], host), **decode(call["kwargs"], host))
    try:
        result = operation(*decode(call["args"], device), **decode(call["kwargs"], device))
        synchronize()
        result = tree_map(lambda x: x.to(host) if isinstance(x, Tensor) else x, result)
        for y, r in zip(tree_iter(result), tree_iter(expected)):
            if isinstance(r, Tensor) and packet.startswith(UNINITIALISED):
                y, r = torch.empty_like(y, device="meta"), torch.empty_like(r, device="meta")
            # Wide enough for a product of a few numbers in 16 bits; wrong values differ by their own size.
            torch.testing.assert_close(y, r, rtol=2e-2, atol=2e-2, check_stride=False)
    except Exception as error:
        return AtenFinding(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return AtenFinding(name, True)


def encode(value: Any, on_device: Callable[[Tensor], bool]) -> Any:
    """An argument of an operation as JSON; of tensors only the shape, strides and dtype."""
    if isinstance(value, Tensor):
        described: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if not value.is_contiguous():
            described["strides"] = list(value.stride())
        return described if on_device(value) else {**described, "host": True}
    if isinstance(value, (list, tuple)):
        return [encode(v, on_device) for v in value]
    if isinstance(value, dict):
        return {k: encode(v, on_device) for k, v in value.items()}
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"place": "host" if value.type == "cpu" else "device"}
    return value


def decode(value: Any, device: torch.device) -> Any:
    """The argument that `encode` describes, with deterministic values. Integers are 0, which is a valid index."""
    if isinstance(value, list):
        return [decode(v, device) for v in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value:
        return _tensor(value).to("cpu" if "host" in value else device)
    if "place" in value:
        return torch.device("cpu") if value["place"] == "host" else device
    if "torch" in value:
        return getattr(torch, value["torch"])
    return {k: decode(v, device) for k, v in value.items()}


def _tensor(described: dict[str, Any]) -> Tensor:
    dtype, shape = getattr(torch, described["dtype"]), described["shape"]
    strides = described.get("strides")
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if strides else int(torch.Size(shape).numel())
    generator = torch.Generator().manual_seed(count)
    values = torch.rand(count, generator=generator) + 0.5 if dtype.is_floating_point else torch.arange(count) % 2
    values = values.to(dtype) if dtype.is_floating_point or dtype is torch.bool else values.zero_().to(dtype)
    return values.as_strided(shape, strides) if strides else values.view(shape)
