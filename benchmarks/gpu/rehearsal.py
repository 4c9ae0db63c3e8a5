"""What `make gpu` runs on: a GPU, or, rehearsed with --simulate, the CUDA simulator.

A rehearsal runs every part at reduced sizes: its calls, their values and the report are real, its times say nothing.
What the simulator lacks is absent from its report, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch

import hal

from ..harness.case import Thunk

_SIZES = (
    "--num-layers {} --hidden-size {} --num-attention-heads {} --seq-length {} --max-position-embeddings {}"
    " --micro-batch-size {} --global-batch-size {} --train-iters {} --lr 1e-3 --bf16 --swiglu"
    " --tokenizer-type ByteTokenizer --sample-tokens 0"
)


class Gpu:
    """The current GPU of this process. The device is touched by methods only."""

    simulated = False
    shrink = 1
    """The divisor of the cases' sizes."""
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    heads = 16, 4
    """Of attention: the lengths of sequences, each with a batch that has as many tokens as the longest; the numbers of
    heads and of key/value heads."""
    rounds, seconds = 7, 0.03
    """The number of timing rounds of a case, and the seconds per round."""
    ahead = 20_000_000
    """The cycles by which the host is ahead of the device: about 10 ms."""
    small = 1e-3
    """A case in which ours takes fewer seconds is timed by replaying graphs of several calls. (On an H100 behind a slow
    host, forward and backward pass of a norm took 0.4 ms, of which the device worked 0.15 ms.)"""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Feature -> why it is absent. Features: "streams", "memory", "clocks", "cuBLAS", "compile"."""
    train = _SIZES.format(4, 256, 8, 128, 128, 4, 8, 40)
    """The options of the training runs."""

    def use(self, **options: Any) -> Any:
        """The cuda backend, active."""
        return hal.use("cuda", simulate=self.simulated, **options)

    def effort(self) -> dict[str, Any]:
        """The arguments of the kit's Effort."""
        return {}

    def about(self) -> dict[str, Any]:
        """The device and torch's version of CUDA. Initialises CUDA; raises HalError if the backend cannot be used."""
        self.use()
        return {
            "device": torch.cuda.get_device_name(),
            "architecture": "sm_{}{}".format(*torch.cuda.get_device_capability()),
            "devices": torch.cuda.device_count(),
            "CUDA": torch.version.cuda,
        }

    def alive(self) -> bool:
        """Whether the CUDA context still accepts work, which it does not after an illegal memory access."""
        try:
            torch.cuda.synchronize()
        except Exception:  # torch.AcceleratorError or RuntimeError, depending on torch's version
            return False
        return True

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds_per_call(self, call: Thunk, count: int) -> float:
        """Mean over `count` calls queued one after the other, by the device's clock. The device waits before the first
        one, while the host queues calls; otherwise the host's time for the first one would be measured, too."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(self.ahead)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / count

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a device copy of 1 GiB: the ceiling of memory-bound kernels."""
        source = torch.empty((1 << 30) // self.shrink, dtype=torch.uint8, device=hal.device())
        copy = torch.empty_like(source)
        self.seconds_per_call(lambda: copy.copy_(source), 3)  # the warm-up
        return 2 * source.numel() / min(self.seconds_per_call(lambda: copy.copy_(source), 10) for _ in range(5))

    def cache_bytes(self) -> int:
        """The size of the L2 cache."""
        return int(torch.cuda.get_device_properties(hal.device()).L2_cache_size)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch.compile's version of a peer."""
        return torch.compile(function, dynamic=False)

    def between_cases(self) -> None:
        """Returns the memory of a finished case."""
        # dynamo limits the number of compiled versions per function, and cases share functions.
        torch._dynamo.reset()
        torch.cuda.empty_cache()


class Rehearsal(Gpu):
    """The CUDA simulator in the place of a GPU."""

    simulated = True
    shrink, lengths, heads = 64, (40, 80), (2, 1)
    rounds, seconds, small = 1, 0.0, 0.0
    lacks: ClassVar[Mapping[str, str]] = {
        "streams": "the simulator has no streams",
        "memory": "the simulator has no memory of its own",
        "clocks": "the simulator has no clock",
        "cuBLAS": "the simulator has no cuBLAS",
        "compile": "torch.compile's kernels need a GPU",
    }
    train = _SIZES.format(2, 32, 4, 16, 16, 2, 4, 6)

    def effort(self) -> dict[str, Any]:
        return {"examples": 1, "seconds": 0.5}

    def about(self) -> dict[str, Any]:
        self.use()
        return {"device": "simulator", "architecture": "", "devices": 8, "CUDA": "none (simulated)"}

    def alive(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def seconds_per_call(self, call: Thunk, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    def cache_bytes(self) -> int:
        return 0

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def absent(*args: Any) -> Any:
            raise hal.HalError(self.lacks["compile"])

        return absent

    def between_cases(self) -> None:
        pass
