"""Deterministic mode: implementations and backends whose equal calls may differ refuse, with the reason."""

import pytest
import torch
from host_backend import HostBackend

import hal
from hal import ops
from hal.cli import why
from hal.core import registry
from hal.testing.spy import Spy

REASON = "sums by atomic additions"


class Fast(HostBackend):
    """Has a fast implementation whose results differ, and an ordered one."""

    name = "fast"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def capabilities(self):
        return hal.Capabilities(deterministic=self.deterministic)


Fast.impl(ops.l2norm, id="fast/atomic", nondeterministic=REASON)(ops.l2norm.reference)
Fast.impl(ops.l2norm, id="fast/ordered")(ops.l2norm.reference)


class Never(HostBackend):
    """Has no deterministic mode."""

    name = "never"

    def capabilities(self):
        return hal.Capabilities(deterministic=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    classes = {"fast": Fast, "never": Never, "host": HostBackend}
    monkeypatch.setattr(registry, "load", classes.__getitem__)
    monkeypatch.setenv("HAL_BACKEND", "fast")  # hal.use changes it
    with hal.activated(HostBackend()):
        yield


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("wrap", [lambda backend: backend, Spy])
def test_the_mode_passes_over_an_implementation_that_is_marked(deterministic, wrap):
    backend = hal.use("fast", deterministic=deterministic)
    with hal.activated(wrap(backend)):
        answer = hal.why(ops.l2norm, [torch.ones(3)])
        assert answer.chosen == ("fast/ordered" if deterministic else "fast/atomic")
        assert answer.reasons["fast/atomic"] == ((f"deterministic mode ({REASON})",) if deterministic else ())
        assert ops.l2norm([torch.ones(4)]).item() == 2.0


def test_a_pinned_one_is_refused_in_the_mode():
    hal.use("fast", deterministic=True, pin={"l2norm": "fast/atomic"})
    with pytest.raises(hal.UnsupportedOp, match=f"deterministic mode .{REASON}"):
        ops.l2norm([torch.ones(3)])


def test_a_backend_that_cannot_is_refused_and_one_that_always_is_needs_no_option():
    with pytest.raises(hal.BackendUnavailable, match="'never' has no deterministic mode: equal calls may give"):
        hal.use("never", deterministic=True)
    assert not hal.use("never").capabilities().deterministic
    assert hal.use("host", deterministic=True).capabilities().deterministic


def test_hal_why_has_the_mode(capsys):
    call = ["l2norm", "--backend", "fast", "--arg", "tensors=3,4"]
    assert why.main(call) == 0
    assert "fast/atomic: chosen" in capsys.readouterr().out
    assert why.main([*call, "--deterministic-mode"]) == 0
    out = capsys.readouterr().out
    assert f"fast/atomic: refuses: deterministic mode ({REASON})" in out and "fast/ordered: chosen" in out
