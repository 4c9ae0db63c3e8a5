"""The execution model itself: its results, the errors it reports, and that faults planted in kernels are caught."""

from __future__ import annotations

import re

import pytest
import torch
from cuda_helpers import planted

import hal
from hal.backends.cuda import Cuda, launch

HEAD = '#include "common.h"\n'


def run_kernel(kernel: str, *parameters, threads: int = 64, grid=(1, 1), shared: int = 0) -> None:
    launch.run(kernel, grid, threads, *parameters, shared=shared)


def test_shuffles_votes_barriers_and_atomics(simulator):
    source = (
        HEAD
        + """
__global__ void probe(float *out) {
    const float lane = (float)(threadIdx.x % 32);
    out[threadIdx.x] = __shfl_down_sync(0xffffffffu, lane, 4);
    out[64 + threadIdx.x] = __shfl_xor_sync(0xffffffffu, lane, 1);
    out[128 + threadIdx.x] = __shfl_sync(0xffffffffu, lane, 7);
    out[192 + threadIdx.x] = (float)__any_sync(0xffffffffu, threadIdx.x == 40);
    out[256 + threadIdx.x] = (float)__syncthreads_or(threadIdx.x == 63);
    atomicAdd(out + 320, 1.0f);
}
EXPORT(probe)
"""
    )
    simulator({"probe.cu": source})
    out = torch.zeros(321)
    run_kernel("probe", out)
    lane = torch.arange(64) % 32
    assert out[:64].tolist() == torch.where(lane + 4 < 32, lane + 4, lane).tolist()
    assert out[64:128].tolist() == (lane ^ 1).tolist()
    assert out[128:192].tolist() == [7.0] * 64
    assert out[192:256].tolist() == [0.0] * 32 + [1.0] * 32
    assert out[256:320].tolist() == [1.0] * 64 and out[320] == 64


WRONG = {
    "barrier in a branch": ("if (threadIdx.x < 32) __syncthreads();", "diverge: thread"),
    "two different barriers": (
        "if (threadIdx.x < 32) {\n __syncthreads();\n } else {\n __syncthreads();\n }",
        "waits at the barrier in probe.cu",
    ),
    "a lane that never arrives": (
        "if (threadIdx.x != 5) out[0] = __shfl_xor_sync(0xffffffffu, out[0], 1);",
        "waits in the warp operation",
    ),
    "a shuffle from outside the mask": (
        "if (threadIdx.x < 16) out[0] = __shfl_xor_sync(0xffffu, out[0], 16);",
        "not in the mask",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_reported_with_its_line(simulator, name):
    body, message = WRONG[name]
    source = HEAD + "__global__ void probe(float *out) {\n out[0] = 0;\n" + body + "\n}\nEXPORT(probe)\n"
    simulator({"probe.cu": source})
    out = torch.zeros(4)
    with pytest.raises(hal.HalError, match=message) as error:
        run_kernel("probe", out)
    assert re.search(r"kernel probe", str(error.value))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"threads": 48}, "a GPU refuses"),
        ({"threads": 512}, "a GPU refuses"),
        ({"grid": (1, 70000)}, "a GPU refuses"),
        ({"shared": 2048}, "2048 bytes of shared memory were requested, a block has 1024"),
    ],
)
def test_a_launch_that_a_gpu_refuses_is_refused(simulated, how, message):
    with pytest.raises(hal.HalError, match=message):
        run_kernel("root_of_sum", 0, 0, 0, **how)


def test_wrong_parameters_and_unknown_kernels_are_refused(simulated):
    with pytest.raises(hal.HalError, match="not 8 bytes"):
        run_kernel("root_of_sum", 0)
    with pytest.raises(hal.HalError, match="no such kernel"):
        run_kernel("root_of_sums", 0)


def test_the_order_of_threads_is_random_and_the_results_are_not(simulator):
    source = (
        HEAD + "__global__ void probe(float *out) { out[1 + threadIdx.x] = atomicAdd(out, 1.0f); }\nEXPORT(probe)\n"
    )
    engine = simulator({"probe.cu": source}, keep=("reduce.cu",))
    orders, sums = set(), set()
    for _ in range(4):
        out = torch.zeros(65)
        run_kernel("probe", out)
        orders.add(tuple(out.tolist()))
        partial, total = torch.linspace(0, 1, 37 * 50).view(37, 50), torch.empty(50)
        engine.launch("column_sum<f32>", (2, 1), 256, 0, (partial, total, 37, 50))
        sums.add(tuple(total.tolist()))
    assert len(orders) == 4 and len(sums) == 1


