"""Properties of cpu_ref's kernels that the conformance kit does not test: sizes across every block boundary,
bit-equality over repetitions and numbers of threads, memory that must not be touched, and intermediate overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import Rng, ops
from hal.comm.threads import run_threads

Threads = Callable[[int], None]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Compares with a tolerance relative to the largest expected element."""
    assert got.shape == want.shape
    scale = want.double().abs().max().clamp(min=1e-30) if want.numel() else torch.tensor(1.0)
    error = ((got.double() - want.double()).abs() / scale).max().item() if want.numel() else 0.0
    assert error <= tolerance, f"error {error:.3g} of the largest element, allowed {tolerance:g}"


def run(op: Callable[..., Tensor], inputs: tuple[Any, ...], dtype: torch.dtype, seed: int = 7) -> list[Tensor]:
    """Output and gradients of the tensors among the inputs, converted to dtype, for one random output gradient."""
    converted = [t.to(dtype).requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]
    leaves = [t for t in converted if isinstance(t, Tensor) and t.requires_grad]
    y = op(*converted)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# name -> (op, inputs). Sizes exceed the threshold for parallel execution and lie near block boundaries.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "layer_norm": (ops.layer_norm, (normal(517, 67), normal(67, seed=1), normal(67, seed=2))),
    "rms_norm": (ops.rms_norm, (normal(35, 1025), normal(1025, seed=1))),
    "swiglu": (ops.swiglu, (normal(67, 3, 2 * 129), normal(2 * 129, seed=1))),
    "geglu": (lambda x: ops.geglu(x, None, "none"), (normal(131, 2 * 255),)),
    "bias_gelu": (lambda x, b: ops.bias_gelu(x, b, "none"), (normal(131, 257), normal(257, seed=1))),
    "softmax": (lambda x: ops.scale_mask_softmax(x, None, 0.3, True), (normal(2, 3, 65, 97),)),
    "softmax_masked": (
        lambda x: ops.scale_mask_softmax(x, torch.ones(65, 97, dtype=torch.bool).triu(40)[None, None], 0.3),
        (normal(2, 3, 65, 97),),
    ),
    "cross_entropy": (
        lambda x: ops.cross_entropy(x, torch.arange(7) * 700, label_smoothing=0.1),
        (3 * normal(7, 4999),),
    ),
    "rotary": (lambda x: ops.rotary(x, *normal(2, 131, 9).float().unbind()), (normal(131, 2, 3, 23),)),
    "dropout": (lambda x: ops.dropout(x, 0.3, Rng(5, 2**40)), (normal(17, 1031),)),
    "bias_dropout_add": (
        lambda x, b, r: ops.bias_dropout_add(x, b, r, p=0.4, rng=Rng(1)),
        (normal(131, 151), normal(151, seed=1), normal(131, 151, seed=2)),
    ),
    "linear": (ops.linear, (normal(129, 67), normal(515, 67, seed=1), normal(515, seed=2))),
    "embedding": (lambda w: ops.embedding(w, torch.arange(4096) * 7919 % 33), (normal(33, 19),)),
}
TOLERANCE = {F64: 1e-13, F32: 2e-6, BF16: 1.2e-2, F16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_blocks_and_tails_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    op, inputs = CASES[name]
    rounded = tuple(t.to(dtype).double() if isinstance(t, Tensor) else t for t in inputs)
    with hal.policy(fallback="reference", pin=dict.fromkeys(hal.OPS, "reference")):
        want = run(op, rounded, F64)
    for got, expected in zip(run(op, rounded, dtype), want):
        close(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", sorted(set(CASES) - {"linear"}))  # a matrix product may split its sums among threads
def test_results_do_not_depend_on_repetition_or_threads(name: str, dtype: torch.dtype, threads: Threads) -> None:
    op, inputs = CASES[name]
    first = run(op, inputs, dtype)
    for count in (1, 2, 3, 2):
        threads(count)
        assert all(map(torch.equal, first, run(op, inputs, dtype)))


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_not_written(name: str) -> None:
    op, inputs = CASES[name]
    before = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    run(op, inputs, F64)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs) if isinstance(a, Tensor))


