"""Makes backends that are wrong in one way, for the tests of the kit."""

import torch

import hal
from hal.testing import run


class Cpu(hal.Backend):
    """The four methods, on the CPU, and no implementation."""

    name = "planted"

    def probe(self):
        return hal.Probe(True, 1, "the CPU")

    def device(self, index=0):
        return torch.device("cpu")

    def synchronize(self):
        pass

    def comm(self, ranks=None, *, timeout=600.0):
        return hal.Solo()


def plant(op, function, *, why_not=None, bwd=None, waivers=None):
    """A backend whose only implementation is `function(**arguments)`, given the op's signature here."""

    class Planted(Cpu):
        pass

    Planted.impl(
        op,
        id="planted/wrong",
        why_not=why_not and dressed(op, why_not),
        bwd=bwd,
        waivers=waivers,
    )(dressed(op, function))
    return Planted()


def dressed(op, function):
    """`function(**arguments)` as a function of the op's own signature."""

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