def test_uninitialised_shared_memory_is_nan(simulator):
    source = HEAD + "__global__ void probe(float *out) { DYNAMIC_SHARED(float, s); out[0] = s[0]; }\nEXPORT(probe)\n"
    simulator({"probe.cu": source})
    out = torch.zeros(1)
    run_kernel("probe", out, shared=128)
    assert out.isnan().all()


def test_conversions_are_torchs(simulated):
    """Every 16-bit pattern to float32 and back; and float32 values of every size to 16 bits, ties included."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    random = torch.randint(-(2**31), 2**31, (20000,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float16, torch.bfloat16):
        x = patterns.view(dtype)
        wide = hal.ops.bias_dropout_add(x, None, torch.zeros(x.shape, dtype=torch.float32))
        torch.testing.assert_close(wide, x.float() + 0.0, rtol=0, atol=0, equal_nan=True)
        halfway = (x.float() + x.roll(-1).float()) / 2
        values = torch.cat([random.to(torch.int32).view(torch.float32), x.float(), halfway])
        copy, zero = torch.empty(values.shape, dtype=dtype), torch.zeros_like(values)
        hal.ops.adamw([values.clone()], [zero], [zero.clone()], [zero.clone()], step=1, lr=0.0, model_params=[copy])
        torch.testing.assert_close(copy, values.to(dtype), rtol=0, atol=0, equal_nan=True)


BARRIERS = {
    "none": ("common.h", ""),
    "before the sums of other warps are read": ("common.h", "    __syncthreads();\n    Floats<N> result;"),
    "before the next reduction overwrites them": ("common.h", "    __syncthreads();\n    return result;"),
    "between the pieces and their total": ("reduce.cu", "        __syncthreads();\n        if (warp == 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", BARRIERS)
def test_a_missing_barrier_is_caught(simulator, fault):
    """Wrong numbers, as on a GPU, but reproducibly: rows of several warps, and several rows per block."""
    file, old = BARRIERS[fault]
    files = planted(file, old, old.replace("__syncthreads();", "")) if old else {}
    simulator(files, keep=("norm.cu", "reduce.cu"))
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((40, 1000), (1000,), (1000,))]
    dy = torch.randn(40, 1000)
    with hal.activated(Cuda(simulate=True)):
        grads = torch.autograd.grad(hal.ops.layer_norm(*inputs), inputs, dy)
    exact = torch.autograd.grad(hal.ops.layer_norm.reference(*inputs), inputs, dy)
    sound = all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(grads, exact))
    assert sound == (fault == "none")


def test_a_recorded_call_repeats_its_work_and_not_the_code_around_it(simulated):
    """Numbers of the host stay as they were at the recording, and tensors are read and written where they were."""
    x, total, factors = torch.ones(4, 64), torch.zeros(64), iter([1.0, 2.0, 3.0])
    weight = torch.full((64,), 2.0)

    def work():
        y = hal.ops.rms_norm(x * next(factors), weight)
        total.add_(y[0]).unsqueeze_(0).squeeze_(0)
        return torch.stack([y.sum(), total.sum()]).split(1)

    repeat = simulated.capture(work)
    once = hal.ops.rms_norm(x, weight)[0]
    assert torch.equal(total, once)  # of the call before the recording, which does no work itself
    x.mul_(3.0)
    first = repeat()
    expected = hal.ops.rms_norm(x * 2.0, weight)
    assert first[0].item() == expected.sum().item() and torch.equal(total, once + expected[0])
    weight.fill_(5.0)
    second = repeat()
    assert second[0] is first[0] and first[0].item() == hal.ops.rms_norm(x * 2.0, weight).sum().item()
    assert next(factors, None) == 3.0


def test_a_read_of_the_host_cannot_be_recorded(simulated):
    for read in (lambda x: x[0].item(), lambda x: x[x > 0], lambda x: x.nonzero()):
        with pytest.raises(hal.HalError, match="wait for the device, while a graph is recorded"):
            simulated.capture(lambda read=read: read(torch.ones(3)))
    assert hal.ops.rms_norm(torch.ones(2, 8), torch.ones(8)).sum() > 15.0  # launches run again
