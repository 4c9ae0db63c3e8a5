"""Creates backends with one error each, for the tests of the kit."""

import pytest
import torch
from host_backend import HostBackend

import hal
from hal.testing import run


class Cpu(HostBackend):
    """Has no implementation, and stores float8."""

    name = "planted"

    def capabilities(self):
        return hal.Capabilities(dtypes=hal.Capabilities().dtypes | {torch.float8_e4m3fn, torch.float8_e5m2})


def plant(op, function, *, why_not=None, bwd=None, waivers=None, backend=Cpu):
    """A `backend` whose only implementation is `function(**arguments)`, with the op's signature."""

    class Planted(backend):
        pass

    Planted.impl(
        op,
        id="planted/wrong",
        why_not=why_not,
        bwd=bwd,
        waivers=waivers,
        version=op.version,
    )(with_op_signature(op, function))
    return Planted()


def with_op_signature(op, function):
    """`function(**arguments)` as a function with the op's own signature."""

    def call(*args, **kwargs):
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**bound.arguments)

    call.__signature__ = op.signature
    call.__name__ = op.name
    return call


def verdict(backend, op, examples=10):
    """The kit's rows on this op, and the messages of those that failed."""
    report = run(backend, ops=[op.name], examples=examples)
    return report, " | ".join(r.message for r in report.failed)


class Faults:
    """The wrong implementations of a test module: `@faults(op, "text", ...)` above one says what the kit must say."""

    def __init__(self):
        self.cases = []

    def __call__(self, op, *messages):
        def record(function):
            self.cases.append(pytest.param(op, function, messages, id=function.__name__))
            return function

        return record
