"""The launcher's calls to torch and to CuPy's driver bindings, on fakes that accept the same arguments."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

import hal
from hal.backends.cuda import compile, device, launch
from hal.backends.cuda.tensors import different_devices

CUBINS = {"sm_90": {"a": (b"one", "_Za"), "b": (b"two", "_Zb")}}


class Driver:
    """cupy.cuda.driver: contexts are per thread, and nothing works without one. Functions belong to a context."""

    def __init__(self, context):
        self.context, self.loaded, self.launched, self.contexts, self.allowed = context, [], [], {}, {}

    def _require_context(self):
        if not self.ctxGetCurrent():
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")

    def ctxGetCurrent(self):
        return getattr(self.context, "current", 0)

    def ctxSetCurrent(self, context):
        assert type(context) is int
        self.context.current = context

    def moduleLoadData(self, image):
        self._require_context()
        assert type(image) is bytes
        self.loaded.append(image)
        return len(self.loaded)

    def moduleGetFunction(self, module, name):
        self._require_context()
        assert type(module) is int and type(name) is str
        self.contexts[module * 100 + len(name)] = self.ctxGetCurrent()
        return module * 100 + len(name)

    def funcSetAttribute(self, f, attribute, value):
        assert attribute == 8 and self.contexts[f] == self.ctxGetCurrent()
        self.allowed[f] = value

    def launchKernel(self, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        self._require_context()
        numbers = (f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
        assert all(type(n) is int for n in numbers) and parameters == 0
        assert shared <= self.allowed.get(f, 48 * 1024), "CUDA_ERROR_INVALID_VALUE: more shared memory than allowed"
        assert self.contexts[f] == self.ctxGetCurrent(), "CUDA_ERROR_INVALID_HANDLE: a function of another context"
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
    properties = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_primary_context", lambda device: 1000 + device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77 + device, raising=False)
    return fake


def test_a_launch_passes_what_the_driver_takes(driver):
    check_a_launch(driver, launch)


def check_a_launch(driver, launch):
    engine = launch.Device(CUBINS)
    assert not driver.loaded and engine.multiprocessors == 132
    parameters = (5, 2.5, struct.pack("=2q", 6, 7))
    engine.launch("a", (3, 4), 128, 1024, parameters)
    assert driver.launched == [((3, 4, 1), (128, 1, 1), 1024, 77, struct.pack("=qd2q", 5, 2.5, 6, 7))]


WRONG = {
    "the default stream": ("= self._stream(device)", "= 0"),
    "the stream of another device": ("= self._stream(device)", "= self._stream(device + 1)"),
    "another block size": ("1, threads, 1, 1, shared, stream", "1, 32, 1, 1, shared, stream"),
    "no shared memory": ("1, threads, 1, 1, shared, stream", "1, threads, 1, 1, 0, stream"),
    "parameters of the last launch": ("ctypes.memmove(to.data, packed, len(packed))", "pass"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_in_the_launch_is_found(driver, fault):
    """By the test above, planted in the launcher's source."""
    text, (right, wrong) = Path(launch.__file__).read_text(), WRONG[fault]
    assert text.count(right) == 1, f"launch.py no longer contains {right!r}; plant the fault elsewhere"
    planted = types.ModuleType("planted")
    exec(text.replace(right, wrong), vars(planted))
    planted._primary_context = launch._primary_context  # the fixture's
    with pytest.raises(AssertionError):
        check_a_launch(driver, planted)


def test_a_block_gets_more_shared_memory_by_opting_in(driver):
    engine = launch.Device(CUBINS)
    assert engine.shared_memory == 112 * 1024
    for shared in (1024, 112 * 1024, 60 * 1024):
        engine.launch("a", (1, 1), 32, shared, ())
    assert [shared for _, _, shared, *_ in driver.launched] == [1024, 112 * 1024, 60 * 1024]
    assert list(driver.allowed.values()) == [112 * 1024]


def test_parameters_of_later_launches_are_theirs(driver):
    """Kinds are those of the first launch; tensors may be absent, and structs have other values."""
    engine, x = launch.Device(CUBINS), torch.zeros(3)
    struct_of = lambda n: launch.Struct("=2q", x, n)  # noqa: E731
    engine.launch("a", (1, 1), 32, 0, (None, 1, 0.5, struct_of(7)))
    engine.launch("a", (1, 1), 32, 0, (x, -2, 2.5, struct_of(8)))
    at = x.data_ptr()
    assert [packed for *_, packed in driver.launched] == [
        struct.pack("=2qd2q", 0, 1, 0.5, at, 7),
        struct.pack("=2qd2q", at, -2, 2.5, at, 8),
    ]
    with pytest.raises(hal.HalError, match="a kernel may have 4096"):
        engine.launch("b", (1, 1), 32, 0, (b"\0" * 5000,))


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


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @staticmethod
    def __new__(cls, index):
        made = torch.zeros(4).as_subclass(cls)
        made.index = index
        return made

    @property
    def device(self):
        return torch.device("cuda", self.index)


def test_a_launch_runs_on_the_device_of_its_tensors(driver, monkeypatch):
    """The current device stays what it was: torch derives it from the current context."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine, x, y = launch.Device(CUBINS), OnDevice(0), OnDevice(1)
    driver.ctxSetCurrent(1000)
    for kernel, parameters in (("a", (x,)), ("a", (y,)), ("b", (3, launch.Struct("=q", y))), ("a", (x,))):
        engine.launch(kernel, (1, 1), 32, 0, parameters)
        assert driver.ctxGetCurrent() == 1000
    assert [stream for _, _, _, stream, _ in driver.launched] == [77, 78, 78, 77]
    assert driver.loaded == [b"one", b"two"] * 2


def test_a_thread_without_a_context_keeps_that_of_its_current_device_only(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine = launch.Device(CUBINS)
    engine.launch("a", (1, 1), 32, 0, (OnDevice(1),))
    assert driver.ctxGetCurrent() == 0
    engine.launch("a", (1, 1), 32, 0, (OnDevice(0),))
    assert driver.ctxGetCurrent() == 1000


def test_tensors_on_two_devices_are_refused_together(driver):
    assert different_devices([OnDevice(0), None, OnDevice(1)]) == [
        "tensors on cuda:0 and cuda:1 (a kernel runs on one device)"
    ]
    assert different_devices([OnDevice(1), None, OnDevice(1), torch.empty(2, device="meta")]) == []


def test_kernels_are_loaded_before_a_capture_or_the_error_says_how(driver, monkeypatch):
    engine = launch.Device(CUBINS)
    engine.load(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    engine.launch("a", (1, 1), 32, 0, ())
    with pytest.raises(hal.HalError, match="not loaded on cuda:1, and cannot be while a graph is captured"):
        engine.load(1)
    assert driver.ctxGetCurrent() == 1000


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
