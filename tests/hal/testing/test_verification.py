"""Verifier: calls of a program in progress are compared with the reference, and wrong ones are kept."""

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch

import hal
from hal import Rng, ops
from hal.testing.production.live_blocks import blocks_of
from hal.testing.verification import Verifier, replay


@pytest.fixture
def corrupted():
    """Activates cpu_ref with another function in place of the first implementation of an op: function(call) -> call."""
    plain = hal.use("cpu_ref")

    def make(op, around):
        instance = type(plain)()
        instance.build()
        first, *rest = instance.impls[op.name]
        instance.impls = {**instance.impls, op.name: [dataclasses.replace(first, call=around(first.call)), *rest]}
        hal.activate(instance)

    yield make
    hal.activate(plain)


def doubled_last_row(call):
    def wrong(*args, **kwargs):
        y = call(*args, **kwargs)
        return torch.cat([y[:-1], 2 * y[-1:]])

    return wrong


def step_lost(call):
    def wrong(params, grads, exp_avgs, exp_avg_sqs, **rest):
        before = params[-1][:3].clone()
        call(params, grads, exp_avgs, exp_avg_sqs, **rest)
        params[-1][:3] = before

    return wrong


def verified(function, times=10, **options):
    verifier = Verifier(1.0, seed=3, **options)
    with verifier.watching():
        for _ in range(times):
            function()
    return verifier


def tensors(*shapes, grad=True):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(s, generator=generator).requires_grad_(grad) for s in shapes]


def every_op():
    """One call each of the ops of a dense model, in its layouts, forward and backward."""
    rng = Rng(7).block((40, 3, 64), (20, 0, 0))
    x, residual = tensors((20, 3, 64), (20, 3, 64))
    weight, bias, wide, to_wide = tensors((64,), (64,), (20, 3, 128), (128, 64))
    q, k = tensors((20, 3, 64), (20, 3, 32))
    cos, sin = tensors((20, 8), (20, 8), grad=False)
    ids = torch.arange(60).view(20, 3) % 50
    (table,) = tensors((50, 64))
    yield ops.rms_norm(x, weight)
    yield ops.layer_norm(x, weight, bias)
    yield ops.linear(x, to_wide)
    yield ops.swiglu(wide)
    yield ops.bias_gelu(x, bias)
    yield ops.dropout(x, 0.1, rng)
    yield ops.bias_dropout_add(x, bias, residual, p=0.1, rng=rng)
    attend = {"layout": "SBH", "num_heads": 4, "num_kv_heads": 2, "next_tokens": 0, "dropout_p": 0.1}
    yield ops.flash_attention(q, k, k, **attend, rng=Rng(9))
    yield ops.rotary(q.view(20, 3, 4, 16), cos, sin)
    yield ops.embedding(table, ids)
    yield ops.cross_entropy(ops.linear(x, table), ids, inplace_backward=True)
    yield ops.scale_mask_softmax(torch.einsum("sbh,tbh->bst", x, x)[:, None], causal=True)
    yield ops.permute(x.flatten(0, 1), ids.view(-1, 1) % 4, 4)[0]
    yield ops.add_rms_norm(x, residual, weight)[0]


def test_right_calls_are_compared_and_within_tolerance(corrupted):
    hal.use("cpu_ref")

    def run():
        for y in every_op():
            (1e-6 * y.square().sum()).backward()
        params, grads, first, second = (tensors((30, 4), (7,), grad=False) for _ in range(4))
        ops.adamw(params, grads, first, [x.square() for x in second], step=3, lr=0.01)
        x, dy, main = tensors((9, 2, 8), (9, 2, 6), (6, 8), grad=False)
        ops.linear_wgrad(x, 1e-7 * dy, main)
        ops.l2norm(params)

    verifier = verified(run, times=3)
    assert verifier.violations == [] and not verifier.left_out
    called = {"rms_norm", "linear", "flash_attention", "rotary", "embedding", "cross_entropy", "adamw", "linear_wgrad"}
    assert called <= set(verifier.calls) and verifier.calls["linear"] == 6
    assert all(0 <= worst < 1 for worst in verifier.worst.values())


def test_a_wrong_output_is_named_kept_and_repeated(corrupted, tmp_path):
    corrupted(ops.rms_norm, doubled_last_row)
    x, weight = tensors((40, 16), (16,))
    found = verified(lambda: ops.rms_norm(x, weight), folder=tmp_path, rank=2).violations
    assert found and found[0].op == "rms_norm" and "the output, rows 32 to 39 of 40" in str(found[0])
    assert "on rank 2" in str(found[0]) and found[0].file in tmp_path.iterdir()
    assert "the output, rows 32 to 39 of 40" in replay(found[0].file)
    hal.use("cpu_ref")
    assert replay(found[0].file) == ""


def test_a_wrong_output_that_cannot_be_kept_is_reported(corrupted, tmp_path):
    corrupted(ops.rms_norm, doubled_last_row)
    x, weight = tensors((40, 16), (16,))
    (tmp_path / "file").write_text("")
    found = verified(lambda: ops.rms_norm(x, weight), folder=tmp_path / "file").violations
    assert found[0].file is None and "rows 32 to 39 of 40" in str(found[0])
    assert "its tensors could not be kept: [Errno" in str(found[0])


