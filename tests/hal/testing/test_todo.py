"""hal parity --todo: the order of a training step, and measured shares of the time, forward and backward."""

import time

import pytest
import torch

import hal
from hal import ops
from hal.cli import main
from hal.testing import Reference
from hal.testing.todo import Need, Needs, Stopwatch, measure_needs, todo


@pytest.fixture(scope="module")
def needs():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield measure_needs()
    torch.set_num_threads(threads)


def test_the_order_is_that_of_a_step(needs):
    order = [n.op for n in needs.needs]
    gpt2 = [n.op for n in needs.needs if "gpt2" in n.calls]
    assert gpt2[0] == "embedding"
    assert gpt2.index("linear") < gpt2.index("flash_attention") < gpt2.index("cross_entropy") < gpt2.index("adamw")
    assert order.index("rotary") > order.index("adamw")  # the first shape, gpt2, does not call it


def test_calls_are_those_of_one_step(needs):
    linear = next(n for n in needs.needs if n.op == "linear")
    # Two micro-batches; two layers of four products each, and the output layer. Full recomputation runs layers twice.
    # The second microbatch's input gradients are separate calls, beside those that accumulate weight gradients.
    assert linear.calls == {"gpt2": 27, "llama": 43, "unfused": 27}
    sums = next(n for n in needs.needs if n.op == "linear_wgrad")
    assert sums.calls == dict.fromkeys(linear.calls, 9)


def test_shares_are_shares_of_a_whole(needs):
    for shape in ("gpt2", "llama", "unfused"):
        shares = [n.shares[shape] for n in needs.needs if shape in n.shares]
        assert all(0 < s < 1 for s in shares)
        assert 0.2 < sum(shares) <= 1


def test_the_backward_is_counted_too():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.01)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            time.sleep(0.04)
            return dy

    class Sleepy(hal.Backend):
        name = "sleepy"
        probe, device, synchronize, comm = Reference.probe, Reference.device, Reference.synchronize, Reference.comm

    @Sleepy.impl(ops.swiglu, id="sleepy/swiglu")
    def swiglu(x, bias=None):
        return ops.swiglu.reference(Slow.apply(x), bias)

    watch = Stopwatch(Sleepy())
    x = torch.randn(3, 4, requires_grad=True)
    with hal.activated(watch):
        y = ops.swiglu(x)
        forward = watch.seconds["swiglu"]
        y.sum().backward()
    assert forward >= 0.01
    assert watch.seconds["swiglu"] - forward >= 0.04
    expected = torch.autograd.grad(ops.swiglu.reference(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)


NEEDS = Needs("cpu_ref", (Need("linear", {"gpt2": 9}, {"gpt2": 0.5}), Need("rotary", {"llama": 2}, {"llama": 0.1})))


def test_the_text_lists_what_is_missing_with_its_share():
    text = todo("acme", ["rotary"], NEEDS)
    assert "acme has 1 of the 2 ops that training needs." in text
    assert "measured on cpu_ref" in text
    assert "linear                   50.0%         -         -   9, -, -" in text
    assert "rotary  " not in text
    assert "Missing and not used by these models: " in text
    assert "hal train --backend acme --fallback reference" in text


@pytest.mark.slow
def test_a_complete_backend_is_told_so(capsys):
    assert todo("acme", list(hal.OPS), NEEDS).endswith("Nothing is missing.")
    text = todo("acme", [op.name for op in hal.OPS.values() if op.decompose is None], NEEDS)
    missing, composed = text.split(
        "Nothing is missing.\nComposed of other ops, so that an implementation can only be faster: "
    )
    assert "Missing" not in missing
    assert set(composed.strip(".").split(", ")) == {op.name for op in hal.OPS.values() if op.decompose is not None}
    assert main(["parity", "--backend", "cuda", "--todo"]) == 0  # needs no device
    with pytest.raises(SystemExit, match="2"):
        main(["parity", "--backend", "cuda", "--todo", "--op", "swiglu"])
    assert "Nothing is missing." in capsys.readouterr().out


@pytest.mark.slow
def test_the_times_are_those_of_the_references_which_need_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert measure_needs().measured_on == "reference"
