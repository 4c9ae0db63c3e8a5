"""The references: every sample is a valid call, and their gradients are those of their values (float64)."""

import pytest
import torch
from host_backend import HostBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hal
from hal import ops
from hal.testing.calls import invoke

OPS = [op for op in hal.OPS.values() if op.__module__.startswith("hal.ops")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def to_double(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype):
        return torch.float64
    return [to_double(v) for v in value] if isinstance(value, list) else value


def bind(op, args, kwargs):
    bound = op.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


@pytest.fixture(autouse=True)
def cpu():
    class Cpu(HostBackend):
        name = "cpu_test"

    with hal.activated(Cpu(), fallback="reference"):
        yield


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_edge_case_passes_the_check_in_every_dtype_and_has_finite_oracle(op):
    samples = op.edge_cases()
    assert samples
    for sample in samples:
        for dtype in op.tol:
            args, kwargs = sample.build(dtype)
            op.check(op.Call(*args, **kwargs))
        op.reference(*[to_double(a) for a in args], **{k: to_double(v) for k, v in kwargs.items()})


def _with_marks(op):
    return pytest.param(op, marks=pytest.mark.slow) if op is ops.flash_attention else op


@pytest.mark.parametrize("op", [_with_marks(op) for op in OPS if op.grads], ids=lambda op: op.name)
def test_gradcheck(op):
    # gelu, softmax, norms, ... are smooth; samples marked grad=False (NaN, inf inputs) are left out.
    checked = 0
    for sample in op.edge_cases():
        args, kwargs = sample.build(torch.float32)
        given_args = bind(op, [to_double(a) for a in args], {k: to_double(v) for k, v in kwargs.items()})
        leaves = [n for n in op.grads if given_args[n] is not None]
        if not sample.grad or any(given_args[n].numel() > 150 or given_args[n].numel() == 0 for n in leaves):
            continue
        if any(given_args[n].abs().max() > 20 or given_args[n].std(correction=0) == 0 for n in leaves):
            continue  # finite differences are useless where the function saturates or is steep

        def function(*values, given_args=given_args, leaves=leaves):
            out = invoke(op, op.reference, {**given_args, **dict(zip(leaves, values))})
            outputs = out if isinstance(out, tuple) else (out,)
            return tuple(y for i, y in enumerate(outputs) if i not in op.nondiff_outputs)

        values = [given_args[n].contiguous().requires_grad_() for n in leaves]
        assert torch.autograd.gradcheck(function, values, eps=1e-6, atol=1e-6, rtol=1e-4)
        checked += 1
    assert checked >= 2


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_drawn_samples_are_valid(op, data):
    sample = data.draw(op.samples())
    for dtype in op.tol:
        args, kwargs = sample.build(dtype)
        op.check(op.Call(*args, **kwargs))
        op.reference(*args, **kwargs)


def test_philox_known_answers():
    # Random123's kat_vectors for philox4x32-10: zero counter and key; all ones.
    from hal.ops.random import philox_bits

    zero = philox_bits(torch.arange(4), hal.Rng(0))
    assert [hex(v) for v in zero.tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.data())
def test_a_block_is_a_slice_of_the_whole_draw(seed, offset, data):
    full = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in full)
    size = tuple(data.draw(st.integers(1, n - i)) for n, i in zip(full, start))
    rng = hal.Rng(seed, offset)
    whole = ops.philox_uniform.reference(full, rng, device=torch.device("cpu"))
    part = ops.philox_uniform.reference(size, rng.block(full, start), device=torch.device("cpu"))
    assert torch.equal(part, whole[tuple(slice(i, i + n) for i, n in zip(start, size))])


def test_packed_attention_without_queries_gives_its_keys_a_gradient_of_zeros():
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in ((0, 2, 8), (4, 1, 8), (4, 1, 8)))
    ends = {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 4], dtype=torch.int32)}
    out = ops.flash_attention.reference(q, k, v, layout="TND", **ends)
    assert out.shape == q.shape
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
        assert grad.shape == x.shape and not grad.any()


def test_no_tokens_and_an_empty_table():
    for function in ("softmax", "sigmoid", "sinkhorn"):
        probs, indices = ops.moe_router(torch.empty(0, 8), 2, score_function=function)
        assert probs.shape == indices.shape == (0, 2)
    assert ops.embedding(torch.empty(0, 4), torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    with pytest.raises(hal.ContractError, match="a weight with rows"):
        ops.embedding(torch.empty(0, 4), torch.zeros(1, dtype=torch.int64))


def test_the_norm_of_many_elements_is_exact_in_float32():
    """Within the op's tolerance, which `--verify-ops` applies to any size."""
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in (1 << 22, 1_000_003, 5, 0)]
    exact = torch.cat(tensors).double().norm()
    assert torch.isclose(ops.l2norm(tensors).double(), exact, rtol=4e-6, atol=0)
    assert torch.isclose(ops.l2norm([tensors[0].view(2048, 2048).mT]), tensors[0].double().norm().float(), rtol=4e-6)
