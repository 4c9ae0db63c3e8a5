"""The cpu_ref backend: this machine's processors, with kernels in C.

Like a GPU's caching allocator, it keeps freed memory in the process by default, because page faults cost more than most
kernels. Memory figures are the resident set size of the process, because torch's CPU allocator has no statistics.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import hal

from . import build, cpu, memory, prebuilt
from .comm import SharedMemoryComm

_SIMD = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "asimdhp", "bf16", "sve"}


class CpuRef(hal.Backend):
    """One device: all processors, used by torch.get_num_threads() threads.

    keep_memory: freed memory stays in the process for later tensors (a process-wide setting of glibc's malloc, made
        when the backend is built), and large results are plain malloc blocks, whose storage cannot be resized
        (memory.py). False disables both. If any MALLOC_* variable is set, malloc's settings are not changed.
    shared_memory: ranks of one machine communicate through shared memory; False: through gloo's sockets.
    """

    name = "cpu_ref"
    device_specs = (
        hal.DeviceSpec(
            "server-64-cores",
            memory=512 * 2**30,
            flops={"fp32": 64 * 64 * 2.5e9, "bf16": 2 * 64 * 64 * 2.5e9},
            memory_bandwidth=460.8e9,
            node_link=25e9,
            network=25e9,
            per_node=1,
            source="no product: 64 cores x two 512-bit multiply-adds x 2.5 GHz, 12 channels of DDR5-4800, 200 Gbit/s",
        ),
    )

    def __init__(self, *, keep_memory: bool = True, shared_memory: bool = True) -> None:
        self.keep_memory = keep_memory
        self.shared_memory = shared_memory

    def probe(self) -> hal.Probe:
        if importlib.util.find_spec("cffi") is None:
            return hal.Probe(False, 0, "Python package cffi is not installed; install it with: pip install cffi")
        variant = prebuilt.variant()
        try:
            compiler = build.find_compiler()[0] if variant is None else f"none needed: prebuilt for {variant.name}"
        except hal.BackendUnavailable as error:
            return hal.Probe(False, 0, str(error))
        facts = {
            "compiler": compiler,
            "cpu": cpu.model(),
            "threads": str(torch.get_num_threads()),
            "simd": ", ".join(sorted(_SIMD & cpu.features())) or "baseline",
        }
        return hal.Probe(True, 1, f"{facts['cpu']}, {facts['threads']} threads", facts)

    def build(self) -> None:
        kernels = build.lib()
        memory.use_plain_malloc(self.keep_memory)
        # Environment variables of malloc (e.g. MALLOC_TRIM_THRESHOLD_) are set by the user and take precedence.
        if self.keep_memory and not any(name.startswith("MALLOC_") for name in os.environ):
            kernels.hal_keep_freed_memory()

    def device(self, index: int = 0) -> torch.device:
        if index != 0:
            raise hal.HalError(f"cpu_ref has one device, the CPU (index 0); device {index} was asked for")
        return torch.device("cpu")

    def capabilities(self) -> hal.Capabilities:
        return hal.Capabilities(
            dtypes=hal.Capabilities().dtypes
            | {torch.float64, torch.int8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2},
            host_visible=True,
        )

    def synchronize(self) -> None:
        """Does nothing, because kernels are synchronous."""

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> hal.Comm:
        """Shared memory between ranks of one machine (comm.py); gloo otherwise, or if shared_memory is False."""
        kind = SharedMemoryComm if self.shared_memory else hal.TorchComm
        return hal.torch_comm(hal.GLOO, ranks, timeout=timeout, kind=kind)

    def memory_stats(self) -> Mapping[str, int]:
        """ "allocated": resident bytes of the process now; "peak": their maximum since start or reset_peak_memory."""
        status = Path("/proc/self/status")
        if not status.exists():
            return {}
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if "VmRSS" not in lines:
            return {}
        now, peak = (int(lines.get(key, lines["VmRSS"]).split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        # Linux updates page counts in batches, so its maximum may be smaller than the current value.
        return {"allocated": now, "peak": max(now, peak)}

    def reset_peak_memory(self) -> None:
        with contextlib.suppress(OSError):  # not allowed on every system; "peak" is then the maximum since the start
            Path("/proc/self/clear_refs").write_text("5")
