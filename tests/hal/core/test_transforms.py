"""Every op under fake and meta tensors, functorch, forward mode and tracers: a right result, or UnsupportedOp."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch_release import newer_torch

import hal
import hal.comm.threads
from hal import Rng, TensorRng, ops
from hal.core import residuals
from hal.testing import Reference, calls
from hal.testing.lowering import opcheck_errors

NOT_OPS = {
    "alibi_bias": "torch code, which torch transforms",
    "band_mask": "torch code, which torch transforms",
    "draw_shape": "integers",
    "layouts": "a module of torch code",
    "mappings": "a module of functions that communicate; functions of several ranks are not transformed",
}
"""The public names of hal.ops that are no ops, and why no torch op is needed for them."""

NO_VMAP = {
    "adamw": "writes to",
    "linear_wgrad": "writes to",
    "grouped_linear_wgrad": "writes to",
    "unscale_and_check": "writes to",
}
NO_SEVERAL_RANKS = (
    "embedding",
    "cross_entropy",
    "linear_cross_entropy",
    "all_gather_linear",
    "linear_reduce_scatter",
)
OPS = list(hal.OPS.values())
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@pytest.fixture(autouse=True)
def cpu_ref() -> None:
    hal.use("cpu_ref")


def accepted(op: Any, grad: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call that the active backend runs, on tensors that have elements."""
    for sample in op.edge_cases():
        args, kwargs = sample.build(torch.float32, hal.device())
        floating = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if (sample.grad or not grad) and hal.why(op, *args, **kwargs).chosen and all(t.numel() for t in floating):
            return args, kwargs
    raise AssertionError(f"cpu_ref runs no edge case of {op.name}")


def outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result or ())


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def test_the_table_has_every_public_name_and_no_other() -> None:
    names = {op.name for op in OPS if op.name in ops.__all__}
    assert names | set(NOT_OPS) == set(ops.__all__)
    assert not names & set(NOT_OPS)
    assert {op.name for op in OPS if op.mutates} == set(NO_VMAP)
    assert {op.name for op in OPS if "comm" in op.schema.parameters} == set(NO_SEVERAL_RANKS)


@every_op
@pytest.mark.parametrize("most", [2, pytest.param(1000, marks=pytest.mark.nightly)])
def test_fake_results_have_the_shapes_of_real_ones(op: Any, most: int) -> None:
    with hal.activated(Reference()):
        for sample in op.edge_cases()[:most]:
            args, kwargs = sample.build(torch.float32)
            mode = FakeTensorMode()
            fakes = tree_map(lambda v, m=mode: m.from_tensor(v) if isinstance(v, Tensor) else v, (args, kwargs))
            with mode:
                inside = outputs(op(*fakes[0], **fakes[1]))
            outside = outputs(op(*fakes[0], **fakes[1]))  # fake tensors after their mode
            real = outputs(op(*args, **kwargs))
            assert [(t.shape, t.dtype) for t in inside] == [(t.shape, t.dtype) for t in real]
            assert [(t.shape, t.dtype) for t in outside] == [(t.shape, t.dtype) for t in real]


@every_op
def test_vmap_stacks_the_calls_of_the_slices_or_says_why_not(op: Any) -> None:
    args, kwargs = accepted(op)
    position = next((i for i, v in enumerate(args) if isinstance(v, Tensor)), None)
    if op.name in NO_VMAP:
        batched = tree_map(lambda v: torch.stack([v, v]) if isinstance(v, Tensor) else v, args)
        dims = tuple(tree_map(lambda v: 0 if isinstance(v, Tensor) else None, v) for v in args)
        with pytest.raises(hal.UnsupportedOp, match=NO_VMAP[op.name]):
            torch.vmap(lambda *a: op(*a, **kwargs) or a[0], in_dims=dims)(*batched)
        return
    if position is None:
        # philox_uniform has no tensors, l2norm a list of them.
        x = torch.randn(2, 5)
        if op.name == "philox_uniform":
            run = torch.vmap(lambda y: y + op((5,), Rng(1)), randomness="same")
            assert torch.equal(run(x), x + op((5,), Rng(1)))
        else:
            torch.testing.assert_close(torch.vmap(lambda y: op([y]))(x), torch.stack([op([y]) for y in x]))
        return

    def call(y: Tensor) -> Any:
        return op(*args[:position], y, *args[position + 1 :], **kwargs)

    x = args[position]
    other = x.flip(-1) if x.dtype.itemsize > 1 else x
    got = outputs(torch.vmap(call, randomness="same")(torch.stack([x, other])))
    expected = [torch.stack(pair) for pair in zip(outputs(call(x)), outputs(call(other)))]
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert len(got) == len(expected) > 0


