"""Tests of the device, its buffers and its errors, which the kit does not cover."""

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hal_opencl import OpenCL, engine, memory

import hal
from hal import ops
from hal.testing.processes import run_processes


def step(width=96):
    """Forward and backward of a small network, and an optimizer step."""
    x = torch.randn(40, width, requires_grad=True)
    w = torch.randn(2 * width, width, requires_grad=True)
    y = ops.swiglu(ops.linear(ops.rms_norm(x, torch.ones(width)), w))
    y = ops.bias_dropout_add(y, None, x, p=0.1, rng=hal.Rng(3))
    y.sum().backward()
    state = [torch.zeros_like(w), torch.zeros_like(w)]
    with torch.no_grad():
        ops.adamw([w], [w.grad], [state[0]], [state[1]], step=1, lr=0.1)
    return w.detach()


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def after_steps(mode):
    """(reserved, kernels, resident) bytes and count after 30 steps and after 330, and the last memory figures."""
    backend, figures = hal.use("opencl", memory=mode), []
    for count in (30, 300):
        for _ in range(count):
            step()
        gc.collect()
        figures.append((backend.memory_stats()["reserved"], len(engine.engine()._kernels), resident()))
    return *figures, backend.memory_stats()


@pytest.mark.parametrize("mode", ["zero_copy", "staging"])
def test_many_steps_leave_nothing_behind(mode):
    # In a separate process, because the memory of a process depends on everything that ran in it before.
    ((first, last, stats),) = run_processes(1, after_steps, mode)
    assert stats["allocated"] == 0
    assert stats["peak"] > 40 * 96 * 4
    assert last[:2] == first[:2]
    assert last[2] - first[2] < 8 << 20


def test_both_memory_modes_give_the_same_bits(use):
    results = []
    for mode in ("zero_copy", "staging"):
        use(memory=mode)
        torch.manual_seed(0)
        results.append(step())
    assert torch.equal(*results)


def test_the_peak_can_be_restarted(use):
    backend = use()
    step(256)
    high = backend.memory_stats()["peak"]
    backend.reset_peak_memory()
    step(32)
    assert 0 < backend.memory_stats()["peak"] < high


def test_tensors_of_one_storage_may_meet_in_a_call(use):
    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    expected = ops.flash_attention.reference(q, k, v, layout="BSND")
    for mode in ("zero_copy", "staging"):
        use(memory=mode)
        assert torch.allclose(ops.flash_attention(q, k, v, layout="BSND"), expected, atol=1e-5)
        first = ops.flash_attention(q[:, :2], q, q, layout="BSND")  # one address, two sizes
        assert torch.allclose(first, ops.flash_attention.reference(q[:, :2], q, q, layout="BSND"), atol=1e-5)


def test_a_temporary_lives_until_its_kernels_have_run(opencl):
    bias = torch.randn(64)[::2]  # made contiguous for the call, and nothing else references the copy
    x = torch.randn(400, 32)
    for _ in range(20):
        assert torch.allclose(ops.bias_dropout_add(x, bias, x), x + bias + x, atol=1e-6)


def test_an_error_inside_a_call_releases_its_buffers(use):
    backend = use()
    with pytest.raises(ZeroDivisionError), memory.KernelCall() as call:
        call.scratch(1000)
        assert backend.memory_stats()["allocated"] == 4000
        raise ZeroDivisionError
    assert backend.memory_stats()["allocated"] == 0


def test_no_memory_is_an_error_of_its_own(opencl):
    with pytest.raises(engine.OutOfDeviceMemory, match="out of memory") as caught, memory.KernelCall() as call:
        call.scratch(1 << 48)
    assert isinstance(caught.value, hal.HalError)
    assert isinstance(caught.value, MemoryError)
    step()  # the device must still work


def test_a_refused_launch_names_the_kernel(opencl, monkeypatch):
    monkeypatch.setattr(engine.engine(), "group", 1 << 20)
    expected = r"running column_sum \(reduce.cl\): OpenCL reports"
    with pytest.raises(hal.HalError, match=expected), memory.KernelCall() as call:
        call.run("reduce", "column_sum", {"T": torch.float32}, (1,), None, None, 1, 1)


