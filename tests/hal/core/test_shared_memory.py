"""Calls that are refused for what the tensors are: shared memory, tangents of forward-mode AD, huge draws."""

import pytest
import torch
from torch.autograd import forward_ad

import hal
from hal import ContractError, Rng, UnsupportedOp, ops

WEIGHT = torch.ones(8, requires_grad=True)
CALLS = {
    "an argument without gradient": lambda x: ops.rms_norm(x, torch.ones(8)),
    "a parameter with gradient": lambda x: ops.rms_norm(x, WEIGHT),
    "a parameter": lambda x: ops.rms_norm(torch.ones(4, 8), x[0]),
    "an implementation made of torch's functions": lambda x: ops.linear(x, torch.ones(3, 8)),
    "a list": lambda x: ops.l2norm([torch.ones(2), x]),
    "a lowered op": lambda x: hal.lower(ops.rms_norm)(x, torch.ones(8)),
}


@pytest.fixture(autouse=True)
def cpu_ref():
    hal.use("cpu_ref")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tangent_is_refused_rather_than_dropped(call):
    x, tangent = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(UnsupportedOp, match="have no forward-mode derivatives"), forward_ad.dual_level():
        call(forward_ad.make_dual(x, tangent))
    with pytest.raises(UnsupportedOp, match="have no forward-mode derivatives"):
        torch.func.jvp(call, (x,), (tangent,))


def test_the_reference_has_forward_mode_derivatives():
    x, tangent, weight = torch.randn(4, 8), torch.randn(4, 8), torch.ones(8)
    _, expected = torch.func.jvp(lambda x: ops.rms_norm.reference(x, weight), (x,), (tangent,))
    with hal.policy(pin={"rms_norm": "reference"}):
        _, found = torch.func.jvp(lambda x: ops.rms_norm(x, weight), (x,), (tangent,))
    assert torch.equal(found, expected)


def test_a_dual_level_without_tangents_changes_nothing():
    x, weight = torch.randn(4, 8), torch.ones(8)
    with forward_ad.dual_level():
        torch.testing.assert_close(ops.rms_norm(x, weight), ops.rms_norm.reference(x, weight))


def operands(kind):
    """(x, dy, main_grad, main_bias_grad) with an overlap of this kind."""
    buffer = torch.randn(300)
    a, b, c = (buffer[64 * i : 64 * (i + 1)].view(8, 8) for i in range(3))
    return {
        "x is main_grad": (a, b, a, None),
        "dy is main_grad": (b, a, a, None),
        "a part of x": (a, b, buffer[40:104].view(8, 8), None),
        "the bias in main_grad": (a, b, c, c[3]),
        "x in main_bias_grad": (a, b, c, a[0]),
        "rows of x around main_grad": (buffer[:128].view(8, 16)[:, :4], b.clone(), buffer[40:72].view(8, 4), None),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "x is main_grad",
        "dy is main_grad",
        "a part of x",
        "the bias in main_grad",
        "x in main_bias_grad",
        "rows of x around main_grad",
    ],
)
def test_a_written_argument_that_overlaps_another_is_refused(kind):
    x, dy, main_grad, bias = operands(kind)
    before = main_grad.clone()
    with pytest.raises(ContractError, match="separate memory"):
        ops.linear_wgrad(x, dy, main_grad, bias)
    assert torch.equal(main_grad, before)


def test_neighbours_in_one_buffer_and_equal_inputs_do_not_overlap():
    buffer = torch.zeros(200)
    x, main_grad, bias = buffer[:64].view(8, 8).normal_(), buffer[64:128].view(8, 8), buffer[128:136]
    ops.linear_wgrad(x, x, main_grad, bias)
    torch.testing.assert_close(main_grad, x.T @ x)
    torch.testing.assert_close(bias, x.sum(0))
    ops.linear_wgrad(x[:0], x[:0], main_grad, bias)


def test_a_written_tensor_of_a_list_that_is_given_twice_is_refused():
    p, g, m, v = ([torch.rand(4), torch.ones(4), torch.empty(0), torch.empty(0)] for _ in range(4))
    before = p[1].clone()
    for lists in ((p, g, p, v), (p, [g[0], p[1], *g[2:]], m, v), ([p[1], *p[1:]], g, m, v), (p, g, m, [v[0], *m[1:]])):
        with pytest.raises(ContractError, match="separate memory; found that they are the same"):
            ops.adamw(*lists, step=1, lr=0.1)
    with pytest.raises(
        ContractError, match=r"adamw: expected params\[0\], .* and model_params\[0\] in separate memory"
    ):
        ops.adamw(p, g, m, v, step=1, lr=0.1, model_params=[x.view(x.shape) for x in p])
    with pytest.raises(ContractError, match=r"grads\[0\], which is written, and grads\[2\]"):
        ops.unscale_and_check([p[0], p[1], p[0]], 0.5)
    assert torch.equal(p[1], before)
    ops.adamw(p, g, m, v, step=1, lr=0.1)
    with torch._subclasses.FakeTensorMode() as mode:
        ops.unscale_and_check([mode.from_tensor(x) for x in p], 0.5)


def test_what_is_only_read_may_be_given_twice():
    p, m, v = ([torch.zeros(4), torch.zeros(4)] for _ in range(3))
    g = torch.randn(4)
    ops.adamw(p, [g, g], m, v, step=1, lr=0.1)
    assert torch.equal(p[0], p[1]) and p[0].any()
    ops.l2norm([g, g])


def test_the_gradient_sums_of_experts_may_not_overlap_their_inputs():
    x = torch.randn(8, 8)
    with pytest.raises(ContractError, match="separate memory"):
        ops.grouped_linear_wgrad(x, torch.randn(8, 8), torch.tensor([8]), x[None])


SHAPES = [(2**70,), (2**63,), (2**61,), (2**40, 2**40), (2**62, 2), (0, 2**70), (2**70, 0), (0, 2**62, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_draw_that_torch_cannot_hold_is_refused(shape):
    with pytest.raises(ContractError):
        ops.philox_uniform(shape, Rng(1))


@pytest.mark.parametrize("full", [(2**40, 2**40), (2**62, 2), (2**63, 1), (0, 2**40, 2**40), (2**70, 1)], ids=str)
def test_a_block_of_a_draw_with_too_many_elements_is_refused(full):
    rng = Rng(1).block(full, (0,) * len(full))
    with pytest.raises(ContractError, match="at most 2\\*\\*62"):
        ops.philox_uniform((0,) * len(full), rng)
    with pytest.raises(ContractError, match="at most 2\\*\\*62"):
        ops.dropout(torch.zeros((0,) * len(full)), 0.5, rng)


def test_a_block_at_the_end_of_a_huge_draw():
    rng = Rng(1, 2**64 - 7).block((2**20, 2**42), (2**20 - 1, 2**42 - 4))
    assert torch.equal(ops.philox_uniform((1, 4), rng), ops.philox_uniform.reference((1, 4), rng))