@pytest.mark.parametrize("op", [op for op in OPS if op.grads], ids=lambda op: op.name)
def test_func_grad_and_vmap_of_it_equal_autograd(op: Any) -> None:
    args, kwargs = accepted(op, grad=True)
    name = op.grads[0]
    bound = op.signature.bind(*args, **kwargs)

    def loss(x: Tensor) -> Tensor:
        given = op.signature.bind(*args, **kwargs)
        given.arguments[name] = x
        results = [y for y in outputs(op(*given.args, **given.kwargs)) if y.is_floating_point()]
        return torch.stack([y.sin().sum() for y in results]).sum()

    x = bound.arguments[name].detach()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    both = torch.vmap(torch.func.grad(loss), randomness="same")(torch.stack([x, x]))
    torch.testing.assert_close(both, torch.stack([expected, expected]))
    with pytest.raises(hal.UnsupportedOp, match="no forward-mode"):
        torch.func.jvp(loss, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(hal.UnsupportedOp, match="no forward-mode"):
        loss(forward_ad.make_dual(x, x))


@every_op
@pytest.mark.nightly
def test_opcheck_of_cpu_ref_on_several_edge_cases(op: Any) -> None:
    tried = 0
    for sample in op.edge_cases():
        arguments = calls.build(op, sample, torch.float32)
        bound = op.signature.bind_partial()
        bound.arguments.update(arguments)
        if not sample.grad or not hal.why(op, *bound.args, **bound.kwargs).chosen:
            continue
        for name in op.grads:
            if arguments[name] is not None:
                arguments[name] = arguments[name].detach().requires_grad_()
        assert opcheck_errors(op, arguments) == "", sample
        tried += 1
        if tried == 4:
            break
    assert tried


X, W = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 2.0, 8)


def squares(x: Tensor, w: Tensor) -> Tensor:
    return ops.rms_norm(x, w).square().sum()


def test_nested_transforms_that_differentiate_once_work() -> None:
    expected = torch.func.grad(squares, argnums=1)(X, W)
    per_row = torch.vmap(torch.func.grad(squares, argnums=1), in_dims=(0, None))(X, W)
    torch.testing.assert_close(per_row.sum(0), expected)
    summed = torch.func.grad(lambda w: torch.vmap(lambda x: squares(x, w))(X).sum())(W)
    torch.testing.assert_close(summed, expected)
    # The outer level differentiates the value, not the inner gradient.
    outer = torch.func.grad(lambda w: torch.func.vjp(lambda x: squares(x, w), X)[0])(W)
    torch.testing.assert_close(outer, expected)
    assert torch.func.jacrev(lambda w: ops.rms_norm(X, w))(W).shape == (3, 8, 8)


def test_second_derivatives_are_refused_unless_the_reference_is_pinned() -> None:
    with pytest.raises(hal.UnsupportedOp, match="no second derivative"):
        torch.func.grad(lambda w: torch.func.grad(squares, argnums=1)(X, w).sum())(W)
    with hal.policy(pin={"rms_norm": "reference"}):
        assert torch.func.hessian(squares, argnums=1)(X, W).shape == (8, 8)
        _, tangent = torch.func.jvp(lambda x: ops.rms_norm(x, W), (X,), (X,))
        assert tangent.abs().max() > 0


def test_a_batch_of_upstream_gradients_of_an_eager_call_is_refused() -> None:
    x = X.clone().requires_grad_()
    y = ops.rms_norm(x, W)
    with pytest.raises(hal.UnsupportedOp, match=r"no batch of upstream gradients .* use torch.func.jacrev"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)
    with pytest.raises(hal.UnsupportedOp, match="no batch of upstream gradients"):
        torch.autograd.functional.jacobian(lambda x: ops.rms_norm(x, W), X, vectorize=True)
    expected = torch.autograd.functional.jacobian(lambda x: ops.rms_norm(x, W), X)
    torch.testing.assert_close(torch.func.jacrev(lambda x: ops.rms_norm(x, W))(X), expected)


def test_a_dual_level_without_dual_tensors_is_eager_code() -> None:
    with forward_ad.dual_level():
        assert torch.equal(ops.rms_norm(X, W), ops.rms_norm(X, W))


def test_meta_tensors_give_meta_tensors() -> None:
    y = ops.rms_norm(X.to("meta"), W.to("meta"))
    assert (y.device.type, y.shape) == ("meta", (3, 8))
    with pytest.raises(hal.ContractError, match="weight of shape"):
        ops.rms_norm(X.to("meta"), torch.empty(3, device="meta"))


def test_residuals_are_freed_with_the_graph() -> None:
    gc.collect()
    before = len(residuals._memories)
    y = hal.lower(ops.rms_norm)(X.clone().requires_grad_(), W)
    assert len(residuals._memories) == before + 1
    del y
    assert len(residuals._memories) == before


def test_a_copy_of_a_token_is_refused() -> None:
    lowered = hal.lower(ops.rms_norm)
    token = lowered.torch_forward(X, W, 1e-5, [True, False], [0, 1])[-1].clone()
    with pytest.raises(hal.HalError, match="token was copied"):
        lowered.torch_backward(token, [X, W], [0, 1], [X], [3, 8], [2], [torch.float32], torch.device("cpu"))


