"""Kernels with one fault each: the conformance kit finds it at small sizes, and says which kernel does what."""

from __future__ import annotations

import re

import pytest
import torch
from cuda_helpers import planted

from hal import testing
from hal.backends.cuda import Cuda

UNLIMITED = 1 << 30

STEP = "at < total; at += (i64)gridDim.x * blockDim.x"
ROWS = "row < rows; row += gridDim.x"
R_ROWS = "r < rows; r += gridDim.x"
DRAWS = "r < rows; r += gridDim.y"
COLUMNS = "k < vectors; k += step"
CHUNK = "((i64)blockIdx.x - tensors.first_block[tensor]) * CHUNK"

# name -> (kernel file, text, fault, op, tier of the kit)
SIZES = {
    "rotary repeats every second step": ("rotary.cu", STEP, f"{STEP} * 2", "rotary", "default"),
    "cross entropy skips rows": ("cross_entropy.cu", ROWS, f"{ROWS} * 2", "cross_entropy", "default"),
    "softmax skips rows": ("softmax.cu", R_ROWS, f"{R_ROWS} * 2", "scale_mask_softmax", "default"),
    "uniform skips rows": ("dropout.cu", DRAWS, f"{DRAWS} * 2", "philox_uniform", "default"),
    "rms norm drops the last, incomplete sweep of the grid": (
        "norm.cu",
        ROWS,
        "row - blockIdx.x + gridDim.x <= rows; row += gridDim.x",
        "rms_norm",
        "default",
    ),
    "sums of columns skip columns": (
        "reduce.cu",
        "base += (i64)gridDim.x * 32",
        "base += (i64)gridDim.x * 64",
        "rms_norm",
        "default",
    ),
    "column sums of a wide norm are those of another block": (
        "norm.cu",
        "in_shared ? shared_sums : mine",
        "in_shared ? shared_sums : partial",
        "layer_norm",
        "default",
    ),
    "gelu skips columns": ("common.h", COLUMNS, f"{COLUMNS} * 2", "bias_gelu", "production"),
}
FILES = {
    "rotary": ("rotary.cu",),
    "cross_entropy": ("cross_entropy.cu",),
    "scale_mask_softmax": ("softmax.cu",),
    "philox_uniform": ("dropout.cu",),
    "rms_norm": ("norm.cu", "reduce.cu"),
    "layer_norm": ("norm.cu", "reduce.cu"),
    "bias_gelu": ("activation.cu", "reduce.cu"),
}
"""The kernel files of an op."""


def failed(op: str, tier: str, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> list:
    """The kit's failed rows of one op on the simulator that the test has built."""
    return testing.run(Cuda(simulate=True), ops=[op], examples=8, scale=tier, dtypes=dtypes).failed


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_fault_that_begins_at_some_size_is_found_at_small_ones(simulator, name):
    """It is hidden from the same calls where the grid and shared memory are those of a GPU."""
    file, old, new, op, tier = SIZES[name]
    files, keep = planted(file, old, new), tuple(n for n in FILES[op] if n != file)
    simulator(files, keep)
    assert any("error of" in row.message for row in failed(op, tier))
    simulator(files, keep, grid=UNLIMITED, shared=48 * 1024)
    assert not failed(op, tier)


ACCESSES = {
    "reads past the end": (
        "softmax.cu",
        "const float top = dead ? 0.0f : all.v[0]",
        "const float top = to_float(x_[rows * sk + 1])",
        "scale_mask_softmax",
        r"kernel softmax_fwd<f32>: thread \d+ of block \d+,0 reads 4 bytes at 0x[0-9a-f]+, 4 bytes after the end of "
        r"parameter 1, in softmax\.cu:\d+\. Its tensors: parameter 1 float32 \[[\d, ]+\], parameter 2 ",
    ),
    "writes past the end": (
        "softmax.cu",
        "j < sk; j += blockDim.x) from_float(0.0f, y[j]);",
        "j <= sk; j += blockDim.x) from_float(0.0f, y[j]);",
        "scale_mask_softmax",
        r"kernel softmax_fwd<f32>: thread \d+ of block \d+,0 writes 4 bytes at 0x[0-9a-f]+, 0 bytes after the end of "
        r"parameter 2, in softmax\.cu:\d+|in common\.h:\d+ from softmax\.cu:\d+",
    ),
    "reads before the beginning": (
        "rotary.cu",
        "load(x + j, a);",
        "load(x + j - 2 * half, a);",
        "rotary",
        r"kernel rotary<f32, \d, false>: thread \d+ of block \d+,0 reads \d+ bytes at 0x[0-9a-f]+, \d+ bytes before "
        r"parameter 1, in (common\.h:\d+ from )+rotary\.cu:\d+",
    ),
    "has no mask for the tail of a row": (
        "common.h",
        "const int vectors = (n - head) / V, step",
        "const int vectors = (n - head + V - 1) / V, step",
        "scale_mask_softmax",
        r"kernel softmax_\w+<f32>: thread \d+ of block \d+,0 (reads|writes) 4 bytes at 0x[0-9a-f]+, \d+ bytes after",
    ),
    "loads 16 bytes from anywhere": (
        "common.h",
        "return head < n ? head : n;",
        "return head < n ? 0 : 0;",
        "scale_mask_softmax",
        r"kernel softmax_\w+<f32>: thread \d+ .* accesses 0x[0-9a-f]+, which is not aligned to 16 bytes",
    ),
    "writes past the shared memory of the launch": (
        "norm.cu",
        "*db = dw + width;",
        "*db = dw + width + 4;",
        "layer_norm",
        r"kernel norm_bwd<f32, f32, true>: thread \d+ .* writes \d+ bytes at 0x[0-9a-f]+, byte \d+ of \d+ bytes of "
        r"shared memory",
    ),
    "writes past an array in shared memory": (
        "common.h",
        "__shared__ float partial[32 * N];",
        "__shared__ float partial[2 * N];",
        "cross_entropy",
        r"kernel cross_entropy_stats<f32>: thread \d+ .* uses index \d+ of an array 'float \[6\]', in common\.h:\d+",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCESSES)
def test_an_access_out_of_bounds_fails_its_row_and_not_the_process(simulator, name):
    file, old, new, op, message = ACCESSES[name]
    simulator(planted(file, old, new), tuple(n for n in FILES[op] if n != file))
    tier = "production" if op == "cross_entropy" else "default"
    (row,) = [row for row in failed(op, tier, (torch.float32,)) if row.implementation == "cuda/kernel"]
    assert re.search("accepted the call and raised HalError: CUDA simulator, " + message, row.message) or re.search(
        "the backward raised HalError: CUDA simulator, " + message, row.message
    ), row.message
    assert f"ops.{op}" in row.code or f"--op {op}" in row.code
