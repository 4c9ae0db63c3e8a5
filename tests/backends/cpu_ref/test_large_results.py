"""Large results use memory that cpu_ref allocates: they behave like any tensor and are freed with their last view."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import hal
from hal import ops
from hal.backends.cpu_ref import memory
from hal.bench.harness.live_bytes import LiveBytes

unsanitized = pytest.mark.skipif("HAL_CPU_REF_SANITIZE" in os.environ, reason="the sanitizer brings its own malloc")

ROWS, WIDTH = 1024, 1280  # 5 MiB of float32
SIZE = 4 * ROWS * WIDTH

WITHOUT_SLIVERS = """
import resource
import torch
import hal
hal.use("cpu_ref")
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
late = []
for rows in (160, 150, 140, 130, 120):  # whether aligned blocks leave slivers depends on where the heap happens to end
    x = torch.randn(1, 64, rows, 1024, requires_grad=True)
    dy, counted = torch.randn_like(x), []
    for _ in range(8):
        before = faults()
        torch.autograd.grad(hal.ops.scale_mask_softmax(x, None, 1.0, True), x, dy)
        counted.append(faults() - before)
    late += counted[2:]
print(sum(n > 4000 for n in late), late)
"""


def large() -> Tensor:
    return memory.empty((ROWS, WIDTH), torch.float32).normal_()


@pytest.fixture
def freed(monkeypatch) -> list[int]:
    """Addresses of the freed blocks, in the order in which they are freed."""
    addresses: list[int] = []
    lib, ffi = memory.build.lib(), memory.build.ffi()

    def free(block) -> None:
        addresses.append(int(ffi.cast("uintptr_t", block)))
        lib.hal_free(block)

    allocator = ffi.new_allocator(lib.hal_allocate, free, should_clear_after_alloc=False)
    monkeypatch.setattr(memory, "_allocator", lambda: (allocator, ffi.buffer))
    return addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_large_ones_are_aligned_contiguous_and_of_their_size(dtype: torch.dtype) -> None:
    for shape in ((1 << 21,), (3, 5, 1 << 18), (1 << 11, 1 << 10, 1)):
        for x in (memory.empty(shape, dtype), memory.empty_like(torch.empty(shape, dtype=dtype))):
            assert (x.shape, x.dtype, x.device.type) == (torch.Size(shape), dtype, "cpu")
            assert x.is_contiguous() and x.data_ptr() % 64 == 0 and x.storage_offset() == 0
            assert x.untyped_storage().nbytes() == x.nbytes
            assert not x.requires_grad and not x._is_view()
            x.fill_(1)
            assert x.sum(dtype=torch.float64) == x.numel()


def test_small_ones_are_torchs_own() -> None:
    for shape in ((), (0, 5), (3, 4)):
        x = memory.empty(shape, torch.float32)
        assert x.shape == torch.Size(shape) and x.untyped_storage().resizable()
    assert not large().untyped_storage().resizable()
    for count, resizable in ((memory.LARGE // 4 - 1, True), (memory.LARGE // 4, False)):
        for x in (memory.empty((count,), torch.float32), memory.empty_like(torch.empty(count))):
            assert x.untyped_storage().resizable() == resizable


def test_without_keep_memory_all_are_torchs_own() -> None:
    """Megatron-LM frees some results by resizing their storage."""
    try:
        hal.use("cpu_ref", keep_memory=False)
        ops.rms_norm(torch.randn(ROWS, WIDTH), torch.ones(WIDTH)).untyped_storage().resize_(0)
    finally:
        hal.use("cpu_ref")
    assert not large().untyped_storage().resizable()


def test_a_block_is_freed_with_its_last_view(freed) -> None:
    x = large()
    row, flat = x[3], x.view(-1)
    expected = row.clone()
    del x, flat
    assert not freed and torch.equal(row, expected)
    del row
    assert len(freed) == 1


def test_autograd_keeps_saved_results_and_frees_them(freed) -> None:
    x = torch.randn(1, 1, ROWS, WIDTH, requires_grad=True)
    y = ops.scale_mask_softmax(x)
    loss = y.mul(2.0).sum()
    want = y.detach().clone()
    del y
    assert not freed, "the backward pass needs it"
    (dx,) = torch.autograd.grad(loss, x)
    assert torch.equal(want, torch.softmax(x.detach(), -1)) or (want - torch.softmax(x.detach(), -1)).abs().max() < 1e-6
    del loss
    assert len(freed) == 1
    del dx
    assert len(freed) == 2


def test_results_may_be_changed_in_place_and_in_any_mode() -> None:
    x = torch.randn(ROWS, 2 * WIDTH, requires_grad=True)
    y = ops.swiglu(x)
    want = 3.0 * y.detach()
    y.mul_(3.0).add_(1.0)
    assert torch.equal(y.detach(), want + 1.0)
    y.sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        assert ops.swiglu(x).is_inference()
    x.data = large()
    assert x.shape == (ROWS, WIDTH)


def test_copies_files_and_other_processes() -> None:
    x = large()
    file = io.BytesIO()
    torch.save(x, file)
    assert file.tell() < SIZE + 4096, "only the tensor's own bytes are written"
    file.seek(0)
    for y in (torch.load(file), copy.deepcopy(x), x.clone(), torch.from_numpy(x.numpy())):
        assert torch.equal(x, y)
    shared = large().copy_(x).share_memory_()
    assert shared.is_shared() and torch.equal(x, shared)
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # as DataLoader's workers do, because OpenMP's threads do not survive a fork
        y = memory.empty(x.shape, x.dtype).copy_(x)
        os._exit(0 if bool((y == x).all()) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_queue_takes_them() -> None:
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    x = large()
    queue.put(x)
    assert torch.equal(queue.get(), x)


def test_a_tracker_counts_them() -> None:
    with LiveBytes() as live:
        x = large()
        assert live.now() == SIZE
        y = x.view(-1)
        del x
        assert live.now() == SIZE
        del y
        assert live.now() == 0


@unsanitized
def test_out_of_memory_is_said() -> None:
    with pytest.raises(MemoryError):
        memory.empty((1 << 60,), torch.uint8)


@pytest.mark.slow
@unsanitized
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="about glibc's malloc")
def test_a_loop_uses_the_same_pages_again() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", WITHOUT_SLIVERS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) <= 1, f"calls that touched new pages: {done.stdout}"
