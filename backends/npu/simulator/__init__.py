"""Libraries that simulate AscendCL, the aclnn operators and HCCL on the CPU, below the unmodified torch_npu.

`start()` builds and loads them before torch_npu is imported, so that the wheel finds its symbols in the process; no
environment variable is read or set. docs/npu-simulator.md describes what the simulation covers and what it does not.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from hal import BackendUnavailable, HalError

from . import build

FAULTS = ("oom", "stream", "hccl_timeout", "slow_rank")
COUNTERS = ("operators", "device_to_host", "host_to_device", "host_waits", "deterministic")
SETTINGS = {
    "devices": 8,
    "memory_bytes": 61 << 30,
    "poison": 0,
    "hccl_timeout_ms": 0,
    "slow_rank_ms": 0,
    "cores": 3,
    "tile": 32,
}
"""Setting -> default. memory_bytes is per device (0: the default), hccl_timeout_ms overrides HCCL_EXEC_TIMEOUT.

cores: among how many the rows of a sum are divided. tile: rows and columns of a tile of attention, and the summands of
a product that are added at once. Both are smaller than those of a device (tiles of 128), so that small tensors, too,
are divided and have an incomplete last part."""


class Simulator:
    """The loaded libraries of this process. There is at most one; `start` returns it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        libraries = [ctypes.CDLL(str(directory / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in build.LIBRARIES]
        self._set = libraries[0].halsim_set
        self._set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        self._set.restype = None
        self._count = libraries[0].halsim_count
        self._count.argtypes, self._count.restype = [ctypes.c_int], ctypes.c_int64

    def set(self, name: str, value: int) -> None:
        """Changes a setting (see SETTINGS) for all later calls."""
        if name not in SETTINGS:
            raise HalError(f"the NPU simulator has no setting {name!r}; it has {', '.join(SETTINGS)}")
        self._set(name.encode(), value)

    def counters(self) -> dict[str, int]:
        """What this process has asked of its devices so far: "operators" executed, copies "device_to_host" and
        "host_to_device", "host_waits", the calls in which the host waited for a stream, an event or a device, and
        "deterministic", the operators that were started while CANN's deterministic mode was on."""
        return {name: self._count(i) for i, name in enumerate(COUNTERS)}

    def inject(self, fault: str, nth: int = 1) -> None:
        """Makes the `nth` operation of the fault's kind fail; 0 disarms it.

        oom: an allocation and all later ones (because the caching allocator retries), until disarmed. stream: a task
        on a stream (an AI core exception). hccl_timeout: a collective, as if a peer were missing. slow_rank: a
        collective, which then starts after `slow_rank_ms`.
        """
        if fault not in FAULTS:
            raise HalError(f"the NPU simulator has no fault {fault!r}; it has {', '.join(FAULTS)}")
        self._set(f"fault.{fault}".encode(), nth)


_running: Simulator | None = None


def running() -> Simulator | None:
    """The simulator of this process, if `start` was called."""
    return _running


def start(**settings: int) -> Simulator:
    """Builds (once per machine) and loads the simulated libraries; `settings` as in SETTINGS.

    Raises BackendUnavailable when they cannot be built, or when torch_npu was imported before (it is then bound to
    the libraries it found); HalError for an unknown setting.
    """
    global _running
    if _running is None:
        if "torch_npu" in sys.modules:
            raise BackendUnavailable(
                "torch_npu was imported before the simulator; call hal.use('npu', simulate=True) first"
            )
        _running = Simulator(build.ensure_built())
    for name, value in settings.items():
        _running.set(name, value)
    return _running
