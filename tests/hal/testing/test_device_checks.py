"""The kit's checks of capabilities and optional methods catch backends that promise what they do not do."""

import contextlib
import threading

import pytest
import torch
from host_backend import HostBackend
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal import ops
from hal.testing import run
from hal.testing.device_checks import check_device


class Plain(HostBackend):
    """A host backend with one op."""


Plain.impl(ops.rms_norm, id="plain/torch")(ops.rms_norm.reference)


def rows(backend):
    return {row.dtype: row for row in check_device(backend)}


def test_a_backend_without_optional_capabilities_passes_and_the_rest_is_declined():
    found = rows(Plain())
    assert {name: row.status for name, row in found.items()} == {
        "dtypes": "pass",
        "streams": "pass",
        "graphs": "declined",
        "pools": "declined",
    }
    report = run(Plain(), ops=["device"])
    assert [row.op for row in report.rows] == ["device"] * 4 and report.ok and report.missing == []


def test_a_dtype_that_loses_values_is_named(monkeypatch):
    class Storage(Plain):
        def capabilities(self):
            return hal.Capabilities(dtypes=frozenset({torch.float32, torch.bool, torch.complex64}))

        def device(self, index=0):
            return torch.device("cpu")

    assert rows(Storage())["dtypes"].samples == 3
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y: x.zero_() if x.dtype is torch.complex64 else real(x, y))
    assert rows(Storage())["dtypes"].message.startswith("torch.complex64: [0.0, 1.0")


class _Later(TorchDispatchMode):
    """Runs each operation on a thread of its own, after the one before, once somebody waits for it."""

    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = torch.full_like(args[0], float("nan"))
        before = self.backend.last

        def work():
            if before is not None:
                before.join()
            self.backend.awaited.wait()
            torch.ops.aten.copy_(result, function(*args, **(kwargs or {})))

        self.backend.last = threading.Thread(target=work)
        self.backend.last.start()
        return result


class Streams(Plain):
    """Work inside of `stream` is done later by a thread; an event is the last thread, for which `wait` waits."""

    last = None
    orders = True

    def __init__(self):
        super().__init__()
        self.awaited = threading.Event()

    @contextlib.contextmanager
    def stream(self):
        with _Later(self):
            yield

    def event(self):
        return self.last

    def wait(self, event):
        if event is not None and self.orders:
            self.awaited.set()
            event.join()

    def synchronize(self):
        self.awaited.set()
        if self.last is not None:
            self.last.join()


@pytest.mark.parametrize("orders", [True, False])
def test_a_missing_wait_between_streams_is_caught(orders):
    backend = Streams()
    backend.orders = orders
    row = rows(backend)["streams"]
    backend.synchronize()
    assert row.status == ("pass" if orders else "fail")
    assert orders or "event() and wait() do not order the work" in row.message


@pytest.mark.parametrize("how", ["repeats", "repeats old values", "is missing"])
def test_a_recorded_call_has_to_repeat_with_new_inputs(how):
    class Graphs(Plain):
        def capabilities(self):
            return hal.Capabilities(graphs=True)

        if how != "is missing":

            def capture(self, function):
                result = function()
                return (lambda: result.copy_(function())) if how == "repeats" else (lambda: result)

    row = rows(Graphs())["graphs"]
    assert row.status == ("pass" if how == "repeats" else "fail")
    messages = {
        "repeats": "",
        "repeats old values": "does not repeat with the new values",
        "is missing": "cannot record",
    }
    assert messages[how] in row.message


@pytest.mark.parametrize("returns", [True, False])
def test_a_pool_has_to_return_its_memory(returns):
    class Pools(Plain):
        reserved = 0

        def capabilities(self):
            return hal.Capabilities(memory_pools=True)

        def memory_stats(self):
            return {"reserved": self.reserved}

        @contextlib.contextmanager
        def memory_pool(self):
            self.reserved += 1 << 26
            yield
            self.reserved -= (1 << 26) * returns

    row = rows(Pools())["pools"]
    assert row.status == ("pass" if returns else "fail")
    assert returns or "before, in and after a pool" in row.message


@pytest.mark.parametrize("claims", [True, False])
def test_equal_calls_may_differ_in_bits_only_without_the_capability(claims):
    noise = iter(range(10_000))

    class Noisy(HostBackend):
        def capabilities(self):
            return hal.Capabilities(deterministic=claims)

    @Noisy.impl(ops.rms_norm, id="noisy")
    def rms_norm(x, weight, eps=1e-5):
        return ops.rms_norm.reference(x, weight, eps) * (1.0 + 1e-7 * (next(noise) % 2))

    report = run(Noisy(), ops=["rms_norm"], examples=0, dtypes=[torch.float32])
    (row,) = (row for row in report.rows if row.implementation == "noisy")
    assert row.status == ("fail" if claims else "pass")
    assert not claims or "differs in bits in a second, equal call" in row.message
