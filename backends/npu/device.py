"""The npu backend: Ascend devices through the unmodified torch_npu wheel, or the same wheel over a simulated CANN.

torch_npu is imported by `build`, not earlier, and nothing is patched. With simulate=True (or HAL_SIMULATE=1) the
simulated libraries are loaded before it; this is the only difference.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import hal
from hal.backend_tools import announce, recorded

from . import environment, kernels, vendor_rng
from .comm import make_comm
from .device_specs import DEVICE_SPECS

_NEEDED = {
    "npu/moe_token_unpermute": "npu_moe_token_unpermute_grad",
    "npu/gating_top_k_softmax": "npu_moe_gating_top_k_softmax_v2",
    "npu/ring_attention_update": "npu_ring_attention_update",
}
"""Id of an implementation -> its operator that older releases of torch_npu lack."""


def _oldest() -> bool:
    """Whether torch, and with it torch_npu, is release 2.6."""
    return torch.__version__.startswith("2.6.")


def provided(implementation: str) -> bool:
    """Whether the release of torch_npu that is loaded has what an implementation needs."""
    if implementation == "npu/grouped_matmul" and _oldest():
        return False  # npu_grouped_matmul refuses group_type 2, which the gradient of the weights needs
    return implementation not in _NEEDED or hasattr(torch.ops.npu, _NEEDED[implementation])


def _npu() -> Any:
    """torch.npu, which exists after torch_npu has been imported."""
    if not hasattr(torch, "npu"):
        raise hal.HalError("the npu backend is not built: call hal.use('npu'), or build() on an instance")
    return torch.npu


class Npu(hal.Backend):
    """Options: simulate (None = HAL_SIMULATE); deterministic; rng; devices, memory_bytes and poison of the simulator
    (see docs).

    rng: "hal", dropout with HAL's bits, which attention does not have, or "vendor", with the numbers of Ascend's
        generator (see vendor_rng.py). None = HAL_NPU_RNG, "hal" if that is not set.

    deterministic: operators and HCCL add in a fixed order. CANN has one switch for all of them, which torch_npu sets
    from `torch.use_deterministic_algorithms`, so the mode is one of the process.
    """

    name = "npu"
    device_specs = DEVICE_SPECS

    def __init__(
        self,
        simulate: bool | None = None,
        devices: int = 8,
        memory_bytes: int = 0,
        poison: bool = False,
        deterministic: bool = False,
        rng: str | None = None,
    ) -> None:
        self.deterministic = deterministic
        self.rng = os.environ.get("HAL_NPU_RNG") or "hal" if rng is None else rng
        if self.rng not in ("hal", "vendor"):
            asked_by = "HAL_NPU_RNG" if rng is None else "rng"
            raise hal.HalError(f"{asked_by}={self.rng!r}: npu draws random numbers of 'hal' or of the 'vendor'")
        if self.rng == "hal":  # an instance has the implementations that draw the vendor's numbers only by request
            own = {
                op: [impl for impl in impls if not impl.id.endswith(vendor_rng.SUFFIX)]
                for op, impls in self.impls.items()
            }
            self.impls = own  # type: ignore[misc]
        asked = os.environ.get("HAL_SIMULATE", "") not in ("", "0")
        self.simulate = self.simulated = asked if simulate is None else simulate
        self.devices, self.memory_bytes, self.poison = devices, memory_bytes, poison
        if not self.simulate and (devices, memory_bytes, poison) != (8, 0, False):
            raise hal.HalError("devices, memory_bytes and poison are options of the simulator: add simulate=True")

    def probe(self) -> hal.Probe:
        return environment.look(self.devices if self.simulate else None)

    def build(self) -> None:
        """Loads torch_npu, after the simulated CANN libraries if simulated. Raises BackendUnavailable.

        Must be called before the first backward pass of the process, because torch then creates its autograd queues,
        one per registered device.
        """
        from . import simulator

        # The simulated libraries must be loaded first, so that the loader resolves torch_npu's symbols in them.
        if self.simulate:
            simulator.start(devices=self.devices, memory_bytes=self.memory_bytes, poison=int(self.poison))
            os.environ["HAL_SIMULATE"] = "1"  # child processes are simulated as well
        elif simulator.running() is not None:
            raise hal.BackendUnavailable("this process already runs torch_npu on the simulator; start another one")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # importing torch_npu prints
                importlib.import_module("torch_npu")
        except Exception as error:
            raise hal.BackendUnavailable(f"torch_npu cannot be imported: {type(error).__name__}: {error}") from error
        compiles = environment.compiles_operators()
        if compiles is not None:
            _npu().set_compile_mode(jit_compile=compiles)
        if self.deterministic:
            # With warn_only, torch's own operations on the host that have no such mode go on as before. New memory is
            # not filled, which torch does in this mode to make reads of uninitialised memory repeatable.
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        kernels.load(self.simulate)
        self.impls = {op: [i for i in impls if provided(i.id)] for op, impls in self.impls.items()}  # type: ignore[misc]
        if self.rng == "vendor":
            announce("dropout draws the vendor's random numbers (rng=vendor), which are not those of other backends")

    def device(self, index: int = 0) -> torch.device:
        count = _npu().device_count()
        if not 0 <= index < count:
            raise hal.HalError(f"npu has devices 0 to {count - 1}; device {index} was asked for")
        return torch.device("npu", index)

    def capabilities(self) -> hal.Capabilities:
        return hal.Capabilities(
            dtypes=hal.Capabilities().dtypes | {torch.float64, torch.int8, torch.int16},
            asynchronous=True,
            deterministic=self.simulated or self.deterministic,
            graphs=not _oldest(),  # torch_npu 2.6 has the class, but its CANN not the functions
            attention_dropout=self.rng == "vendor",
        )

    def synchronize(self) -> None:
        _npu().synchronize()

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> hal.Comm:
        return make_comm(ranks, timeout, self.local_index())

    def device_failure(self, error: RuntimeError) -> hal.HalError | None:
        """Waits for collectives are ordered on the stream, so a missing rank surfaces where the host waits."""
        return hal.collective_failure(error)

    def memory_stats(self) -> Mapping[str, int]:
        """Bytes: "allocated" and "peak" by tensors, "reserved" by the caching allocator, "free" and "total"."""
        npu = _npu()
        npu.set_device(npu.current_device())  # a thread that has used no device yet has none that could be asked
        free, total = npu.mem_get_info()
        stats = {"allocated": npu.memory_allocated(), "peak": npu.max_memory_allocated()}
        return {**stats, "reserved": npu.memory_reserved(), "free": free, "total": total}

    def reset_peak_memory(self) -> None:
        _npu().reset_peak_memory_stats()

    @contextlib.contextmanager
    def stream(self) -> Iterator[object]:
        """Work inside runs on a separate stream, after the work submitted before; later work waits for it."""
        npu = _npu()
        current, side = npu.current_stream(), npu.Stream()
        side.wait_stream(current)
        with npu.stream(side):
            yield side
        current.wait_stream(side)

    def event(self) -> object:
        event = _npu().Event()
        event.record()
        return event

    def wait(self, event: object) -> None:
        event.wait()  # type: ignore[attr-defined]

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Records a graph (aclgraph) with torch_npu's NPUGraph; see hal.Backend.capture."""
        if not self.capabilities().graphs:
            return super().capture(function)
        return recorded(self, function, _npu().NPUGraph(), _npu().graph)

    @contextlib.contextmanager
    def profile_range(self, name: str) -> Iterator[None]:
        """A range of torch_npu's profiler (mstx) that is also a range of torch's profiler."""
        mstx = _npu().mstx
        range_id = mstx.range_start(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            mstx.range_end(range_id)

    @contextlib.contextmanager
    def profiler(self, folder: str, name: str) -> Iterator[None]:
        """torch_npu's profiler, whose folder `name`_<process>_<time>_ascend_pt MindStudio Insight reads. torch's own
        profiler sees no device before torch_npu 2.13. The simulator has no device times, so that it records the host.
        """
        if self.simulated:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as host:
                yield
            host.export_chrome_trace(os.path.join(folder, f"{name}.torch.json.gz"))
            return
        profiler: Any = importlib.import_module("torch_npu.profiler")
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        # The process that trains does not analyse what was recorded: that takes minutes, in which other ranks wait.
        write = profiler.tensorboard_trace_handler(folder, worker_name=name, analyse_flag=False)
        with profiler.profile(activities=activities, on_trace_ready=write):
            yield
