"""The launcher's calls to torch and to CuPy's driver bindings, on fakes that accept the same arguments."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import types

import pytest
import torch

import hal
from hal.backends.cuda import compile, device, launch

CUBINS = {"sm_90": {"a": (b"one", "_Za"), "b": (b"two", "_Zb")}}


class Driver:
    """cupy.cuda.driver: contexts are per thread, and nothing works without one."""

    def __init__(self, context):
        self.context, self.loaded, self.launched = context, [], []

    def _require_context(self):
        if not hasattr(self.context, "device"):
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")

    def moduleLoadData(self, image):
        self._require_context()
        assert type(image) is bytes
        self.loaded.append(image)
        return len(self.loaded)

    def moduleGetFunction(self, module, name):
        self._require_context()
        assert type(module) is int and type(name) is str
        return hash(name) or 1

    def launchKernel(self, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        self._require_context()
        numbers = (f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
        assert all(type(n) is int for n in numbers) and parameters == 0
        keys = (ctypes.c_void_p * 5).from_address(extra)
        assert (keys[0], keys[2], keys[4]) == (1, 2, None)
        size = ctypes.c_size_t.from_address(keys[3]).value
        self.launched.append(((gx, gy, gz), (bx, by, bz), shared, stream, ctypes.string_at(keys[1], size)))


@pytest.fixture
def driver(monkeypatch):
    """One H100 as device 0. It is the current device of every new thread, but the thread has no context on it."""
    context = threading.local()
    fake = Driver(context)
    package = types.ModuleType("cupy.cuda")
    package.driver = fake
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", package)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(context, "device", device))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return fake


def test_a_launch_passes_what_the_driver_takes(driver):
    engine = launch.Device(CUBINS)
    assert not driver.loaded and engine.multiprocessors == 132
    parameters = (5, 2.5, struct.pack("=2q", 6, 7))
    engine.launch("a", (3, 4), 128, 1024, parameters)
    assert driver.launched == [((3, 4, 1), (128, 1, 1), 1024, 77, struct.pack("=qd2q", 5, 2.5, 6, 7))]


def test_the_first_launch_loads_every_kernel(driver):
    """A graph capture may follow, during which a module cannot be loaded."""
    engine = launch.Device(CUBINS)
    engine.launch("a", (1, 1), 32, 0, ())
    engine.launch("b", (1, 1), 32, 0, ())
    assert driver.loaded == [b"one", b"two"]


def test_a_thread_without_a_context_gets_one(driver):
    """Autograd's thread for device 0 is such a thread."""
    engine = launch.Device(CUBINS)
    errors = []

    def work():
        try:
            engine.launch("a", (1, 1), 32, 0, ())
        except RuntimeError as error:
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not errors and len(driver.launched) == 2 and driver.loaded == [b"one", b"two"]


def test_a_device_without_kernels_is_named(driver, monkeypatch):
    engine = launch.Device(CUBINS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(hal.HalError, match="cuda:0 is an sm_75"):
        engine.launch("a", (1, 1), 32, 0, ())


@pytest.mark.parametrize(
    ("capability", "message"),
    [((7, 5), r"7\.5; HAL's kernels need 8\.0"), ((13, 0), r"sm_130, which this NVRTC \(13\.0, up to sm_121\)")],
)
def test_a_device_that_nothing_can_be_compiled_for_is_refused(monkeypatch, capability, message):
    library = types.SimpleNamespace(getSupportedArchs=lambda: (80, 90, 121), getVersion=lambda: (13, 0))
    monkeypatch.setattr(compile, "nvrtc", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    with pytest.raises(hal.BackendUnavailable, match=message):
        device._require_kernels_for(capability)
    device._require_kernels_for((9, 0))


def test_a_driver_that_torch_cannot_use_is_a_reason(monkeypatch):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(hal.BackendUnavailable, match="too old"):
        device.Cuda(simulate=False).build()
