"""The order in which attention's implementations are tried, by device.

An entry is a measurement (from the report of `make gpu`); devices without a measurement get the default, an estimate.
"""

from __future__ import annotations

DEFAULT = ("cuda/flash", "cuda/cudnn", "cuda/sdpa", "cuda/flex", "cuda/unfused")
"""An estimate, not measured on any device: kernels with windows and GQA first, then those with float32 and masks, and
last the one that accepts every call."""

MEASURED: dict[str, tuple[str, ...]] = {}
"""Device name as torch reports it -> ids, fastest first."""


def order_for(device_name: str) -> tuple[str, ...]:
    """The ids in order of preference on this device."""
    return MEASURED.get(device_name, DEFAULT)


def source_for(device_name: str) -> str:
    """The origin of the order for this device, for `hal why`."""
    if device_name in MEASURED:
        return f"measured on {device_name}"
    return f"an estimate; {device_name} was not measured (`make gpu` does)"