def test_a_program_that_does_not_compile_shows_the_log(opencl):
    with pytest.raises(hal.HalError, match=r"does not build reduce.cl with .*-DT=f32 -DNONSENSE=1") as caught:
        engine.engine().program("reduce", {"T": torch.float32, "NONSENSE": 1, "column_sum": 7})
    assert "error" in str(caught.value)


def test_programs_are_built_once_per_options(opencl):
    e = engine.engine()
    first = e.program("reduce", {"T": torch.float32})
    assert e.program("reduce", {"T": torch.float32}) is first
    assert e.program("reduce", {"T": torch.bfloat16}) is not first


def test_kernels_are_timed_when_asked(use):
    backend = use(profile=True)
    step()
    backend.synchronize()
    times = backend.kernel_times()
    assert times["adamw"][0] == 1
    assert times["multiply"][0] == 3
    assert all(0 < seconds < 10 for _, seconds in times.values())
    backend = use()
    step()
    assert backend.kernel_times() == {}


def test_what_the_constructor_refuses():
    with pytest.raises(hal.HalError, match="unknown memory mode 'shared'; choose one of auto, zero_copy, staging"):
        hal.use("opencl", memory="shared")
    with pytest.raises(hal.BackendUnavailable, match="device_number=99, but the OpenCL drivers report"):
        hal.use("opencl", device_number=99)
    with pytest.raises(hal.HalError, match="lanes must be 1, 4, 8 or 16 and group a power of 2; got 3"):
        hal.use("opencl", lanes=3)
    with pytest.raises(hal.HalError, match="index 1 was asked for"):
        hal.backend().device(1)


def test_without_pyopencl_the_probe_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    probe = OpenCL().probe()
    assert not probe.ok
    assert "pip install pyopencl" in probe.reason


def test_without_a_driver_the_probe_says_so(monkeypatch):
    import pyopencl

    def no_platforms():
        raise pyopencl.LogicError("clGetPlatformIDs", -1001, "")

    monkeypatch.setattr(pyopencl, "get_platforms", no_platforms)
    probe = OpenCL().probe()
    assert not probe.ok
    assert "pocl-opencl-icd" in probe.reason


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"available": False}, "not available"),
        ({"compiler_available": False}, "not available"),
        ({"profile": "EMBEDDED_PROFILE"}, "need the full profile"),
        ({"version": "OpenCL 1.1 Old"}, "need OpenCL 1.2"),
        ({"version": "OpenCL 1.10 New"}, ""),
    ],
)
def test_a_device_that_cannot_run_the_kernels_is_refused(opencl, monkeypatch, change, reason):
    real = engine.engine().device
    names = ("available", "compiler_available", "profile", "version", "name", "platform", "host_unified_memory")
    device = SimpleNamespace(**{**{n: getattr(real, n) for n in names}, **change})
    monkeypatch.setattr("hal_opencl.device.devices", lambda: [device])
    probe = OpenCL().probe()
    assert probe.ok == (not reason)
    assert reason in probe.reason


def test_a_probe_does_not_raise(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "first")
    probe = OpenCL().probe()
    assert not probe.ok and "looking for an OpenCL device failed: ValueError" in probe.reason


@pytest.mark.parametrize("rank, number", [(None, 0), ("0", 0), ("1", 1), ("2", 0)])
def test_the_processes_of_a_machine_share_its_devices_out(monkeypatch, rank, number):
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert OpenCL()._number(2) == number
    assert OpenCL(device_number=1)._number(2) == 1


def test_an_unbuilt_backend_says_what_to_do(monkeypatch):
    monkeypatch.setattr(engine, "_engine", None)
    with pytest.raises(hal.HalError, match=r"call hal.use\('opencl'\)"):
        ops.layer_norm(torch.ones(2, 2), torch.ones(2), torch.ones(2))


def test_scalars_reach_kernels_in_full(opencl):
    """Seeds and offsets have 64 bits, some of which a conversion to a signed integer or a double would lose."""
    rng = hal.Rng(2**64 - 1, 2**64 - 3)
    assert torch.equal(ops.philox_uniform((9,), rng), ops.philox_uniform.reference((9,), rng, device="cpu"))
    assert np.uint64(rng.seed) == 2**64 - 1
