"""Calls of more than 2^31 elements, without their memory.

All 64 MiB chunks of such a tensor are the same memory but for the last one. An index that does not fit an int therefore
reads or writes another place than the last chunk, which the results show.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys

import pytest
import torch
from torch import Tensor

import hal
from hal import ops

pytestmark = [
    pytest.mark.nightly,  # each takes some seconds
    pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create"),
    pytest.mark.skipif("HAL_CPU_REF_SANITIZE" in os.environ, reason="the sanitizer has no room for these addresses"),
]

CHUNK, FIXED, NO_RESERVE = 64 << 20, 0x10, 0x4000
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def backend():
    hal.use("cpu_ref")


@pytest.fixture
def zeros():
    """zeros(dtype, *shape): a tensor of zeros of which only the last chunk is memory of its own."""
    libc, mapped = ctypes.CDLL(None, use_errno=True), []
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def make(dtype: torch.dtype, *shape: int) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        chunks = -(-size // CHUNK)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        first = libc.mmap(None, chunks * CHUNK, mmap.PROT_READ, flags, -1, 0)
        assert first not in (None, ctypes.c_void_p(-1).value)
        mapped.append((first, chunks * CHUNK))
        file = os.memfd_create("chunks")
        os.ftruncate(file, 2 * CHUNK)
        for i in range(chunks):
            at = CHUNK if i == chunks - 1 else 0
            where = first + i * CHUNK
            both = mmap.PROT_READ | mmap.PROT_WRITE
            assert libc.mmap(where, CHUNK, both, mmap.MAP_SHARED | FIXED, file, at) == where
        os.close(file)
        return torch.frombuffer((ctypes.c_char * size).from_address(first), dtype=dtype).view(shape)

    yield make
    for first, size in mapped:
        libc.munmap(first, size)


@pytest.mark.parametrize("dtype, count", [(F32, 2**31 + 1000), (BF16, 2**32 + 1000)], ids=["float32", "bfloat16"])
def test_norm_and_unscaling(zeros, dtype, count):
    x = zeros(dtype, count)
    x[-1] = 8.0
    assert ops.l2norm([x]) == 8.0
    assert ops.unscale_and_check([x], 0.5) == 0.0 and x[-1] == 4.0
    x[-2] = math.inf
    assert ops.unscale_and_check([x], 1.0) == 1.0


def test_adamw(zeros):
    lists = [[zeros(F32, 2**31 + 1000)] for _ in range(4)]
    copy = zeros(BF16, 2**31 + 1000)
    for (x,), value in zip(lists, (1.0, 0.5, 0.1, 0.2)):
        x[-1] = value
    expected = [[x[-1:].clone()] for (x,) in lists]
    ops.adamw(*lists, step=3, lr=0.1, weight_decay=0.1, model_params=[copy])
    ops.adamw.reference(*expected, step=3, lr=0.1, weight_decay=0.1)
    for (x,), (y,) in zip(lists, expected):
        torch.testing.assert_close(x[-1:], y)
    assert copy[-1] == expected[0][0].bfloat16()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_products(zeros, dtype):
    n, m = 2**16, 2**15 + 8
    x, dy = torch.zeros(4, m, dtype=dtype), torch.zeros(4, n, dtype=dtype)
    x[-1, -1], dy[-1, -1] = 3.0, 5.0
    total = zeros(F32, n, m)
    ops.linear_wgrad(x, dy, total)
    assert total[-1, -1] == 15.0
    sizes = torch.tensor([2, 2])
    total, weight = zeros(F32, 2, n // 2, m), zeros(dtype, 2, n // 2, m)
    ops.grouped_linear_wgrad(x, dy[:, n // 2 :], sizes, total)
    weight[-1, -1, -1] = 2.0
    y = ops.grouped_linear(x.requires_grad_(), weight, sizes)
    (dx,) = torch.autograd.grad(y[-1, -1], x)
    assert total[-1, -1, -1] == 15.0 and y[-1, -1] == 6.0 and dx[-1, -1] == 2.0


def test_cross_entropy(zeros):
    logits = zeros(F32, 2**15 + 2, 2**16)
    logits[-1, -1] = 12.0
    target = torch.zeros(2**15 + 2, dtype=torch.int64)
    target[-1] = 2**16 - 1
    row = logits[-1:].clone().requires_grad_()
    expected = ops.cross_entropy.reference(row, target[-1:])
    expected.sum().backward()
    loss = ops.cross_entropy(logits.requires_grad_(), target, inplace_backward=True)
    torch.testing.assert_close(loss[-1:], expected)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(gradient[-1:], row.grad)


@pytest.mark.parametrize("queries", [1, 60])
def test_attention(zeros, queries):
    """The last keys of a long context."""
    k, v = (zeros(F32, 1, 2**24 + 96, 1, 128) for _ in range(2))
    q, values = torch.ones(1, queries, 1, 128), torch.arange(128.0)
    k[:, -queries:], v[:, -queries:] = 10.0, values
    out = ops.flash_attention(q, k, v, layout="BSND", pre_tokens=0, next_tokens=0)
    torch.testing.assert_close(out, values.expand(1, queries, 1, 128))
