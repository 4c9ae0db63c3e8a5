"""Checks that a probe is pure: two calls return the same result, raise nothing, and do not initialise the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hal.core.backend import Probe
from hal.core.registry import load, make
from hal.errors import HalError


class ProbeFailure(HalError):
    """A probe that is not pure."""


def check_probe(name: str, options: Mapping[str, Any] | None = None) -> Probe:
    """Probes a fresh instance of the backend `name` twice. Raises ProbeFailure, or what loading the backend raises.

    Must be called before the process uses the backend in any other way, because it compares which of torch's device
    modules (torch.cuda, torch.xpu, a PrivateUse1 module, ...) are initialised before and after.
    """
    load(name)  # loaded first, because importing may initialise a device module, but constructing and probing must not
    before = _initialised()
    backend = make(name, options)
    try:
        first, second = backend.probe(), backend.probe()
    except Exception as error:
        raise ProbeFailure(
            f"probe of backend '{name}' raised {type(error).__name__}: {error}. It must return Probe(ok=False, ...)."
        ) from error
    if not isinstance(first, Probe):
        raise ProbeFailure(f"probe of backend '{name}' returned {type(first).__name__}, not hal.Probe")
    if first != second:
        raise ProbeFailure(f"probe of backend '{name}' is not pure: it said {first}, then {second}")
    if not first.reason.strip() or first.ok != (first.count > 0):
        raise ProbeFailure(
            f"probe of backend '{name}' must give a reason, and ok exactly if count > 0; it gave {first}"
        )
    initialised = _initialised() - before
    if initialised:
        raise ProbeFailure(f"probe of backend '{name}' initialised the device ({', '.join(sorted(initialised))})")
    return first


def _initialised() -> set[str]:
    """Names of torch's device modules that are initialised."""
    custom = torch._C._get_privateuse1_backend_name()
    modules = {n: getattr(torch, n, None) for n in ("cuda", "xpu", "mtia", custom) if n}
    return {n for n, m in modules.items() if m is not None and getattr(m, "is_initialized", lambda: False)()}
