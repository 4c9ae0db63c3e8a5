"""Lowered ops: schema, opcheck on every op, and a compiled function that equals the eager one."""

from collections.abc import Sequence

import pytest
import torch

import hal
import hal.comm.threads
from hal import Rng, ops
from hal.testing import Reference, calls
from hal.testing.comparison import equal_bits
from hal.testing.lowering import opcheck_errors


@pytest.fixture(autouse=True)
def reference():
    with hal.activated(Reference()):
        yield


def leaves(op, sample):
    arguments = calls.build(op, sample, torch.float32)
    for name in op.grads:
        if sample.grad and arguments[name] is not None:
            arguments[name] = arguments[name].detach().requires_grad_()
    return arguments


def test_the_schema_is_the_signature():
    layer_norm, adamw = hal.lower(ops.layer_norm), hal.lower(ops.adamw)
    assert str(layer_norm.torch_op.default._schema) == (
        "hal::layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor"
    )
    assert "Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] exp_avgs" in str(adamw.torch_op.default._schema)
    assert "Tensor? rng, SymInt[]? rng_full, SymInt[]? rng_start" in str(
        hal.lower(ops.dropout).torch_op.default._schema
    )


def test_lowering_twice_gives_the_same_op():
    assert hal.lower(ops.layer_norm) is hal.lower(ops.layer_norm)


@pytest.mark.parametrize("op", list(hal.OPS.values()), ids=lambda op: op.name)
def test_opcheck(op):
    for sample in op.edge_cases()[:2]:
        assert opcheck_errors(op, leaves(op, sample)) == ""


@pytest.mark.parametrize("op", list(hal.OPS.values()), ids=lambda op: op.name)
def test_lowered_equals_eager_forward_and_backward_on_every_edge_case(op):
    lowered = hal.lower(op)
    for sample in op.edge_cases():
        with_grad = bool(op.grads) and sample.grad
        eager = calls.run(op, op, leaves(op, sample), with_grad)
        through = calls.run(op, lowered, leaves(op, sample), with_grad)
        assert eager.outputs.keys() == through.outputs.keys()
        assert all(equal_bits(a, through.outputs[name]) for name, a in eager.outputs.items())
        if with_grad:
            dys = calls.upstream(eager.differentiable, seed=0)
            expected, got = calls.backward(eager, dys), calls.backward(through, dys)
            for name, g in expected.items():
                zero = g is None and (got[name] is None or not got[name].any())
                assert zero or torch.equal(g, got[name]), (name, sample)


def two_ops(norm, linear, x, weight, bias, matrix):
    return (linear(norm(x, weight, bias), matrix) ** 2).sum()


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 8), (8,), (8,), (4, 8)]
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)  # inductor calls a C++ compiler
def test_a_compiled_function_of_two_ops_equals_eager(compiler):
    x = inputs()
    expected = two_ops(ops.layer_norm, ops.linear, *x)
    norm, linear = hal.lower(ops.layer_norm), hal.lower(ops.linear)
    compiled = torch.compile(lambda *a: two_ops(norm, linear, *a), fullgraph=True, backend=compiler)
    got = compiled(*x)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(got, x), torch.autograd.grad(expected, x)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_rng_travels_as_integers_also_as_a_block_and_above_2_63():
    dropout, x = hal.lower(ops.dropout), torch.ones(3, 4)
    for rng in (Rng(2**64 - 1, 2**63), Rng(7).block((6, 8), (2, 3))):
        assert torch.equal(dropout(x, 0.5, rng), ops.dropout(x, 0.5, rng))


def test_the_log_sum_exp_of_lowered_attention_carries_no_gradient():
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    out, lse = hal.lower(ops.flash_attention)(q, q, q, layout="BNSD", return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad


def test_a_communicator_is_refused():
    comm = hal.comm.threads.threads(2)[0]
    with pytest.raises(hal.ContractError, match="takes no communicator; found comm of 2 ranks"):
        hal.lower(ops.embedding)(torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), vocab_start=0, comm=comm)


def test_every_kind_of_parameter_has_a_type_in_torch():
    def every_kind(
        x: torch.Tensor,
        others: Sequence[torch.Tensor | None] | None = None,
        sizes: tuple[int, ...] = (1,),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        names: list[str] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x * len(sizes), torch.zeros(len(others or ()), dtype=dtype, device=device)

    op = hal.op(check=lambda call: None, tol={}, samples=lambda: None)(every_kind)
    try:
        with hal.activated(Reference()):
            lowered = hal.lower(op)
            assert str(lowered.torch_op.default._schema) == (
                "hal::every_kind(Tensor x, Tensor?[]? others, SymInt[] sizes, ScalarType? dtype, Device? device, "
                "str[] names) -> Tensor[]"
            )
            x = torch.ones(2)
            y, z = lowered(x, [x, None], (2, 3, 4), dtype=torch.int64, names=["a"])
            assert torch.equal(y, torch.full((2,), 3.0))
            assert z.shape == (2,)
            assert z.dtype is torch.int64
    finally:
        del hal.OPS["every_kind"]


def test_it_runs_the_active_backend():
    spy = hal.testing.Spy(Reference())
    with hal.activated(spy):
        x = torch.ones(2, 4, requires_grad=True)
        hal.lower(ops.swiglu)(x)  # the first call also tries which tensors the implementation saves
        spy.calls.clear()
        hal.lower(ops.swiglu)(x).sum().backward()
    assert spy.calls == [("swiglu", "reference")]  # the backward uses its residuals