@pytest.mark.parametrize("kept", [(), (0,), (0, 1)])
def test_the_backward_never_reads_memory_that_the_graph_does_not_keep(kept: tuple[int, ...]) -> None:
    lowered = hal.lower(ops.rms_norm)
    x, w = X.clone(), W.clone()
    expected = torch.func.grad(lambda x: ops.rms_norm(x, W).sum())(X)
    *_, token = lowered.torch_forward(x, w, 1e-5, [True, False], list(kept))
    sources = [t.clone() for i, t in enumerate((x, w)) if i in kept]
    x.fill_(7.0)  # as a compiler does that reuses the memory
    w.fill_(7.0)
    shapes = ([3, 8], [2], [torch.float32], torch.device("cpu"))
    (grad,) = lowered.torch_backward(token, sources, list(kept), [torch.ones(3, 8)], *shapes)
    torch.testing.assert_close(grad, expected)


# Random streams.


def graph_of_dropout(x: Tensor, state: Tensor) -> Tensor:
    return ops.dropout(x, 0.5, TensorRng(state).fork("layer", 3))


def test_a_traced_draw_follows_its_state() -> None:
    first, second = (TensorRng.of(Rng(seed, offset)).state for seed, offset in ((1, 0), (2**64 - 1, 2**63)))
    traced = {
        "make_fx": make_fx(graph_of_dropout)(X, first),
        "jit": torch.jit.trace(graph_of_dropout, (X, first), check_trace=False),
    }
    expected = ops.dropout(X, 0.5, Rng(2**64 - 1, 2**63).fork("layer", 3))
    assert torch.equal(graph_of_dropout(X, second), expected)
    assert {name: torch.equal(graph(X, second), expected) for name, graph in traced.items()} == dict.fromkeys(
        traced, True
    )


@pytest.mark.parametrize(
    "trace",
    [
        lambda f: make_fx(f)(X),
        lambda f: torch.jit.trace(f, (X,)),
        pytest.param(
            lambda f: torch.export.export(Function(f), (X,)),
            marks=newer_torch("torch.export is not noticed"),
        ),
    ],
    ids=["make_fx", "jit.trace", "export"],
)
def test_an_rng_is_no_constant_of_a_graph(trace: Any) -> None:
    with pytest.raises(hal.ContractError, match="would become a constant of the graph"):
        trace(lambda x: ops.dropout(x, 0.5, Rng(1)))


class Function(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def test_vmap_refuses_to_repeat_a_draw_unless_asked() -> None:
    def drop(x: Tensor) -> Tensor:
        return ops.dropout(x, 0.5, Rng(1))

    with pytest.raises(hal.UnsupportedOp, match="would draw the same numbers"):
        torch.vmap(drop)(X)
    assert torch.equal(torch.vmap(drop, randomness="same")(X), torch.stack([drop(x) for x in X]))
    states = torch.stack([TensorRng.of(Rng(n)).state for n in range(3)])
    got = torch.vmap(lambda x, state: ops.dropout(x, 0.5, TensorRng(state)))(X, states)
    assert torch.equal(got, torch.stack([ops.dropout(x, 0.5, Rng(n)) for n, x in enumerate(X)]))


# torch.compile and torch.export.


def test_compile_guards_the_integers_of_an_rng() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, rng: ops.dropout(x, 0.5, rng), fullgraph=True, backend="eager")
    for rng in (Rng(1), Rng(2), Rng(2**64 - 1, 2**63)):
        assert torch.equal(compiled(X, rng), ops.dropout(X, 0.5, rng))


@newer_torch("torch.compile raises another error for code that it must not enter")
def test_several_ranks_stay_outside_of_graphs() -> None:
    torch._dynamo.reset()
    comm = hal.comm.threads.threads(2)[0]
    for name in NO_SEVERAL_RANKS:
        with pytest.raises(hal.ContractError, match="takes no communicator; found comm of 2 ranks"):
            op = getattr(ops, name)
            hal.lower(op).flatten(*accepted(op)[0], comm=comm)
    table, ids = torch.ones(4, 3), torch.zeros(2, dtype=torch.int64)
    one_graph = torch.compile(lambda: ops.embedding(table, ids, comm=comm), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="communicator of several ranks runs outside of graphs"):
        one_graph()


@newer_torch("torch.export takes no constants from outside of the module")
def test_export_keeps_the_op_and_a_dynamic_batch() -> None:
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Function(lambda x: ops.rms_norm(x, W)), (X,), dynamic_shapes={"args": ({0: batch},)})
    assert "torch.ops.hal.rms_norm.default" in program.graph_module.code
    x = torch.randn(5, 8)
    assert torch.equal(program.module()(x), ops.rms_norm(x, W))


@newer_torch("no tag cudagraph_unsafe")
def test_graphs_on_the_device_leave_out_what_reads_the_host() -> None:
    unsafe = torch.Tag.cudagraph_unsafe
    # cpu_ref records no graphs.
    assert unsafe in hal.lower(ops.rms_norm).torch_op.default.tags
    assert unsafe in hal.lower(ops.rms_norm).torch_forward.tags
    assert unsafe in hal.lower(ops.dropout).torch_op.default.tags