def test_layer_norm_survives_a_large_mean_and_an_outlier() -> None:
    x = normal(64, 768).float() + 1000.0
    x[:, 0] = 1e5
    w, b = torch.ones(768), torch.zeros(768)
    with hal.policy(pin={"layer_norm": "reference"}):
        want = ops.layer_norm(x.double(), w.double(), b.double())
    close(ops.layer_norm(x, w, b), want, 2e-6)


def test_activations_saturate_without_nan() -> None:
    x = torch.tensor([[-3e38, -1e20, -100.0, 100.0, 1e20, 3e38]])
    for op, keyword in ((ops.bias_gelu, "none"), (ops.bias_gelu, "tanh"), (ops.bias_gelu, "fast")):
        y = op(x, None, keyword)
        assert y[0, :3].abs().max() == 0 and torch.equal(y[0, 3:], x[0, 3:])
    gate = torch.cat([x, torch.ones_like(x)], -1)
    assert torch.equal(ops.swiglu(gate)[0, 3:], x[0, 3:])


def test_softmax_reads_a_mask_through_any_strides() -> None:
    x = normal(2, 3, 5, 70).float()
    full = torch.rand(2, 3, 5, 70, generator=torch.Generator().manual_seed(3)) < 0.5
    want = ops.scale_mask_softmax(x, full)
    transposed = full.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert transposed.stride(-1) != 1 and torch.equal(ops.scale_mask_softmax(x, transposed), want)
    column = torch.tensor([True, False, True, False, False])[:, None]
    y = ops.scale_mask_softmax(x, column)
    assert y[:, :, column[:, 0]].abs().max() == 0 and y[:, :, ~column[:, 0]].min() > 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 2, 15, 16, 31, 33, 48, 65, 95, 127, 128, 145])
def test_a_rows_neighbours_do_not_show_in_it(width: int, dtype: torch.dtype) -> None:
    """Short rows are processed beyond their ends, where the next row begins."""
    rows = 9
    x, targets = normal(rows, width), torch.arange(rows) % width
    hidden = torch.ones(rows, width, dtype=torch.bool).triu(1)
    functions: dict[str, Callable[[Tensor, slice], Tensor]] = {
        "softmax": lambda x, at: ops.scale_mask_softmax(x[None, None], None, 0.7)[0, 0],
        "masked": lambda x, at: ops.scale_mask_softmax(x[None, None], hidden[at][None, None], 0.7)[0, 0],
        "cross_entropy": lambda x, at: ops.cross_entropy(x, targets[at]),
        "smoothed": lambda x, at: ops.cross_entropy(x, targets[at], label_smoothing=0.1 if width > 1 else 0.0),
    }
    for f in functions.values():
        row_results = [run(lambda t, f=f, i=i: f(t, slice(i, i + 1)), (x[i : i + 1],), dtype)[0] for i in range(rows)]
        clean, grad = run(lambda t, f=f: f(t, slice(None)), (x,), dtype)
        close(clean, torch.cat(row_results), TOLERANCE[dtype])
        spoiled = x.clone()
        spoiled[1::2] = float("nan")
        out, spoiled_grad = run(lambda t, f=f: f(t, slice(None)), (spoiled,), dtype)
        assert torch.equal(out[::2], clean[::2]) and torch.equal(spoiled_grad[::2], grad[::2])


@pytest.mark.parametrize("s", [3, 37, 129, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_of_any_number_of_rows(s: int, causal: bool) -> None:
    """Rows are distributed to threads by their size in bytes."""
    x = normal(2, 3, s, s).float()
    got = run(lambda t: ops.scale_mask_softmax(t, None, 0.3, causal), (x,), F32)
    with hal.policy(fallback="reference", pin={"scale_mask_softmax": "reference"}):
        want = run(lambda t: ops.scale_mask_softmax(t, None, 0.3, causal), (x,), F64)
    for a, b in zip(got, want):
        close(a, b, TOLERANCE[F32])


def test_softmax_ignores_nan_and_inf_behind_the_mask() -> None:
    x = normal(1, 1, 2, 40).float()
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[3, 20, 39]] = True
    clean = ops.scale_mask_softmax(x, mask)
    x[..., 3], x[..., 20], x[..., 39] = float("nan"), float("inf"), -float("inf")
    assert torch.equal(ops.scale_mask_softmax(x, mask), clean)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("size", [1e10, 1e30, -1e30])
def test_softmax_of_numbers_whose_products_round_by_more_than_exp_can_take(size: float, dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 5, 70), size, dtype=dtype)
    x[..., 1::2] *= 1.5 if size < 0 else 0.5  # the other elements get equal probabilities
    x.requires_grad_()
    for scale in (0.1, 0.3, 0.7, 1.0):
        y = ops.scale_mask_softmax(x, None, scale)
        (dx,) = torch.autograd.grad(y, x, torch.arange(70.0, dtype=dtype).expand(x.shape))
        assert not y[..., 1::2].any() and not dx[..., 1::2].any()
        close(y[..., ::2], torch.full((1, 1, 5, 35), 1 / 35), 4e-3 if dtype is BF16 else 1e-6)
        want = scale / 35 * (torch.arange(0.0, 70.0, 2.0) - 34.0)
        close(dx[..., ::2], want.expand(1, 1, 5, 35), 3e-2 if dtype is BF16 else 1e-5)


