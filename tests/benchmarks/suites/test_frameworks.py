"""The frameworks suite compares the same models: small ones have the losses of their peers, and the goals apply."""

import pytest
import torch

import hal
from hal.bench.harness import goals, runner, target
from hal.bench.suites import frameworks
from hal.testing.reference import Reference

pytest.importorskip("transformers", reason="needs transformers (extra: transformers)")


@pytest.fixture
def reference(monkeypatch):
    backend = Reference()
    monkeypatch.setattr(target, "_backend", backend)
    with hal.activated(backend):
        yield


@pytest.mark.nightly
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_candidates_compute_the_same_loss(family, padded, reference, monkeypatch):
    from hal.integrations.transformers import convert

    def small(module):
        return frameworks.step_of(module, frameworks.batch(padded, 32))

    theirs, ours = (frameworks.model(family, 32, 48, 1) for _ in range(2))
    assert convert(ours, verbose=False).replaced
    torch.testing.assert_close(small(ours)(), small(theirs)())
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_every_case_has_a_goal_and_full_ones_have_those_of_the_docs(monkeypatch):
    monkeypatch.setattr(goals.machine, "features", lambda: {"avx512f"})
    (_, first), *rest = runner.selected("frameworks", ())
    for vendor, least in (("AuthenticAMD", 1.5), ("GenuineIntel", 1.15)):
        monkeypatch.setattr(goals.machine, "vendor", lambda vendor=vendor: vendor)
        assert goals.ratio(first.name, first.shape, "eager", "default") == least
    assert goals.ratio(first.name, first.shape, "compile", "default") == 1.1
    assert goals.share(first.name, first.shape, "GEMM f32", "default") == 0.85
    assert all(goals.ratio(c.name, c.shape, p, "default") for _, c in rest for p in ("eager", "compile"))
