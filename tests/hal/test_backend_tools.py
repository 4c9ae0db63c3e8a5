"""The helpers that backends share: each is tested against its docstring, as the author of a backend would use it."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_backend import HostBackend
from torch import Tensor

import hal
from hal import Rng, backend_tools, ops
from hal.backend_tools import with_signature_of
from hal.core.adapters import require_same_signature

Q, K = torch.empty(2, 5, 4, 8), torch.empty(2, 9, 2, 8)  # BSND


def arguments(op: Any) -> dict[str, object]:
    """A distinct value for every parameter of the op."""
    return {name: f"the {name}" for name in op.signature.parameters}


def call(op: Any, function: Callable[..., Any], given: dict[str, object]) -> Any:
    """Calls `function` as HAL's dispatch does: keyword-only parameters by name, the others in order."""
    parameters = op.signature.parameters
    positional = [given[n] for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    return function(*positional, **{n: given[n] for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY})


# Signatures.


@pytest.mark.parametrize("op", [ops.flash_attention, ops.swiglu, ops.adamw, ops.cross_entropy], ids=lambda op: op.name)
def test_a_function_of_some_parameters_gets_the_signature_and_its_own_values(op: Any) -> None:
    names = list(op.signature.parameters)
    subset = [names[-1], names[0]]
    function = eval(f"lambda {', '.join(subset)}: ({', '.join(subset)})")
    adapted = with_signature_of(op)(function)
    require_same_signature(op, adapted, "the adapted function")
    assert call(op, adapted, arguments(op)) == (f"the {subset[0]}", f"the {subset[1]}")


def test_parameters_left_out_are_refused_and_need_no_gradient() -> None:
    class Without(HostBackend):
        name = "without"

    @Without.impl(ops.linear, id="w", bwd=lambda residuals, dy: (dy @ residuals[1], dy.flatten(0, -2).T @ residuals[0]))
    @with_signature_of(ops.linear, without=("bias",))
    def linear(x: Tensor, weight: Tensor) -> Any:
        return x @ weight.T, (x, weight)

    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    with hal.activated(Without()):
        ops.linear(x, weight).sum().backward()
        with pytest.raises(hal.UnsupportedOp, match="bias"):
            ops.linear(x, weight, torch.zeros(2))
    assert weight.grad is not None
    assert torch.allclose(weight.grad[0], x.detach().sum(0))


def test_the_ops_defaults_hold_not_those_of_the_function() -> None:
    adapted = with_signature_of(ops.rotary)(lambda x, layout="TND", *, interleaved=True: (layout, interleaved))
    assert adapted(1, 2, 3) == ("SBND", False)
    assert adapted(1, 2, 3, layout="BSND", interleaved=True) == ("BSND", True)


def test_a_derived_parameter_is_computed_from_the_call() -> None:
    def total(call: hal.Call) -> float:
        return 10 * call.x + call.p

    adapted = with_signature_of(ops.dropout, both=total)(lambda both, rng: (both, rng))
    assert adapted(2, 0.5, "rng") == (20.5, "rng")


@pytest.mark.parametrize(
    "adapt",
    [
        lambda: with_signature_of(ops.dropout)(lambda x, probability: x),
        lambda: backend_tools.why_not_tensors(ops.dropout, "y", reasons=list),
    ],
    ids=["parameter", "tensor"],
)
def test_a_parameter_that_the_op_lacks_is_refused_by_name(adapt: Callable[[], object]) -> None:
    with pytest.raises(hal.HalError, match=r"takes (probability|y), which dropout\("):
        adapt()


def test_names_and_places_survive() -> None:
    @with_signature_of(ops.dropout)
    def forward(x: Tensor) -> Tensor:
        """Forward."""
        return x

    assert (forward.__name__, forward.__doc__, forward.__module__) == ("forward", "Forward.", __name__)


def test_why_not_passes_the_tensors_that_have_gradients_or_are_named() -> None:
    def reasons(*tensors: object) -> list[str]:
        return [str(t) for t in tensors]

    default = backend_tools.why_not_tensors(ops.cross_entropy, reasons=reasons)
    assert default(ops.cross_entropy.Call(**arguments(ops.cross_entropy))) == ["the logits"]
    named = backend_tools.why_not_tensors(ops.rotary, "sin", "x", reasons=reasons)
    assert named(ops.rotary.Call(**arguments(ops.rotary))) == ["the sin", "the x"]
    lists = backend_tools.why_not_tensors(ops.adamw, "grads", "model_params", reasons=reasons)
    call = ops.adamw.Call(**{**arguments(ops.adamw), "grads": [1, 2], "model_params": None})
    assert lists(call) == ["1", "2"]
    assert not default.by_metadata
    assert backend_tools.why_not_tensors(ops.l2norm, "tensors", reasons=reasons, by_metadata=True).by_metadata


def test_a_backend_of_adapted_functions_runs_and_refuses(make_backend: Any) -> None:
    Small = make_backend()
    reasons = backend_tools.host_tensor_reasons((torch.float32,), "float32 only", "in host memory")

    @Small.impl(ops.bias_gelu, id="small", why_not=backend_tools.why_not_tensors(ops.bias_gelu, reasons=reasons))
    @with_signature_of(ops.bias_gelu)
    def bias_gelu(x: Tensor, approximate: str) -> Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    x = torch.randn(3, 4)
    with hal.activated(Small()):
        torch.testing.assert_close(ops.bias_gelu(x), ops.bias_gelu.reference(x))
        with pytest.raises(hal.UnsupportedOp, match=r"dtype torch.bfloat16 \(float32 only\)"):
            ops.bias_gelu(x.bfloat16())


# Tensors.


def test_host_reasons_name_each_wrong_dtype_and_device_once() -> None:
    reasons = backend_tools.host_tensor_reasons({torch.float32: "f32"}, "float32 only", "host memory only")
    x = torch.ones(2)
    assert reasons(x, None, x.to("meta")) == ()
    assert reasons(x, x.double(), x.double(), x.half()) == [
        "dtype torch.float64 (float32 only)",
        "dtype torch.float16 (float32 only)",
    ]
    elsewhere = torch.ones(2, device=torch.device("meta")).as_subclass(_Elsewhere)
    assert reasons(x, elsewhere) == ["a tensor on xpu:0 (host memory only)"]


class _Elsewhere(torch.Tensor):
    """A tensor that reports a device that this machine does not have."""

    is_meta = False
    is_cpu = False
    device = torch.device("xpu", 0)


@pytest.mark.parametrize("shape, rows", [((3, 4, 5), 12), ((7,), 1), ((0, 4), 0), ((4, 0), 0)])
def test_rows_are_counted_along_the_last_dimension(shape: tuple[int, ...], rows: int) -> None:
    assert backend_tools.rows_of(torch.empty(shape)) == rows


def test_tensors_are_grouped_in_the_order_of_their_dtypes() -> None:
    a, b, c = torch.ones(1), torch.ones(1).half(), torch.ones(2)
    groups = backend_tools.by_dtype([a, b, c])
    assert list(groups) == [torch.float32, torch.float16]
    assert groups[torch.float32][1] is c


def test_results_of_copies_return_to_tensors_with_gaps() -> None:
    gaps, whole = torch.zeros(3, 4)[:, :2], torch.zeros(2)
    dense = [t.contiguous() for t in (gaps, whole)]
    for t in dense:
        t.fill_(5.0)
    backend_tools.copy_back([gaps, whole], dense)
    assert (gaps == 5.0).all() and (whole == 5.0).all()


# Random numbers.


BLOCK = Rng(1).block((4, 6, 9, 12), (1, 2, 3, 4))


@pytest.mark.parametrize(
    "rng, shape, width",
    [
        (Rng(1), (3, 4, 10), 10),
        (Rng(1), (3, 4, 10), 120),
        (BLOCK, (2, 3, 5, 7), 7),
        (Rng(1).block((8, 9), (2, 3)), (4, 5), 5),
        (Rng(1).block((8,), (2,)), (4,), 4),
        (Rng(1).block((), ()), (), 1),
    ],
)
def test_rows_of_a_draw_hold_the_elements_that_indexing_says(rng: Rng, shape: tuple[int, ...], width: int) -> None:
    first, sizes, strides = backend_tools.draw_rows(rng, shape, width)
    assert len(sizes) == 4 and len(strides) == 3 and math.prod(sizes) == math.prod(shape)
    steps = [torch.arange(n) * s for n, s in zip(sizes, (*strides, 1))]
    walked = first + sum(s.reshape(-1, *[1] * (3 - i)) for i, s in enumerate(steps))
    index0, full = rng.indexing(shape)
    expected = torch.full(shape, index0)
    for d, (n, s) in enumerate(zip(shape, full)):
        expected = expected + (torch.arange(n) * s).reshape(-1, *[1] * (len(shape) - d - 1))
    assert walked.flatten().tolist() == expected.flatten().tolist()


def test_steps_of_a_draw_are_its_strides_without_the_last() -> None:
    index0, strides = BLOCK.indexing((2, 3, 5, 7))
    assert backend_tools.draw_steps(BLOCK, (2, 3, 5, 7)) == (index0, *strides[:3])
    assert backend_tools.draw_steps(Rng(0), (5, 7)) == (0, 0, 0, 7)


def test_only_blocks_of_many_dimensions_are_refused() -> None:
    assert backend_tools.draw_reasons(None, (1,) * 6) == ()
    assert backend_tools.draw_reasons(Rng(0), (1,) * 6) == ()
    assert backend_tools.draw_reasons(BLOCK, (1,) * 4) == ()
    assert "5 dimensions" in backend_tools.draw_reasons(BLOCK, (1,) * 5)[0]


def test_dropout_redraws_its_mask_and_copies_where_nothing_drops() -> None:
    calls = []

    def drop(x: Tensor, p: float, rng: Rng) -> Tensor:
        calls.append((p, rng))
        return 2 * x

    forward, backward = backend_tools.dropout_from(drop)
    require_same_signature(ops.dropout, forward, "dropout")
    x = torch.ones(3)
    y, residuals = forward(x, 0.5, Rng(3))
    (dx,) = backward(residuals, x)
    assert (y == 2.0).all() and (dx == 2.0).all() and calls == [(0.5, Rng(3))] * 2
    y, residuals = forward(x, 0.0, Rng(3))
    assert y is not x and torch.equal(y, x)
    assert backward(residuals, x)[0] is x and len(calls) == 2


def test_a_draw_on_another_kind_of_device_is_refused() -> None:
    for device in (None, "cpu", torch.device("cpu", 0)):
        assert backend_tools.draw_device_reasons(device, "cpu", "mine") == ()
    reasons = backend_tools.draw_device_reasons(torch.device("meta"), "cpu", "mine")
    assert reasons == ["device meta (mine draws into CPU memory)"]


@pytest.mark.parametrize("bias", [None, torch.tensor([1.0, -2.0, 0.5])], ids=["no bias", "bias"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=["wide stream", "same dtype"])
@pytest.mark.parametrize("p, rng", [(0.0, Rng(1)), (0.5, None), (0.5, Rng(1))], ids=["p=0", "no rng", "p=0.5"])
def test_a_residual_addition_of_two_functions_is_the_reference(
    p: float, rng: Rng | None, stream: torch.dtype, bias: Tensor | None
) -> None:
    """With dropout the gradient drops the same elements; a gradient that is dy itself is not computed."""
    asked = []

    def keep(shape: torch.Size, p: float, rng: Rng | None) -> Tensor:
        return torch.ones(shape) if rng is None else ops.dropout.reference(torch.ones(shape), p, rng)

    def add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, rng: Rng | None) -> Tensor:
        assert rng is not None or p == 0.0
        terms = x.float() if bias is None else x.float() + bias.float()
        return (residual.float() + terms * keep(x.shape, p, rng)).to(residual.dtype)

    def gradients(
        dy: Tensor, wants_dx: bool, bias: Tensor | None, dtype: torch.dtype, p: float, rng: Rng | None
    ) -> tuple[Tensor | None, Tensor | None]:
        assert dy.is_contiguous()
        asked.append(wants_dx)
        dx = dy.float() * keep(dy.shape, p, rng)
        return dx.to(dtype) if wants_dx else None, None if bias is None else dx.sum(0).to(bias.dtype)

    forward, backward = backend_tools.bias_dropout_add_from(add, gradients)
    require_same_signature(ops.bias_dropout_add, forward, "bias_dropout_add")
    x, residual = torch.randn(4, 3).bfloat16(), torch.randn(4, 3).to(stream)
    b = None if bias is None else bias.bfloat16()
    y, saved = forward(x, b, residual, p=p, rng=rng)
    leaves = [t if t is None else t.detach().requires_grad_() for t in (x, b, residual)]
    expected = ops.bias_dropout_add.reference(*leaves, p=p, rng=rng)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(3, 4).to(stream).t()
    given = backward(saved, dy)
    wanted = torch.autograd.grad(expected, [t for t in leaves if t is not None], dy)
    torch.testing.assert_close([g for g in given if g is not None], list(wanted))
    unchanged = (p == 0.0 or rng is None) and stream == torch.bfloat16
    assert (given[0] is dy) == unchanged and given[2] is dy
    assert asked == ([] if unchanged and bias is None else [not unchanged])


# Activations and rotary.


def test_activations_name_their_kind_and_whether_they_are_gated() -> None:
    functions = backend_tools.activations_from(lambda *call: (call, ()))
    for op, function in zip((ops.swiglu, ops.geglu, ops.bias_gelu), functions):
        require_same_signature(op, function, op.name)
    swiglu, geglu, bias_gelu = functions
    assert swiglu(1)[0] == (1, None, "silu", True)
    assert geglu(1, 2)[0] == (1, 2, "tanh", True)
    assert bias_gelu(1, 2, "fast")[0] == (1, 2, "fast", False)


def test_rotarys_gradient_rotates_back() -> None:
    forward, backward = backend_tools.rotary_from(lambda *call: call)
    require_same_signature(ops.rotary, forward, "rotary")
    y, residuals = forward("x", "cos", "sin", layout="TND", interleaved=True)
    assert y == ("x", "cos", "sin", "TND", True, 1.0)
    assert backward(residuals, "dy") == (("dy", "cos", "sin", "TND", True, -1.0),)


TABLES = [
    *((layout, per_sample) for layout in ("SBND", "BSND", "BNSD") for per_sample in (False, True)),
    ("TND", False),
]


@pytest.mark.parametrize("layout, per_sample", TABLES)
def test_angle_strides_find_the_angles_of_every_row(layout: str, per_sample: bool) -> None:
    sizes = {"S": 3, "T": 3, "B": 2, "N": 4}
    shape = tuple(sizes[letter] for letter in layout[:-1])
    cos = torch.randn(2, 3, 5) if per_sample else torch.randn(3, 5)
    a, b, c = backend_tools.angle_strides(layout, cos)
    rows = shape if len(shape) == 3 else (1, *shape)
    angles = cos.flatten().as_strided((*rows, 5), (a, b, c, 1))
    letters = layout[:-1] if len(shape) == 3 else "-" + layout[:-1]
    for at in torch.cartesian_prod(*(torch.arange(n) for n in rows)).tolist():
        where = dict(zip(letters, at))
        token = where["T"] if "T" in where else where["S"]
        expected = cos[where["B"], token] if per_sample else cos[token]
        assert torch.equal(angles[tuple(at)], expected)


# Attention.


def spec(layout: str, q: Tensor, k: Tensor, **given: Any) -> backend_tools.AttentionSpec:
    return backend_tools.attention_spec(ops.flash_attention.Call(q, k, k, layout=layout, **given))


@pytest.mark.parametrize("layout", ops.layouts.LAYOUTS[:-1])
def test_a_spec_says_the_same_of_every_dense_layout(layout: str) -> None:
    q, k = (ops.layouts.from_bnsd(x.transpose(1, 2), layout) for x in (Q, K))
    heads = {"num_heads": 4, "num_kv_heads": 2} if layout.endswith("H") else {}
    s = spec(layout, q, k, next_tokens=0, **heads)
    assert s == (layout, 2, 4, 2, 5, 9, 8, None, 0, 1 / math.sqrt(8), 0.0, None, 8, None, False, ())
    assert (s.group, s.causal, s.unbounded, s.packed) == (2, True, False, False)
    assert hash(s) == hash(spec(layout, q, k, next_tokens=0, **heads))


def test_a_spec_of_packed_sequences_counts_tokens() -> None:
    s = spec("TND", torch.empty(11, 4, 8), torch.empty(7, 1, 8), scale=2, pre_tokens=3)
    assert (s.batch, s.heads, s.kv_heads, s.sq, s.skv, s.scale, s.packed) == (1, 4, 1, 11, 7, 2.0, True)
    assert type(s.scale) is float and not s.causal and not s.unbounded


def test_dropout_needs_a_probability_and_a_stream() -> None:
    assert spec("BSND", Q, K, dropout_p=0.5).dropout_p == 0.0
    assert spec("BSND", Q, K, rng=Rng(1)).rng is None
    both = spec("BSND", Q, K, dropout_p=0.5, rng=Rng(1))
    assert (both.dropout_p, both.rng) == (0.5, Rng(1))


def test_a_spec_names_what_a_kernel_must_know() -> None:
    wide = torch.empty(2, 9, 2, 12)
    every = {"softcap": 2.0, "alibi_slopes": torch.ones(4), "bias": torch.ones(9), "sinks": torch.ones(4)}
    call = ops.flash_attention.Call(Q, K, wide, layout="BSND", top_left=True, next_tokens=0, **every)
    s = backend_tools.attention_spec(call)
    assert (s.d, s.dv, s.softcap, s.top_left, s.extras) == (8, 12, 2.0, True, backend_tools.EXTRAS)
    assert s.refusals("x", ("softcap", "bias", "sinks", "top_left")) == [
        "heads of 12 channels in v and 8 in k (x has none)",
        "alibi_slopes (x has none)",
    ]
    assert not s.refusals("x", backend_tools.EXTRAS)


def test_a_dense_window_at_the_top_left_is_a_shifted_one() -> None:
    s = spec("BSND", Q, K, pre_tokens=3, next_tokens=1, top_left=True)
    assert (s.pre, s.next, s.top_left, s.extras) == (3 + 4, 1 - 4, False, ())
    q, k = torch.empty(11, 4, 8), torch.empty(7, 1, 8)
    assert spec("TND", q, k, next_tokens=0, top_left=True).extras == ("top_left",)
    assert spec("TND", q, k, top_left=True).extras == ()


@pytest.mark.parametrize("layout", ops.layouts.LAYOUTS)
def test_attention_strides_find_batch_token_and_head(layout: str) -> None:
    x = torch.arange(6 * 4 * 3 * 8).view(2, 4, 9, 8)  # [b, n, s, d]
    given = x[0].transpose(0, 1).contiguous() if layout == "TND" else ops.layouts.from_bnsd(x, layout).contiguous()
    b, s, n = backend_tools.attention_strides(layout, given.stride(), 8)
    flat = given.flatten()
    assert torch.equal(flat[s * 5 + n * 3 :][:8], x[0, 3, 5])
    if layout != "TND":
        assert torch.equal(flat[b + s * 5 + n * 3 :][:8], x[1, 3, 5])


def test_a_window_without_a_side_is_a_number_that_reaches_everything() -> None:
    assert backend_tools.bounded(None) == backend_tools.bounded(1 << 60) == backend_tools.UNBOUNDED
    assert (backend_tools.bounded(-7), backend_tools.bounded(-(1 << 60))) == (-7, -backend_tools.UNBOUNDED)


def test_starts_of_packed_sequences_are_checked() -> None:
    q, k = torch.empty(5, 1, 8), torch.empty(6, 1, 8)
    good = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 0, 6], dtype=torch.int32)

    def starts(*cu: Tensor | None) -> backend_tools.CuSeqlens:
        call = ops.flash_attention.Call(q, k, k, layout="TND", cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
        return backend_tools.packed_starts(call)

    assert starts(*good) == ([0, 2, 5], [0, 0, 6])
    assert starts(None, None) is None
    for wrong in ([1, 2, 6], [0, 2, 5], [0, 7, 6]):
        with pytest.raises(hal.ContractError, match="cu_seqlens_k rising from 0 to 6"):
            starts(good[0], torch.tensor(wrong, dtype=torch.int32))


# Vocabulary.


class _HalfOfTheVocabulary(hal.SingleRankComm):
    """Rank 1 of 2: adds the other rank's contribution, which a test computes itself."""

    def __init__(self, other: Callable[[Tensor, str], Tensor]) -> None:
        super().__init__()
        self.other, self.size, self.rank = other, 2, 1

    def all_reduce(self, x: Tensor, op: str = "sum", **_: Any) -> Tensor:
        return self.other(x, op)


def test_an_embedding_and_its_gradient_over_shards_are_those_of_the_whole() -> None:
    table, ids, dy = torch.randn(10, 3), torch.tensor([[1, 9], [6, 1]]), torch.randn(2, 2, 3)
    whole, residuals = backend_tools.sharded_embedding(table, ids)
    assert torch.equal(whole, table[ids])
    (expected,) = backend_tools.sharded_embedding_gradient(residuals, dy)
    first, _ = backend_tools.sharded_embedding(table[:5], ids, comm=_HalfOfTheVocabulary(lambda x, op: x))
    assert (first[ids >= 5] == 0.0).all()
    comm = _HalfOfTheVocabulary(lambda x, op: x + first)
    y, residuals = backend_tools.sharded_embedding(table[5:], ids, vocab_start=5, comm=comm)
    assert torch.equal(y, whole)
    assert torch.equal(backend_tools.sharded_embedding_gradient(residuals, dy)[0], expected[5:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_cross_entropy_tells_its_kernels_of_the_whole_vocabulary(ranks: int) -> None:
    calls: list[Any] = []

    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        calls.append(call)
        return torch.ones(4), torch.zeros(2, 4)

    cross_entropy, _ = backend_tools.cross_entropy_from(forward, lambda *call: None)
    require_same_signature(ops.cross_entropy, cross_entropy, "cross_entropy")
    comm = hal.SingleRankComm() if ranks == 1 else _HalfOfTheVocabulary(lambda x, op: x)
    logits = torch.randn(5, 4).t()
    cross_entropy(logits, torch.zeros(4, dtype=torch.int64), label_smoothing=0.1, vocab_start=0, comm=comm)
    ((given, _, smoothing, start, classes, seen_comm),) = calls
    assert given.is_contiguous() and torch.equal(given, logits) and classes == 5 * ranks and start == 0
    assert smoothing == pytest.approx(0.1 * classes / (classes - 1))
    assert seen_comm is (None if ranks == 1 else comm)


@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropys_gradient_goes_over_the_logits_only_if_they_are_given_up(inplace: bool) -> None:
    def backward(logits: Tensor, target: Tensor, stats: Tensor, dloss: Tensor, dlogits: Tensor, *_: Any) -> None:
        assert dloss.is_contiguous()
        dlogits.copy_(dloss[:, None].expand(dlogits.shape))

    cross_entropy, bwd = backend_tools.cross_entropy_from(lambda *call: (torch.ones(4), torch.zeros(2, 4)), backward)
    logits = torch.ones(4, 5)
    _, residuals = cross_entropy(logits, torch.zeros(4, dtype=torch.int64), inplace_backward=inplace)
    version = logits._version
    (dlogits,) = bwd(residuals, torch.full((4, 2), 7.0)[:, 0])
    assert (dlogits == 7.0).all() and (dlogits is logits) == inplace
    assert (logits._version > version) == inplace and (inplace or (logits == 1.0).all())


def test_a_gradient_of_no_rows_runs_no_kernel() -> None:
    def backward(*_: Any) -> None:
        raise AssertionError("a kernel was launched over nothing")

    cross_entropy, bwd = backend_tools.cross_entropy_from(lambda *call: (torch.ones(0), torch.zeros(2, 0)), backward)
    _, residuals = cross_entropy(torch.empty(0, 5), torch.empty(0, dtype=torch.int64))
    assert bwd(residuals, torch.empty(0))[0].shape == (0, 5)


# The mixture of experts.


def router(score_function: str, topk: int = 2, **given: Any) -> backend_tools.RouterSpec:
    return backend_tools.router_spec(
        ops.moe_router.Call(torch.empty(3, 8), topk, score_function=score_function, **given)
    )


def test_a_routers_spec_replaces_names_by_numbers() -> None:
    assert router("softmax", 3, scaling_factor=2) == (3, 0, 0, 2.0, 0, 0)
    assert router("softmax", num_groups=4, group_topk=2) == (2, 4, 2, 1.0, 0, 0)
    assert router("softmax", pre_softmax=True) == (2, 0, 0, 1.0, 0, 1)
    assert router("softmax", pre_softmax=True, num_groups=4, group_topk=2) == (2, 4, 2, 1.0, 2, 1)
    assert router("sigmoid") == (2, 0, 0, 1.0, 0, 3)
    assert router("sigmoid", expert_bias=torch.zeros(8)) == (2, 0, 0, 1.0, 1, 3)
    assert router("sigmoid", num_groups=4, group_topk=2) == (2, 4, 2, 1.0, 1, 3)
    assert router("sigmoid", 1).probability == router("sinkhorn", 1).probability == 2
    assert router("sinkhorn").probability == 1
    assert router("sinkhorn", pre_softmax=True).selection == 0


def _probabilities(logits: Tensor, indices: Tensor, spec: backend_tools.RouterSpec) -> Tensor:
    """What RouterSpec's docstring says of `probability`, times the scale."""
    chosen = logits.gather(1, indices)
    sigmoids = chosen.sigmoid()
    kinds = (
        chosen.softmax(-1),
        logits.softmax(-1).gather(1, indices),
        sigmoids,
        sigmoids / sigmoids.sum(-1, keepdim=True),
    )
    return kinds[spec.probability] * spec.scale


def _route(
    logits: Tensor,
    bias: Tensor | None,
    probs: Tensor,
    indices: Tensor,
    given: bool,
    spec: backend_tools.RouterSpec,
) -> None:
    assert all(t.is_contiguous() for t in (logits, probs, indices)) and (bias is None or bias.is_contiguous())
    if not given:
        scores = (logits, logits.sigmoid(), logits.softmax(-1))[spec.selection]
        indices.copy_((scores if bias is None else scores + bias).topk(spec.topk).indices)
    probs.copy_(_probabilities(logits, indices, spec))


def _route_bwd(
    logits: Tensor, indices: Tensor, dprobs: Tensor, dlogits: Tensor, spec: backend_tools.RouterSpec
) -> None:
    assert dprobs.is_contiguous()
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        dlogits.copy_(torch.autograd.grad(_probabilities(leaf, indices, spec), leaf, dprobs)[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pre_softmax": True},
        {"score_function": "sigmoid", "scaling_factor": 2.5},
        {"score_function": "sigmoid", "expert_bias": torch.linspace(-1.0, 1.0, 16)[::2]},
        {"indices": torch.stack([torch.arange(5), torch.arange(5) + 3]).t()},
    ],
    ids=["softmax", "pre_softmax", "sigmoid", "bias", "indices"],
)
def test_a_router_of_two_functions_is_the_reference(options: dict[str, Any]) -> None:
    forward, backward = backend_tools.router_from(_route, _route_bwd)
    require_same_signature(ops.moe_router, forward, "moe_router")
    logits = torch.randn(8, 5).t()
    (probs, indices), residuals = forward(logits, 2, **options)
    leaf = logits.detach().requires_grad_()
    expected = ops.moe_router.reference(leaf, 2, **options)
    torch.testing.assert_close((probs, indices), expected)
    dprobs = torch.randn(2, 5).t()
    torch.testing.assert_close(backward(residuals, dprobs), torch.autograd.grad(expected[0], leaf, dprobs))


def test_sinkhorns_choice_is_given_to_the_router_and_no_tokens_run_nothing() -> None:
    forward, backward = backend_tools.router_from(_route, _route_bwd)
    logits = torch.randn(6, 4)
    (probs, indices), _ = forward(logits, 2, score_function="sinkhorn")
    torch.testing.assert_close((probs, indices), ops.moe_router.reference(logits, 2, score_function="sinkhorn"))

    def never(*arguments: object) -> None:
        raise AssertionError

    forward, backward = backend_tools.router_from(never, never)
    (probs, indices), residuals = forward(torch.empty(0, 4), 2)
    assert probs.shape == indices.shape == (0, 2) and indices.dtype == torch.int64
    assert backward(residuals, probs)[0].shape == (0, 4)


INDICES = torch.tensor([[2, 0], [-1, 1], [0, 2]])


def _gather(rows: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    assert rows.is_contiguous() and row_map.is_contiguous()
    return ops.unpermute.reference(rows, row_map, probs=probs)


@pytest.mark.parametrize("capacity", [None, 1, 3])
def test_the_gradient_of_permute_gathers_rows_and_probabilities(capacity: int | None) -> None:
    x, probs = torch.randn(3, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    rows, row_map, _, permuted = ops.permute.reference(x, INDICES, 3, probs=probs, capacity=capacity)
    assert torch.equal(backend_tools.permuted_probs(probs, row_map, len(rows)), permuted)
    drows, dpermuted = torch.randn(4, len(rows)).t(), torch.randn(len(rows))
    expected = torch.autograd.grad((rows, permuted), (x, probs), (drows, dpermuted))
    backward = backend_tools.permute_backward(_gather)
    torch.testing.assert_close(backward((row_map,), drows, dpermuted), expected)
    dx, none = backward((row_map,), drows)
    torch.testing.assert_close(dx, expected[0])
    assert none is None


@pytest.mark.parametrize("weighted", [True, False])
def test_unpermute_of_two_functions_is_the_reference(weighted: bool) -> None:
    def gradients(rows: Tensor, row_map: Tensor, probs: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        assert all(t.is_contiguous() for t in (rows, row_map, dy))
        leaves = [t.detach().requires_grad_() for t in (rows, probs) if t is not None]
        with torch.enable_grad():
            y = ops.unpermute.reference(leaves[0], row_map, probs=None if probs is None else leaves[1])
        drows, *dprobs = torch.autograd.grad(y, leaves, dy)
        assert probs is None or (probs.is_contiguous() and probs.dtype == torch.float32)
        return drows, dprobs[0] if dprobs else None

    forward, backward = backend_tools.unpermute_from(_gather, gradients)
    require_same_signature(ops.unpermute, forward, "unpermute")
    row_map = ops.permute.reference(torch.empty(3, 4), INDICES, 3)[1].t().contiguous().t()
    rows, probs = torch.randn(4, 6).t(), torch.rand(2, 3).bfloat16().t() if weighted else None
    y, residuals = forward(rows, row_map, probs=probs)
    leaves = [t.detach().requires_grad_() for t in (rows, probs) if t is not None]
    expected = ops.unpermute.reference(leaves[0], row_map, probs=leaves[1] if weighted else None)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(4, 3).t()
    drows, dprobs = backward(residuals, dy)
    wanted = torch.autograd.grad(expected, leaves, dy)
    torch.testing.assert_close(drows, wanted[0])
    if weighted:
        torch.testing.assert_close(dprobs, wanted[1])
    else:
        assert dprobs is None


def test_groups_without_rows_are_passed_over() -> None:
    groups = list(backend_tools.filled_groups([2, 0, 3, 0]))
    assert groups == [(0, slice(0, 2)), (2, slice(2, 5))]


# The optimizer.


def test_adamw_by_members_and_scalars_is_the_reference() -> None:
    """A backend that uses only the helpers: their outputs must be sufficient for the formula."""

    @with_signature_of(ops.adamw, members=backend_tools.adamw_members, s=backend_tools.adamw_scalars)
    def adamw(members: list[backend_tools.AdamWMember], s: backend_tools.AdamWScalars) -> None:
        correction1, correction2 = s.corrections
        for p, g, m, v, copy in members:
            g = g.to(p.dtype) * s.grad_scale
            m.mul_(s.beta1).add_(g, alpha=1.0 - s.beta1)
            v.mul_(s.beta2).addcmul_(g, g, value=1.0 - s.beta2)
            p.mul_(s.decay).sub_(s.lr / correction1 * m / ((v / correction2).sqrt() + s.eps))
            if copy is not None:
                copy.copy_(p)

    for sample in ops.adamw.edge_cases():
        mine, reference = (sample.build(torch.float32) for _ in range(2))
        adamw(*mine[0], **mine[1])
        ops.adamw.reference(*reference[0], **reference[1])
        for ours, theirs in zip(mine[0], reference[0]):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(mine[1].get("model_params"), reference[1].get("model_params"))


def test_members_are_grouped_by_the_dtypes_of_gradient_and_copy() -> None:
    p = torch.ones(2)

    def members(grads: list[Tensor], copies: list[Tensor] | None) -> list[backend_tools.AdamWMember]:
        same = [p] * len(grads)
        return backend_tools.adamw_members(ops.adamw.Call(same, grads, same, same, step=1, lr=0.1, model_params=copies))

    groups = backend_tools.adamw_groups(members([p, p.half(), p], [p.half(), p, p.half()]))
    assert {kinds: len(group) for kinds, group in groups.items()} == {
        (torch.float32, torch.float16): 2,
        (torch.float16, torch.float32): 1,
    }
    assert set(backend_tools.adamw_groups(members([p], None))) == {(torch.float32, torch.float32)}


def test_a_tensor_with_gaps_is_not_updated_in_place() -> None:
    whole, gaps = torch.ones(4), torch.ones(4, 2)[:, 0]
    written = backend_tools.adamw_written(
        ops.adamw.Call([whole], [gaps], [whole], [whole], step=1, lr=0.1, model_params=[gaps])
    )
    assert len(written) == 4 and written[3] is gaps
    assert "not contiguous" in backend_tools.in_place_reasons(written)[0]
    assert backend_tools.in_place_reasons(written[:3]) == ()


# The processor and compilation.


def test_the_first_processor_is_described_by_lower_case_names() -> None:
    facts = backend_tools.processor_facts()
    assert all(name == name.strip().lower() and value == value.strip() for name, value in facts.items())
    if Path("/proc/cpuinfo").exists():
        assert facts.get("processor") == "0"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert backend_tools.cache_directory("mine") == tmp_path / "xdg" / "hal" / "mine"
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "asked"))
    assert backend_tools.cache_directory("mine") == tmp_path / "asked" / "mine"
    for directory in (tmp_path / "asked", tmp_path / "asked" / "mine"):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_others_can_write_to_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(hal.BackendUnavailable, match=r"writable by others \(mode 0o777\).*HAL_CACHE_DIR"):
        backend_tools.cache_directory("mine")
    cache.chmod(0o700)
    backend_tools.cache_directory("mine").chmod(0o770)
    with pytest.raises(hal.BackendUnavailable, match="writable by others"):
        backend_tools.cache_directory("mine")
    (cache / "mine").chmod(0o700)
    if os.geteuid() == 0:  # root is trusted
        os.chown(cache / "mine", 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(hal.BackendUnavailable, match="belongs to user"):
        backend_tools.cache_directory("mine")


def test_a_cache_that_cannot_be_made_is_an_error_of_hal(cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(hal.BackendUnavailable, match="cannot use the cache directory"):
        backend_tools.cache_directory("mine")


def test_threads_that_start_together_build_once(cache: Path) -> None:
    target, builds = backend_tools.cache_directory("mine") / "result.so", []

    def build(work: Path) -> Path:
        builds.append(work)
        assert list(work.iterdir()) == []
        (work / "out").write_text("done")
        return work / "out"

    threads = [threading.Thread(target=backend_tools.build_once, args=(target, build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and target.read_text() == "done"
    assert sorted(p.name for p in target.parent.iterdir()) == ["lock", "result.so", "result.so.sha256"]


def test_a_failed_build_leaves_nothing_and_the_next_one_removes_what_a_crash_left(cache: Path) -> None:
    target = backend_tools.cache_directory("mine") / "result.so"

    def fails(work: Path) -> Path:
        (work / "half").write_text("")
        raise hal.BackendUnavailable("no")

    with pytest.raises(hal.BackendUnavailable):
        backend_tools.build_once(target, fails)
    assert [p.name for p in target.parent.iterdir()] == ["lock"]
    (target.parent / "build-crashed").mkdir()
    (target.parent / "build-crashed" / "half").write_text("")

    def works(work: Path) -> Path:
        (work / "folder").mkdir()
        return work / "folder"

    assert backend_tools.build_once(target, works).is_dir()
    assert sorted(p.name for p in target.parent.iterdir()) == ["lock", "result.so", "result.so.sha256"]


@pytest.mark.parametrize("how", ["cut off", "empty", "a changed byte", "another mode", "no digest", "another's digest"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_damaged_result_is_built_again(cache: Path, how: str, kind: str) -> None:
    target, builds = backend_tools.cache_directory("mine") / "result.so", []

    def build(work: Path) -> Path:
        builds.append(work)
        (work / "lib").mkdir()
        file = work / "lib" / "out.so"
        file.write_bytes(b"0123456789")
        return file if kind == "file" else work / "lib"

    backend_tools.build_once(target, build)
    backend_tools.build_once(target, build)
    assert len(builds) == 1
    file = target if kind == "file" else target / "out.so"
    digest = target.with_name("result.so.sha256")
    if how == "cut off":
        os.truncate(file, 5)
    elif how == "empty":
        os.truncate(file, 0)
    elif how == "a changed byte":
        file.write_bytes(b"0123456799")
    elif how == "another mode":
        file.chmod(0o777)
    elif how == "no digest":
        digest.unlink()
    else:
        digest.write_text("0" * 64)
    assert not backend_tools.intact(target)
    backend_tools.build_once(target, build)
    assert len(builds) == 2 and file.read_bytes() == b"0123456789" and backend_tools.intact(target)


def test_a_result_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = backend_tools.cache_directory("mine") / "result.so"
    target.with_name("new").write_text("x")
    backend_tools.place(target.with_name("new"), target)
    assert backend_tools.intact(target)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not backend_tools.intact(target)


def test_a_folder_above_the_cache_that_others_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "open" / "cache"))
    with pytest.raises(hal.BackendUnavailable, match=r"open is writable by others \(mode 0o777\)"):
        backend_tools.cache_directory("mine")
    (tmp_path / "open").chmod(0o1777)
    assert backend_tools.cache_directory("mine").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    (tmp_path / "open").chmod(0o770)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "link"))
    with pytest.raises(hal.BackendUnavailable, match="open is writable by others"):
        backend_tools.cache_directory("mine")


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\nfrom hal.backend_tools import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=False)
    assert done.returncode == -9
    with backend_tools.locked(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("language, variable, hint", [("C", "CC", "apt install gcc"), ("C++", "CXX", "apt install g")])
def test_a_missing_compiler_is_named_with_what_to_install(
    language: str, variable: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, "no-such-compiler -m64")
    with pytest.raises(hal.BackendUnavailable, match=rf"we need one .*\${variable}=no-such-compiler -m64.*{hint}"):
        backend_tools.find_compiler(language, "we need one")
    monkeypatch.setenv(variable, f"{sys.executable} -x")
    assert backend_tools.find_compiler(language, "we need one") == [sys.executable, "-x"]
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hal.BackendUnavailable, match=r"tried g(cc|\+\+), clang"):
        backend_tools.find_compiler(language, "we need one")


def test_a_compiler_that_fails_is_quoted() -> None:
    python = [sys.executable, "-c"]
    backend_tools.run_compiler([*python, "pass"], "nothing")
    with pytest.raises(hal.BackendUnavailable, match=r"(?s)failed \(exit 3\) on the kernels.*import sys.*it is broken"):
        backend_tools.run_compiler(
            [*python, "import sys; sys.stderr.write('it is broken'); sys.exit(3)"], "the kernels"
        )
    assert backend_tools.compiler_version([sys.executable]).startswith("Python 3")


def test_announcements_leave_stdout_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    backend_tools.announce("compiling")
    assert capsys.readouterr() == ("", "hal: compiling\n")


def test_every_helper_says_what_it_is_for() -> None:
    undocumented = [
        name
        for name in backend_tools.__all__
        if callable(getattr(backend_tools, name)) and not inspect.getdoc(getattr(backend_tools, name))
    ]
    assert undocumented == []