def test_cross_entropy_with_a_first_block_of_minus_infinity() -> None:
    logits = normal(3, 5000).float()
    logits[:, :2048] = -float("inf")  # the kernel's whole first block
    loss = ops.cross_entropy(logits, torch.full((3,), 3000))
    close(loss, torch.nn.functional.cross_entropy(logits[:, 2048:], torch.full((3,), 952), reduction="none"), 1e-6)
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(ops.cross_entropy(logits, torch.full((3,), 3000)).sum(), logits)
    assert grad.isfinite().all() and grad[:, :2048].abs().max() == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_label_smoothing_keeps_its_digits_where_logits_are_far_from_zero(ranks: int) -> None:
    rows, v = 3, 6000
    logits = (normal(rows, v) + 1e4).float()
    logits[1, :2100] = -1e5  # the maximum is in a later block
    target = torch.tensor([1, 2, 5999])
    want = torch.nn.functional.cross_entropy(logits.double(), target, label_smoothing=0.1, reduction="none")
    # HAL smooths like Megatron, over the other tokens only; torch includes the target.
    eps = 0.1 * v / (v - 1)
    plain = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    want = (1 - eps) * plain + eps * ((want - 0.9 * plain) / 0.1)

    def part(comm: hal.Comm) -> Tensor:
        mine = logits.chunk(ranks, 1)[comm.rank]
        start = comm.rank * mine.shape[1]
        return ops.cross_entropy(mine, target, label_smoothing=0.1, vocab_start=start, comm=comm)

    for got in run_threads(ranks, part):
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_vocabulary_gives_the_loss_and_gradient_of_a_whole_one(smoothing: float, ranks: int) -> None:
    logits, target = 5 * normal(6, 40).float(), torch.tensor([0, 9, 10, 25, 39, 19])
    whole = run(lambda x: ops.cross_entropy(x, target, label_smoothing=smoothing), (logits,), F32)

    def rank(comm: hal.Comm) -> list[Tensor]:
        with torch.enable_grad():
            size = 40 // ranks
            mine = logits[:, comm.rank * size : (comm.rank + 1) * size]
            start = comm.rank * size
            return run(
                lambda x: ops.cross_entropy(x, target, label_smoothing=smoothing, vocab_start=start, comm=comm),
                (mine,),
                F32,
            )

    parts = run_threads(ranks, rank)
    for loss, _ in parts:
        close(loss, whole[0], 1e-6)
    close(torch.cat([grad for _, grad in parts], -1), whole[1], 1e-6)


def test_a_sharded_embedding_is_the_whole_one() -> None:
    table, ids = normal(12, 5).float(), torch.tensor([[0, 5, 11], [6, 6, 3]])
    whole = run(lambda w: ops.embedding(w, ids), (table,), F32)
    parts = run_threads(
        2,
        lambda comm: run(
            lambda w: ops.embedding(w, ids, vocab_start=6 * comm.rank, comm=comm),
            (table[6 * comm.rank : 6 * comm.rank + 6],),
            F32,
        ),
    )
    assert all(torch.equal(y, whole[0]) for y, _ in parts)
    assert torch.equal(torch.cat([grad for _, grad in parts]), whole[1])


