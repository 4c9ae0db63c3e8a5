"""cpu_ref's communicator: shared memory between the ranks of one machine, gloo otherwise.

The ranks of a group on one machine map a common segment. It has no name in any file system, so nothing is left behind
even if a process crashes. Operations that the kernels lack (complex reductions, messages between two ranks) run on
gloo. Blocking collectives run on the calling thread, asynchronous ones on a thread of the communicator.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hal
from hal import address

from . import build
from .memory import empty, empty_like

_KIND = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 2, "broadcast": 3, "all_to_all": 4, "barrier": 5}
_REDUCTION = {"sum": 0, "max": 1, "min": 2, "avg": 3}
_CODE = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 5,
}
_MOVED = (torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64)
_MOVED += (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_CODE_MOVED = {dtype: 16 + i for i, dtype in enumerate(_MOVED)}
"""Codes of dtypes that are moved but not reduced. The kernel only checks that they are equal on all ranks."""
_REDUCING = ("all_reduce", "reduce_scatter")
_OUT_OF_TIME, _DEAD, _OTHER_COLLECTIVE, _CLOSED = 1, 2, 3, 4


class SharedMemoryComm(hal.TorchComm):
    """A communicator over shared memory if all ranks are on one machine (see `shared`), otherwise gloo's."""

    def __init__(self, group: dist.ProcessGroup, transport: hal.Transport, **how: Any) -> None:
        super().__init__(group, transport, **how)
        self._handle, self._memory = _join(self)
        self._run_kernel = build.lib().hal_shm_run
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._tasks: queue.SimpleQueue[_Task] | None = None
        self._unfinished: threading.Event | None = None
        if self._handle:
            self.emulations = {}

    @property
    def shared(self) -> bool:
        """Whether collectives go through shared memory."""
        return self._handle != 0

    def why_not(self, collective: str, x: Tensor, op: str | None = None) -> Sequence[str]:
        return () if self._takes(collective, x) else super().why_not(collective, x, op)

    def _checked_now(self, collective: str, x: Tensor, op: str, source: int) -> Tensor:
        # Cached for collectives whose shape need not be checked: a full check takes as long as a small collective.
        key = (collective, op, source, x.dtype, x.is_cpu)
        try:
            codes = self._known.get(key)
        except TypeError:  # an unhashable op or source, which is refused below
            codes = None
        if codes is not None and self._unfinished is None:
            x = x.resolve_neg().contiguous()
            return self._transfer(collective, codes, x, empty_like(x), x.numel(), source)
        result = super()._checked_now(collective, x, op, source)
        if collective in ("all_reduce", "broadcast") and x.dtype in _CODE and self._takes(collective, x):
            self._known[key] = _codes(collective, x.dtype, op)
        return result

    def _takes(self, collective: str, x: Tensor) -> bool:
        return self._handle != 0 and (x.dtype in _CODE or collective not in _REDUCING) and x.is_cpu

    def _run_now(self, collective: str, x: Tensor, op: str, source: int) -> Tensor:
        if not self._takes(collective, x):
            return super()._run_now(collective, x, op, source)
        if self._unfinished is not None:  # collectives use the segment in the order in which they were started
            self._unfinished.wait()
            self._unfinished = None
        return self._shared(collective, x, op, source)

    def _start(self, collective: str, x: Tensor, op: str, source: int) -> hal.Work:
        if not self._takes(collective, x):
            return super()._start(collective, x, op, source)
        if self._tasks is None:
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks,), name=f"hal-{self.name}", daemon=True).start()
        future: Future[Tensor] = Future()
        self._unfinished = threading.Event()
        self._tasks.put((future, lambda: self._shared(collective, x, op, source), self._unfinished))
        return hal.Work(future.result)

    def _shared(self, collective: str, x: Tensor, op: str, source: int) -> Tensor:
        x = x.resolve_conj().resolve_neg().contiguous()  # the kernel reads the stored values
        if collective == "all_gather":
            out, count = empty((x.shape[0] * self.size, *x.shape[1:]), x.dtype), x.numel()
        elif collective == "reduce_scatter":
            out = empty((x.shape[0] // self.size, *x.shape[1:]), x.dtype)
            count = out.numel()
        else:
            out, count = empty_like(x), x.numel()
            if collective == "all_to_all":
                count //= self.size
        return self._transfer(collective, _codes(collective, x.dtype, op), x, out, count, source)

    def _transfer(
        self, collective: str, codes: tuple[int, ...], x: Tensor, out: Tensor, count: int, source: int
    ) -> Tensor:
        if not count and collective != "barrier":
            return out  # x is empty on every rank, so no rank waits for another
        if self._broken is not None:
            raise self._broken
        seq = self._progress.arrive(collective)
        at, to = x.data_ptr() or address(x), out.data_ptr() or address(out)
        fault = self._run_kernel(self._handle, at, to, count, source, *codes)
        if fault:
            self._broken = self._fault(collective, seq, *divmod(fault, 256))
            raise self._broken
        return out

    def _fault(self, collective: str, seq: int, fault: int, peer: int) -> hal.HalError:
        rank, other = self._ranks[self.rank], self._ranks[peer]
        if fault == _OUT_OF_TIME:
            arrived = build.lib().hal_shm_arrived
            absent = [r for i, r in enumerate(self._ranks) if i != self.rank and not arrived(self._handle, i)]
            return hal.CollectiveTimeout(self.name, rank, collective, seq, absent or [other], self.timeout)
        what = f"{collective} #{seq} on group '{self.name}'"
        if fault == _OTHER_COLLECTIVE:
            return hal.ContractError(
                f"{what}: rank {other} runs another collective, or one of other shape, dtype or reduction, than rank "
                f"{rank}; all ranks must issue the same collectives in the same order"
            )
        if fault == _CLOSED:
            return hal.CollectiveFailed(f"{what} was aborted on rank {rank}: this process is ending")
        return hal.CollectiveFailed(
            f"{what} failed on rank {rank}: the process of rank {other} has ended. Ranks that did not arrive: {other}. "
            "A rank that ended is the usual cause: see its log first."
        )


def _codes(collective: str, dtype: torch.dtype, op: str) -> tuple[int, ...]:
    """The kernel's codes: (collective, bytes per element, dtype, reduction)."""
    reduction = "max" if dtype is torch.bool and op == "sum" else op
    code = _CODE.get(dtype, _CODE_MOVED.get(dtype, 63))
    return _KIND[collective], dtype.itemsize, code, _REDUCTION[reduction]


_Task = tuple[Future[Tensor], Callable[[], Tensor], threading.Event]


def _work(tasks: queue.SimpleQueue[_Task]) -> None:
    while True:
        future, task, finished = tasks.get()
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        finished.set()
        del future, task  # otherwise the last result would be kept until the next collective


def _machine() -> int:
    """A number that is equal in processes that can map each other's memory: same boot, same process id namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            text = file.read() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return -1 - os.getpid()  # unique, so that no memory is shared
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _join(comm: SharedMemoryComm) -> tuple[int, Any]:
    """(handle, objects that keep the mapping alive) of the group's segment; (0, None) if its ranks share no memory.

    A collective operation over gloo: rank 0 creates the segment, the others map it through rank 0's open file.
    """
    lib = build.lib()
    size = lib.hal_shm_bytes(comm.size)
    file = -1
    if comm.rank == 0 and size and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            file = os.memfd_create("hal-comm", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
    try:
        gathered = [torch.empty(3, dtype=torch.int64) for _ in range(comm.size)]
        dist.all_gather(gathered, torch.tensor([_machine(), os.getpid(), file]), group=comm.group)
        machines, pids, files = zip(*(t.tolist() for t in gathered))
        memory = None
        if files[0] >= 0 and len(set(machines)) == 1:
            with contextlib.suppress(OSError):
                memory = _map(f"/proc/{pids[0]}/fd/{files[0]}", size)
        ready = torch.tensor([int(memory is not None)])
        dist.all_reduce(ready, dist.ReduceOp.MIN, group=comm.group)
    finally:
        if file >= 0:
            os.close(file)
    if memory is None or not ready.item():
        return 0, None
    ffi = build.ffi()
    view = ffi.from_buffer(memory)
    watched = [_watch(pid) if pid != os.getpid() else -1 for pid in pids]
    fds = ffi.new("int[]", watched)
    addresses = (int(ffi.cast("uintptr_t", p)) for p in (view, fds))
    handle = lib.hal_shm_open(next(addresses), comm.rank, comm.size, comm.timeout, next(addresses))
    if not handle:
        raise hal.HalError(f"no memory for the communicator of group '{comm.name}'")
    weakref.finalize(comm, _leave, lib, handle, watched)
    return handle, (memory, view)


def _map(path: str, size: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _watch(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1  # the death of this peer is then detected by the timeout only


def _leave(lib: Any, handle: int, watched: Sequence[int]) -> None:
    lib.hal_shm_close(handle)
    for fd in watched:
        if fd >= 0:
            os.close(fd)
