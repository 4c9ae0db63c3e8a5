"""In which order attention's implementations are tried, by device.

An entry is a measurement (`make gpu` writes the report that it comes from); a device that nobody has measured gets the
default, which is an estimate.
"""

from __future__ import annotations

DEFAULT = ("cuda/flash", "cuda/cudnn", "cuda/sdpa", "cuda/flex", "cuda/unfused")
"""Not measured yet, on any device: windows and GQA without a bias first, float32 and masks next, everything last."""

MEASURED: dict[str, tuple[str, ...]] = {}
"""Device name as torch reports it -> ids, fastest first."""


def order_for(device_name: str) -> tuple[str, ...]:
    """The ids in the order for this device."""
    return MEASURED.get(device_name, DEFAULT)


def source_for(device_name: str) -> str:
    """Where the order for this device comes from, for `hal why`."""
    if device_name in MEASURED:
        return f"measured on {device_name}"
    return f"an estimate; {device_name} was not measured (`make gpu` does)"
