"""Backends for the diagnostic commands: a working one, and one for each kind of failure."""

import sys
import types

import pytest
import torch
from host_backend import HostBackend

import hal
from hal import ops


class Healthy(HostBackend):
    name = "healthy"
    calls = 0

    def __init__(self, simulate: bool = False):
        self.simulate = self.simulated = simulate

    def probe(self):
        return hal.Probe(True, 1, "one imaginary device", {"driver": "12.3", "kind": "one"})


def only_two_dimensions(call):
    return [] if call.x.ndim == 2 else [f"{call.x.ndim} dimensions (the kernel has 2)"]


@Healthy.impl(ops.rms_norm, id="healthy/fast", why_not=only_two_dimensions)
def fast(x, weight, eps=1e-5):
    return ops.rms_norm.reference(x, weight, eps)


@Healthy.impl(ops.rms_norm, id="healthy/slow")
def slow(x, weight, eps=1e-5):
    return ops.rms_norm.reference(x, weight, eps)


class Wrong(Healthy):
    name = "wrong"


@Wrong.impl(ops.l2norm, id="wrong/squared")
def l2norm(tensors):
    return ops.l2norm.reference(tensors) ** 2


@Wrong.impl(ops.swiglu, id="wrong/shy", why_not=lambda call: ["it is Friday"])
def swiglu(x, bias=None):
    return ops.swiglu.reference(x, bias)


class Absent(Healthy):
    name = "absent"

    def probe(self):
        return hal.Probe(self.simulate, int(self.simulate), "no such card in this machine")


class Uncompiled(Healthy):
    name = "uncompiled"

    def build(self):
        raise hal.BackendUnavailable("no compiler; install one with: apt install gcc")


class Moody(Healthy):
    name = "moody"

    def probe(self):
        type(self).calls += 1
        return hal.Probe(True, 1, f"asked {type(self).calls} times")


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    module = types.ModuleType("imaginary_backends")
    for cls in (Healthy, Wrong, Absent, Uncompiled, Moody):
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(hal.core.registry.IN_TREE, cls.name, f"imaginary_backends:{cls.__name__}")
    monkeypatch.setitem(hal.core.registry.IN_TREE, "broken", "no_such_module:Nothing")
    monkeypatch.setitem(sys.modules, "imaginary_backends", module)
    monkeypatch.setenv("HAL_BACKEND", "")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    with hal.activated(hal.testing.Reference()):  # restores whatever was active
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys):
    """run("info", "--backend", "x") -> (exit code, stdout, stderr)."""

    def call(*argv):
        from hal.cli import main

        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
