"""Tensors of more than 2^31 elements: the last blocks of each grid, on memory that is touched nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_helpers import planted
from torch import Tensor

import hal
from hal import Rng, ops
from hal.backends.cuda import Cuda

pytestmark = pytest.mark.slow

ROWS, WIDTH = 8 * 65535, 4104
"""More than 2^31 elements. The last row is in the last row of blocks, of which a grid has at most 65535."""
LAST = 2
BF16 = torch.bfloat16


def far(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    """A tensor with random values in its last LAST rows; the memory of the others is reserved, not used."""
    try:
        x = torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space for {shape}: {error}")
    x[-LAST:] = torch.randn(LAST, *shape[1:], generator=torch.Generator().manual_seed(len(shape)))
    return x.requires_grad_(grad)


def rms_norm() -> tuple[Tensor, Tensor]:
    x, weight = far(ROWS, WIDTH), torch.ones(WIDTH, dtype=BF16)
    return ops.rms_norm(x, weight)[-LAST:], ops.rms_norm.reference(x[-LAST:], weight)


def softmax(backward: bool = False) -> tuple[Tensor, Tensor]:
    x = far(ROWS, WIDTH)[None, None].requires_grad_(backward)
    y = ops.scale_mask_softmax(x, None, 4.0)
    part = x.detach()[:, :, -LAST:].requires_grad_(backward)
    expected = ops.scale_mask_softmax.reference(part, None, 4.0)
    if not backward:
        return y[:, :, -LAST:], expected
    dy = far(ROWS, WIDTH)[None, None]
    got, right = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, part, dy[:, :, -LAST:])[0]
    return got[:, :, -LAST:], right


def cross_entropy(backward: bool = False) -> tuple[Tensor, Tensor]:
    rows = 1 << 19  # the last ones are in the last blocks of cross_entropy_loss, whose grid has at most 1024
    logits, target = far(rows, WIDTH, grad=backward), torch.arange(rows) % WIDTH
    y = ops.cross_entropy(logits, target)
    part = logits.detach()[-LAST:].requires_grad_(backward)
    expected = ops.cross_entropy.reference(part, target[-LAST:])
    if not backward:
        return y[-LAST:], expected
    (got,) = torch.autograd.grad(y, logits, torch.ones_like(y))
    return got[-LAST:], torch.autograd.grad(expected.sum(), part)[0]


def rotary() -> tuple[Tensor, Tensor]:
    x = far(ROWS // 4, 1, 4 * 33, 128)
    angles = far(ROWS // 4, 64, dtype=torch.float32)
    got = ops.rotary(x, angles, angles)
    expected = ops.rotary.reference(x[-1:], angles[-1:], angles[-1:])
    return got[-1:, :, -8:], expected[:, :, -8:]


def dropout() -> tuple[Tensor, Tensor]:
    x, rng = far(ROWS, WIDTH), Rng(5)
    block = rng.block(x.shape, (ROWS - 1, 0))
    return ops.dropout(x, 0.4, rng)[-1:, -512:], ops.dropout.reference(x[-1:], 0.4, block)[:, -512:]


def bias_dropout_add() -> tuple[Tensor, Tensor]:
    x, bias, rng = far(ROWS, WIDTH), torch.ones(WIDTH, dtype=BF16), Rng(5)
    block = rng.block(x.shape, (ROWS - 1, 0))
    expected = ops.bias_dropout_add.reference(x[-1:], bias, x[-1:], p=0.4, rng=block)
    return ops.bias_dropout_add(x, bias, x, p=0.4, rng=rng)[-1:, -512:], expected[:, -512:]


def bias_gelu() -> tuple[Tensor, Tensor]:
    x, bias = far(ROWS, WIDTH), torch.ones(WIDTH, dtype=BF16)
    return ops.bias_gelu(x, bias)[-1:, -512:], ops.bias_gelu.reference(x[-1:], bias)[:, -512:]


def softmax_gradient() -> tuple[Tensor, Tensor]:
    return softmax(backward=True)


def cross_entropy_gradient() -> tuple[Tensor, Tensor]:
    return cross_entropy(backward=True)


# call -> (kernel file, offset, offset in 32 bits)
CALLS: dict[Callable[[], tuple[Tensor, Tensor]], tuple[str, str, str]] = {
    rms_norm: ("norm.cu", "fetch<V>(x + row * width + j)", "fetch<V>(x + (int)(row * width) + j)"),
    softmax: ("softmax.cu", "x_ + r * sk", "x_ + (int)(r * sk)"),
    softmax_gradient: ("softmax.cu", "dx_ + r * sk", "dx_ + (int)(r * sk)"),
    cross_entropy: ("cross_entropy.cu", "z_ + row * width", "z_ + (int)row * width"),
    cross_entropy_gradient: ("cross_entropy.cu", "dz_ + row * width", "dz_ + (int)row * width"),
    rotary: ("rotary.cu", "y_ + row * channels", "y_ + (int)(row * channels)"),
    dropout: (
        "dropout.cu",
        "else return fetch<W>(x + r * width + j)",
        "else return fetch<W>(x + (int)(r * width + j))",
    ),
    bias_dropout_add: ("dropout.cu", "store(y + r * width + j, v)", "store(y + (int)(r * width + j), v)"),
    bias_gelu: ("activation.cu", "x_ + r * full", "x_ + (int)(r * full)"),
}


@pytest.fixture
def last_blocks(simulator):
    """Builds a simulator of one kernel file with grids as large as a GPU's, of which it runs the last blocks."""

    def make(file: str, files: dict[str, str]) -> None:
        engine = simulator(files, () if file in files else (file,), grid=1 << 30, last_blocks=2)
        engine.multiprocessors = 1 << 20

    return make


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_offsets_beyond_32_bits(last_blocks, call):
    file, old, new = CALLS[call]
    with hal.activated(Cuda(simulate=True)):
        last_blocks(file, {})
        torch.testing.assert_close(*call(), rtol=2e-2, atol=2e-2)
        last_blocks(file, planted(file, old, new))
        # A wrapped offset leads out of the kernel's tensors, or by chance to another of them.
        named = rf"kernel [\w<>, ]+: thread .* in [\w.: ]*{file}:\d+\. Its tensors|Tensor-likes are not close"
        with pytest.raises((hal.HalError, AssertionError), match=named):
            torch.testing.assert_close(*call(), rtol=2e-2, atol=2e-2)