def test_a_16_bit_embedding_gradient_does_not_stop_growing() -> None:
    weight = torch.zeros(2, 3, dtype=BF16, requires_grad=True)
    y = ops.embedding(weight, torch.zeros(4096, dtype=torch.int64))
    (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert grad[0].tolist() == [4096.0] * 3  # bfloat16 sums would stop at 256


@pytest.mark.parametrize("shape", [(5,), (64,), (3, 65), (2, 3, 4, 5), (1, 70000)])
def test_uniform_and_blocks_are_bit_equal_to_the_reference(shape: tuple[int, ...]) -> None:
    rng = Rng(2**63 + 11, 2**64 - 3)
    with hal.policy(pin={"philox_uniform": "reference"}):
        want = ops.philox_uniform(shape, rng)
    assert torch.equal(ops.philox_uniform(shape, rng), want)
    full, start = tuple(n + 3 for n in shape), (2,) * len(shape)
    inner = tuple(slice(2, 2 + n) for n in shape)
    assert torch.equal(ops.philox_uniform(shape, rng.block(full, start)), ops.philox_uniform(full, rng)[inner])


def test_dropout_of_a_shard_is_the_shard_of_dropout_forward_and_backward() -> None:
    whole = normal(7, 5, 300).float()
    rng = Rng(3)

    def drop(x: Tensor, r: Rng) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = ops.dropout(x, 0.25, r)
        return [y.detach(), *torch.autograd.grad(y.sum(), x)]

    part = drop(whole[2:5, :, 100:200], rng.block(whole.shape, (2, 0, 100)))
    for a, b in zip(part, drop(whole, rng)):
        assert torch.equal(a, b[2:5, :, 100:200])
    y, dx = drop(whole, rng)
    assert torch.equal(y == 0, dx == 0) and abs((y == 0).float().mean().item() - 0.25) < 0.02


def test_a_float32_residual_stream_takes_a_bfloat16_branch() -> None:
    x, bias, residual = normal(9, 70).to(BF16), normal(70, seed=1).to(BF16), normal(9, 70, seed=2).float()
    rng = Rng(4)
    leaves = [t.requires_grad_() for t in (x, bias, residual)]
    y = ops.bias_dropout_add(x, bias, residual, p=0.5, rng=rng)
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    keep = ops.philox_uniform((9, 70), rng) >= 0.5
    assert y.dtype == F32 and [g.dtype for g in grads] == [BF16, BF16, F32]
    close(y.detach(), residual + torch.where(keep, 2 * (x.float() + bias.float()), 0.0), 1e-6)
    assert torch.equal(grads[0], 2.0 * keep.to(BF16)) and torch.equal(grads[1].float(), 2.0 * keep.sum(0))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_backward_is_the_inverse_rotation_in_every_layout(interleaved: bool) -> None:
    angle = normal(2, 5, 6).float()
    x = normal(5, 2, 3, 14).float()  # SBND
    y = ops.rotary(x, angle.cos(), angle.sin(), interleaved=interleaved)
    for layout, order in (("BSND", (1, 0, 2, 3)), ("BNSD", (1, 2, 0, 3))):
        view = x.permute(order)  # not contiguous: the kernel goes through the strides
        got = ops.rotary(view, angle.cos(), angle.sin(), layout=layout, interleaved=interleaved)
        assert torch.equal(got, y.permute(order))
    leaf = x.clone().requires_grad_()
    (back,) = torch.autograd.grad(ops.rotary(leaf, angle.cos(), angle.sin(), interleaved=interleaved), leaf, y)
    close(back, x, 1e-6)


@pytest.mark.parametrize("shape", [(515, 129, 1030), (300, 1030, 129), (1024, 64, 256)])
def test_linear_takes_onednn_at_full_accuracy_on_any_strides(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, w, b = normal(k, m).float().t(), normal(n, 2 * k, seed=1).float()[:, ::2], normal(n, seed=2).float()
    with hal.policy(pin={"linear": "reference"}):
        want = run(ops.linear, (x, w, b), F64)
    for got, expected in zip(run(ops.linear, (x, w, b), F32), want):
        close(got, expected, 3e-6)


def test_adamw_follows_torchs_adamw() -> None:
    shapes = [(40000,), (3, 5), (), (129, 257), (0,)]
    ours = [normal(*s, seed=i).float() for i, s in enumerate(shapes)]
    theirs = [p.clone().requires_grad_() for p in ours]
    torchs = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    m, v = [torch.zeros_like(p) for p in ours], [torch.zeros_like(p) for p in ours]
    copies = [p.to(BF16) for p in ours]
    for step in range(1, 6):
        grads = [normal(*s, seed=10 * step + i).float() for i, s in enumerate(shapes)]
        for p, g in zip(theirs, grads):
            p.grad = g
        torchs.step()
        scaled = [4 * g for g in grads]
        ops.adamw(
            ours, scaled, m, v, step=step, lr=1e-2, beta2=0.95, weight_decay=0.1, grad_scale=0.25, model_params=copies
        )
    for p, q, copy in zip(ours, theirs, copies):
        close(p, q.detach(), 1e-6)
        assert torch.equal(copy, p.to(BF16))


def test_adamw_handles_mixed_dtypes_and_refuses_what_it_cannot_update_in_place() -> None:
    def state(*shapes: int) -> list[list[Tensor]]:
        return [[normal(n, seed=i + k).float().abs() for i, n in enumerate(shapes)] for k in range(4)]

    p, g, m, v = state(100, 33)
    want = [[t.clone() for t in ts] for ts in (p, g, m, v)]
    g16 = [g[0].to(BF16), g[1].to(F16)]
    ops.adamw(p, g16, m, v, step=2, lr=0.1, model_params=[torch.empty(100, dtype=F16), torch.empty(33)])
    ops.adamw(want[0], [t.float() for t in g16], want[2], want[3], step=2, lr=0.1)
    assert all(torch.equal(a, b) for ts, us in zip((p, m, v), (want[0], want[2], want[3])) for a, b in zip(ts, us))
    with pytest.raises(hal.UnsupportedOp, match="not contiguous"):
        ops.adamw(
            [torch.zeros(4, 4).t()[:2]], [torch.zeros(2, 4)], [torch.zeros(2, 4)], [torch.zeros(2, 4)], step=1, lr=1
        )


def test_l2norm_neither_overflows_nor_loses_small_terms() -> None:
    assert ops.l2norm([torch.full((100_000,), 1e30)]).item() == pytest.approx(1e30 * 100_000**0.5, rel=1e-6)
    assert ops.l2norm([torch.full((4,), 1e-30)]).item() == pytest.approx(2e-30, rel=1e-6)
    tensors = [torch.full((70_001,), 0.1), torch.full((33,), 0.1, dtype=BF16), torch.empty(0)]
    want = (70_001 * float(tensors[0][0]) ** 2 + 33 * float(tensors[1][0]) ** 2) ** 0.5
    assert ops.l2norm(tensors).item() == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize("at", [0, 32767, 32768, 65535, 65536])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_unscale_finds_one_bad_element_anywhere(at: int, bad: float) -> None:
    grads = [torch.ones(65537), torch.ones(3)]
    assert ops.unscale_and_check(grads, 0.5).item() == 0.0 and grads[0].unique().tolist() == [0.5]
    grads[0][at] = bad
    assert ops.unscale_and_check(grads, 0.5).item() == 1.0


def test_unscale_sees_an_overflow_of_the_product_and_writes_views_back() -> None:
    assert ops.unscale_and_check([torch.full((40,), 40000.0, dtype=F16)], 2.0).item() == 1.0
    store = torch.ones(4, 6)
    assert ops.unscale_and_check([store[:, ::2]], 3.0).item() == 0.0
    assert store[:, ::2].unique().tolist() == [3.0] and store[:, 1::2].unique().tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_may_write_its_gradient_over_the_logits(dtype: torch.dtype) -> None:
    source = torch.randn(7, 4999, dtype=dtype, requires_grad=True)
    target = torch.arange(7) * 700
    dloss = torch.rand(7)
    (want,) = torch.autograd.grad(ops.cross_entropy(source * 1, target, label_smoothing=0.1), source, dloss)
    logits = source * 1
    loss = ops.cross_entropy(logits, target, label_smoothing=0.1, inplace_backward=True)
    (got,) = torch.autograd.grad(loss, logits, dloss, retain_graph=True)
    assert torch.equal(got, want) and got.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