def test_a_wrong_gradient_is_found_however_small_it_is(corrupted, tmp_path):
    plain = hal.use("cpu_ref")
    first = plain.impls["layer_norm"][0]

    def bwd(residuals, dy):
        dx, *rest = first.bwd(residuals, dy)
        return torch.cat([dx[:-1], 0 * dx[-1:]]), *rest

    class Planted(type(plain)):
        pass

    Planted.impls["layer_norm"] = []
    Planted.impl(ops.layer_norm, id="cpu_ref/c", bwd=bwd)(first.forward)
    instance = Planted()
    instance.build()
    hal.activate(instance)
    x, weight, bias = tensors((40, 16), (16,), (16,))
    found = verified(lambda: (1e-9 * ops.layer_norm(x, weight, bias).sum()).backward(), folder=tmp_path).violations
    assert found and "the gradient of x, rows 32 to 39 of 40" in str(found[0])
    assert "the gradient of x" in replay(found[0].file)


def test_the_results_of_a_verified_call_are_freed_with_it():
    hal.use("cpu_ref")
    x, weight = tensors((40, 16), (16,))
    with Verifier(1.0, seed=3).watching():
        y = ops.rms_norm(x, weight)
    y.sum().backward()
    freed = weakref.ref(y)
    del y
    assert freed() is None


def test_a_write_in_place_that_is_lost_is_found(corrupted, tmp_path):
    corrupted(ops.adamw, step_lost)
    lists = [tensors((30, 4), (7,), grad=False) for _ in range(4)]

    def step():
        ops.adamw(*lists[:3], [x.square() for x in lists[3]], step=3, lr=0.01)

    found = verified(step, folder=tmp_path).violations
    assert found and "params[1], written in place" in str(found[0])
    assert "params[1], written in place" in replay(found[0].file)


def test_the_share_is_that_asked_for_and_the_seed_decides():
    hal.use("cpu_ref")
    x, weight = tensors((4, 16), (16,), grad=False)

    def chosen(seed):
        verifier, numbers = Verifier(0.05, seed=seed), []
        with verifier.watching():
            for number in range(2000):
                before = verifier.calls.total()
                ops.rms_norm(x, weight)
                if verifier.calls.total() > before:
                    numbers.append(number)
        return numbers

    first = chosen(1)
    assert 60 < len(first) < 150 and chosen(1) == first != chosen(2)


def test_what_cannot_be_compared_is_counted():
    hal.use("cpu_ref")
    (x,) = tensors((4, 16), grad=False)
    verifier = verified(lambda: ops.dropout(x.half(), 0.5, Rng(1)), times=1)
    assert verifier.calls == {"dropout": 1}
    large = torch.zeros(3000, 1500)
    verifier = verified(lambda: ops.l2norm([large]), times=1)
    assert verifier.left_out == {"l2norm: too large to be computed whole": 1} and not verifier.calls


def test_a_small_call_of_an_op_of_others_is_compared_whole():
    op = SimpleNamespace(name="doubled", __module__="acme.ops", grads=("x",), mutates=())
    assert blocks_of(op, {"x": torch.ones(4)}, 1) is not None


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(hal.HalError, match=r"must be in \(0, 1\]"):
        Verifier(rate, seed=0)


SAVED = {
    "op": "rms_norm",
    "implementation": "cpu_ref/c",
    "arguments": {"x": torch.ones(4, 16), "weight": torch.ones(16), "eps": 1e-5, "residual": None},
    "requires_grad": ["x"],
    "upstream": [torch.ones(4, 16)],
}


class Call:
    """Creates a file if it is ever unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    "change",
    [
        {"op": "no_op"},
        {"op": ["rms_norm"]},
        {"arguments": [1, 2]},
        {"arguments": {"x": torch.ones(4, 16)}},
        {"requires_grad": ["eps"]},
        {"requires_grad": 3},
        {"upstream": [None]},
        {"upstream": [torch.ones(4, 16).int()]},
        {"upstream": [torch.ones(4, 15)]},
        {"implementation": "nothing"},
    ],
)
def test_a_hostile_saved_call_is_refused_in_one_line(change, tmp_path):
    hal.use("cpu_ref")
    names = list(ops.rms_norm.signature.parameters)
    arguments = {name: SAVED["arguments"].get(name) for name in names}
    valid = {**SAVED, "arguments": arguments}
    torch.save(valid, tmp_path / "valid.pt")
    assert replay(tmp_path / "valid.pt") == ""
    torch.save({**valid, **change}, tmp_path / "x.pt")
    with pytest.raises(hal.HalError) as caught:
        replay(tmp_path / "x.pt")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_saved_call_executes_nothing(tmp_path):
    hal.use("cpu_ref")
    torch.save({**SAVED, "op": Call(str(tmp_path / "made"))}, tmp_path / "x.pt")
    with pytest.raises(hal.HalError, match="references non-allowlisted global"):
        replay(tmp_path / "x.pt")
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_no_saved_call_is_refused(tmp_path):
    hal.use("cpu_ref")
    (tmp_path / "x.pt").write_bytes(b"nothing")
    for name in ("x.pt", "missing.pt"):
        with pytest.raises(hal.HalError, match="is not a saved call"):
            replay(tmp_path / name)
