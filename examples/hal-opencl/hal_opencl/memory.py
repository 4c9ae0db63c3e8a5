"""Access of kernels to tensors, which are in host memory because torch has no OpenCL device.

If the device shares memory with the host, a tensor's entire storage is wrapped (CL_MEM_USE_HOST_PTR) and kernels get
the tensor's offset in it; tensors that share a storage share a buffer, because overlapping buffers are undefined in
OpenCL. Otherwise (or with memory="staging") the bytes that a tensor spans are copied to a buffer from a pool, and back
if they are written. In both cases a call returns only when its results are in host memory, because the next torch
operation may read them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

import hal

from .engine import Engine, engine, translated


@dataclass(frozen=True)
class Out:
    """Marks a tensor argument that the kernel writes, either completely (default) or in part (update)."""

    tensor: Tensor
    update: bool = False


@dataclass
class _Region:
    """A buffer for the host bytes [address, address + size); written: (offset, size) of parts to copy back."""

    buffer: Any
    address: int
    size: int
    written: list[tuple[int, int]]


class Memory:
    """Buffers of one device and their statistics; allocated: bytes in use by unfinished calls."""

    def __init__(self, engine: Engine, zero_copy: bool) -> None:
        cl = engine.cl
        self.zero_copy = zero_copy
        with translated("making the buffer pool"):
            self.pool = cl.tools.MemoryPool(cl.tools.ImmediateAllocator(engine.queue))
        self.allocated = self.peak = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Counts `size` bytes as allocated (negative: as freed)."""
        with self._lock:
            self.allocated += size
            self.peak = max(self.peak, self.allocated)

    def stats(self) -> Mapping[str, int]:
        """Bytes in buffers, now and at the peak, and bytes reserved by the pool."""
        return {"allocated": self.allocated, "peak": self.peak, "reserved": self.pool.managed_bytes}


_memory: Memory | None = None


def set_memory(memory: Memory) -> None:
    """Called by the backend's build()."""
    global _memory
    _memory = memory


def _host(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def _span(t: Tensor) -> int:
    """Bytes from t's first element to the end of its last."""
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) * t.element_size()


class KernelCall:
    """The kernels of a call: `with KernelCall() as call: call.run(...)`. At its end the results are in host memory."""

    def __init__(self) -> None:
        self.engine = engine()
        assert _memory is not None  # set together with the engine
        self.memory = _memory
        self._regions: dict[tuple[int, int], _Region] = {}  # by address and size
        self._scratch: list[Any] = []
        self._tensors: list[Tensor] = []  # keeps temporaries alive until the kernels have read them
        self._bytes = 0

    def __enter__(self) -> KernelCall:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self._bring_back()
            self.engine.finish()
        finally:
            # Dropping the references frees buffers, or returns them to the pool.
            self._regions.clear()
            self._scratch.clear()
            self._tensors.clear()
            self.memory.add(-self._bytes)

    def scratch(self, elements: int) -> Any:
        """An uninitialised device buffer of `elements` floats, for kernels of this call only."""
        size = 4 * max(elements, 1)
        with translated(f"allocating {size} bytes"):
            buffer = self.memory.pool.allocate(size)
        self._scratch.append(buffer)
        self._hold(size)
        return buffer

    def run(
        self,
        file: str,
        name: str,
        defines: Mapping[str, Any],
        grid: Sequence[int],
        *arguments: Any,
    ) -> None:
        """Queues a kernel over a grid of groups.

        arguments: tensors (kernel macro IN), Out (OUT), scratch buffers or (buffer, index of the first element) (both),
        None (a missing tensor), int (long in the kernel), float, or a numpy scalar of the kernel's type.
        """
        flat: list[Any] = []
        for a in arguments:
            if isinstance(a, int):
                flat.append(np.int64(a))
            elif isinstance(a, float):
                flat.append(np.float32(a))
            elif isinstance(a, Tensor):
                flat.extend(self._place(a, False, True))
            elif isinstance(a, Out):
                flat.extend(self._place(a.tensor, True, a.update))
            elif isinstance(a, np.generic):
                flat.append(a)
            else:
                buffer, index = a if isinstance(a, tuple) else (a, 0)
                flat.extend((buffer, np.int64(index)))
        self.engine.enqueue(file, name, defines, grid, flat)

    def _hold(self, size: int) -> None:
        self._bytes += size
        self.memory.add(size)

    def _place(self, t: Tensor, write: bool, read: bool) -> tuple[Any, np.int64]:
        """(buffer, index of t's first element in it)."""
        if not t.numel():
            return None, np.int64(0)
        self._tensors.append(t)
        address, size = hal.address(t), _span(t)
        region = self._wrap(t) if self.memory.zero_copy else self._stage(address, size, read)
        if write:
            region.written.append((address - region.address, size))
        return region.buffer, np.int64((address - region.address) // t.element_size())

    def _wrap(self, t: Tensor) -> _Region:
        """The region of t's entire storage, used in place."""
        storage = t.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        region = self._regions.get((base, size))
        if region is None:
            cl = self.engine.cl
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
            with translated(f"wrapping {size} bytes of host memory"):
                buffer = cl.Buffer(self.engine.context, flags, hostbuf=_host(base, size))
            region = self._regions[base, size] = _Region(buffer, base, size, [])
            self._hold(size)
        return region

    def _stage(self, address: int, size: int, read: bool) -> _Region:
        """The region of a copy of the bytes [address, address + size), with their values if `read`."""
        # Overlapping tensors get separate copies, which is safe because a kernel's output is either new or one of its
        # inputs.
        region = self._regions.get((address, size))
        if region is not None:
            return region
        cl = self.engine.cl
        with translated(f"allocating {size} bytes"):
            buffer = self.memory.pool.allocate(size)
            if read:
                cl.enqueue_copy(self.engine.queue, buffer, _host(address, size), is_blocking=False)
        region = self._regions[address, size] = _Region(buffer, address, size, [])
        self._hold(size)
        return region

    def _bring_back(self) -> None:
        cl, queue = self.engine.cl, self.engine.queue
        with translated("bringing results to the host"):
            for region in self._regions.values():
                for offset, size in region.written:
                    if self.memory.zero_copy:
                        # Mapping makes the bytes at the host's address current.
                        mapped, _ = cl.enqueue_map_buffer(
                            queue, region.buffer, cl.map_flags.READ, offset, (size,), np.uint8, is_blocking=False
                        )
                        mapped.base.release(queue)
                    else:
                        host = _host(region.address + offset, size)
                        cl.enqueue_copy(queue, host, region.buffer, src_offset=offset, is_blocking=False)
