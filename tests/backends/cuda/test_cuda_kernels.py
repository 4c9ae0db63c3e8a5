"""Cases that the conformance kit does not test: unaligned rows, rows too wide for shared memory, long lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hal
from hal import Rng, ops
from hal.backends.cuda import Cuda, launch, linear, norm, optimizer, vocab
from hal.backends.cuda.tensors import column_sum

pytestmark = pytest.mark.usefixtures("simulated")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, shift: int = 0) -> Tensor:
    """shift: offset of the first element from a 16-byte boundary, in elements."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    store = torch.empty(x.numel() + 16, dtype=dtype)
    base = (-store.data_ptr() % 16) // store.element_size() + shift
    return store[base : base + x.numel()].view(shape).copy_(x)


def compare(op, inputs: list[Tensor], *, tolerance: float, **how) -> None:
    """Output and gradients of op against its reference in float64."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    exact = [x.double().detach().requires_grad_() for x in inputs]
    y, y64 = op(*leaves, **how), op.reference(*exact, **how)
    dy = torch.randn(y64.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    grads, grads64 = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(y64, exact, dy.double())
    for got, want in zip([y, *grads], [y64, *grads64]):
        scale = want.abs().max().clamp(min=1e-30)
        assert ((got.double() - want).abs().max() / scale).item() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_rows_that_start_anywhere(dtype, shift):
    """Views into larger storage, and widths that give every row a different offset from a 16-byte boundary."""
    close = CLOSE[dtype]
    x = normal(3, 37, dtype=dtype, shift=shift)
    w = normal(37, dtype=dtype, seed=1, shift=shift)
    compare(ops.layer_norm, [x, w, w], tolerance=close)
    compare(ops.rms_norm, [x, w], tolerance=close)
    compare(ops.bias_gelu, [x, w], tolerance=close)
    compare(ops.bias_dropout_add, [x, w, x], tolerance=close, p=0.3, rng=Rng(3))
    compare(ops.scale_mask_softmax, [normal(1, 2, 3, 37, dtype=dtype, shift=shift)], tolerance=close, causal=True)
    compare(ops.swiglu, [normal(3, 48, dtype=dtype, shift=shift)], tolerance=close)
    angles = normal(7, 8, dtype=torch.float32, shift=shift)
    compare(RotaryOfX(angles), [normal(7, 2, 3, 24, dtype=dtype, shift=shift)], tolerance=close)


class RotaryOfX:
    """rotary as an op of x alone, with constant cos and sin."""

    def __init__(self, angles: Tensor) -> None:
        self.angles = angles

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rotary(x, self.angles.cos(), self.angles.sin())

    def reference(self, x: Tensor) -> Tensor:
        return ops.rotary.reference(x, self.angles.cos(), self.angles.sin())


@pytest.mark.parametrize(
    ("width", "held", "shared"), [(2048, 2, 0), (4096, 4, 0), (4104, 0, 2 * 4104 * 4), (10500, 0, 0)]
)
def test_norms_of_wider_and_wider_rows(monkeypatch, width, held, shared):
    """Column sums live in registers for narrow rows, then in shared memory, and in global memory for wide ones."""
    backend = Cuda(simulate=True, grid=20, shared=48 * 1024)
    backend.build()
    asked, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda *a, shared=0: asked.append((a[0], shared)) or run(*a, shared=shared))
    x, w = normal(9, width, dtype=torch.float32), normal(width, dtype=torch.float32, seed=1)
    with hal.activated(backend):
        compare(ops.layer_norm, [x, w, w], tolerance=2e-5)
        kernels = [f"norm_{d}{'_held' if held else ''}<f32, f32, true" for d in ("fwd", "bwd")]
        kernels = [f"{kernels[0]}>", f"{kernels[1]}, {held}>" if held else f"{kernels[1]}>"]
        assert asked == [(kernels[0], 0), (kernels[1], shared), ("column_sum<f32>", 0)]
        compare(ops.rms_norm, [x.bfloat16(), w.bfloat16()], tolerance=2e-2)


@pytest.mark.parametrize("pieces", [1, 7, 8, 9, 37])
def test_column_sums_of_more_pieces_than_a_small_grid_has(pieces):
    partial = normal(pieces, 70, dtype=torch.float32)
    out = torch.empty(70)
    column_sum(partial, pieces, out)
    torch.testing.assert_close(out, partial.sum(0))


def test_the_only_visible_column_gets_all_of_a_softmax():
    """Exactly 1: the maximum is subtracted from the product it was taken over, with and without FMA contraction."""
    x = normal(1, 4, 64, 64, dtype=torch.float32) * 3e4
    y = ops.scale_mask_softmax(x, None, 0.1, True)
    assert (y[:, :, 0, 0] == 1.0).all()
    (dx,) = torch.autograd.grad(ops.scale_mask_softmax(x.requires_grad_(), None, 0.1, True), x, torch.ones_like(x))
    assert not dx[:, :, 0].any()


def test_a_vocabulary_of_odd_size():
    for dtype in DTYPES:
        z = normal(3, 4999, dtype=dtype)
        target = torch.tensor([0, 4998, 17])
        leaf, exact = z.clone().requires_grad_(), z.double().requires_grad_()
        y = ops.cross_entropy(leaf, target, label_smoothing=0.1)
        y64 = ops.cross_entropy.reference(exact, target, label_smoothing=0.1)
        assert (y - y64).abs().max() <= 1e-5 * y64.abs().max()
        (g,), (g64,) = torch.autograd.grad(y.sum(), leaf), torch.autograd.grad(y64.sum(), exact)
        assert (g.double() - g64).abs().max() <= CLOSE[dtype] * g64.abs().max()


def test_lists_longer_than_a_launch_and_tensors_longer_than_a_block():
    sizes = [7] * (2 * optimizer.LISTED + 3) + [3 * optimizer.CHUNK + 5, optimizer.CHUNK, 1]
    tensors = [normal(n, dtype=torch.float32, seed=i, shift=i % 4) for i, n in enumerate(sizes)]
    want = torch.cat([t.double() for t in tensors]).norm()
    assert abs(ops.l2norm(tensors).item() - want) <= 1e-6 * want
    p, g, m, v = ([t.clone() for t in tensors] for _ in range(4))
    for x in v:
        x.abs_()
    copies = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
    exact = [[x.double() for x in xs] for xs in (p, g, m, v)]
    ops.adamw(p, g, m, v, step=3, lr=0.01, weight_decay=0.1, model_params=copies)
    ops.adamw.reference(*exact, step=3, lr=0.01, weight_decay=0.1)
    for got, want, copy in zip(p, exact[0], copies):
        torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=1e-6)
        assert torch.equal(copy, got.bfloat16())
    tensors[-2][optimizer.CHUNK - 1] = float("inf")
    assert ops.unscale_and_check(tensors[:-2], 0.5).item() == 0.0
    assert ops.unscale_and_check(tensors, 0.5).item() == 1.0


def test_bits_do_not_depend_on_alignment_or_launch():
    rng = Rng(2**63 + 5, 2**64 - 3)
    for shape, shift in (((3, 1000), 0), ((3, 1000), 1), ((7, 33), 2)):
        x = normal(*shape, dtype=torch.float32, shift=shift).fill_(1.0)
        kept = ops.dropout(x, 0.4, rng) != 0
        assert torch.equal(kept, ops.dropout.reference(x, 0.4, rng) != 0)
        block = rng.block((9, *shape), (4, *[0] * len(shape)))
        assert torch.equal(ops.philox_uniform((1, *shape), block), ops.philox_uniform((9, *shape), rng)[4:5])


def test_vectors_are_used_where_they_can_be():
    aligned = normal(4, 64, dtype=torch.bfloat16)
    assert norm._vectors(64, aligned) and not norm._vectors(60, aligned)
    assert not norm._vectors(64, normal(4, 64, dtype=torch.bfloat16, shift=1))


def test_wide_launches_stay_within_a_gpus_limits():
    x = torch.zeros(70000, 8, dtype=torch.float16)
    assert not hal.ops.bias_gelu(x).any()


def test_cross_entropy_may_write_its_gradient_over_the_logits(simulated):
    source = torch.randn(5, 1031, dtype=torch.bfloat16, requires_grad=True)
    target, dloss = torch.arange(5) * 200, torch.rand(5)
    (want,) = torch.autograd.grad(ops.cross_entropy(source * 1, target), source, dloss)
    logits = source * 1
    loss = ops.cross_entropy(logits, target, inplace_backward=True)
    (got,) = torch.autograd.grad(loss, logits, dloss, retain_graph=True)
    assert torch.equal(got, want) and got.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_the_gradient_of_a_frequent_token_is_not_rounded_at_every_sum(monkeypatch):
    """torch's CUDA kernel for few ids adds in the gradient's dtype, as does the CPU's, which replaces it here."""
    monkeypatch.setattr(launch, "simulated", lambda: False)
    ids, dy = torch.zeros(2000, dtype=torch.int64), torch.full((2000, 4), 0.0078125, dtype=torch.bfloat16)
    (grad,) = vocab._embedding_bwd((ids, None, 3, torch.bfloat16), dy)
    assert grad.dtype == torch.bfloat16 and (grad[0] == 15.625).all() and not grad[1:].any()


def test_weight_gradients_are_added_by_one_product_where_torch_has_it(monkeypatch):
    """torch has it on GPUs only. The fused call is recognised by its rounding: none between product and sum."""
    monkeypatch.setattr(linear, "_add_product_works", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not linear._adds_in_float32(torch.device("cpu"))
    linear._add_product_works.clear()
    monkeypatch.setattr(linear, "_add_product", lambda total, a, b: total.add_(a.float() @ b.float()))
    assert linear._adds_in_float32(torch.device("cpu"))
    monkeypatch.setattr(launch, "simulated", lambda: False)
    (impl,) = Cuda.impls["linear_wgrad"]
    for dtype in DTYPES:
        x, dy = normal(2, 65, 24, dtype=dtype), normal(2, 65, 40, dtype=dtype, seed=1)
        sums = [torch.ones(40, 24), torch.ones(40)]
        exact = [s.double() for s in sums]
        impl.call(x, dy, *sums)
        ops.linear_wgrad.reference(x.double(), dy.double(), *exact)
        for got, want in zip(sums, exact):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_tensor_without_memory_reaches_no_kernel(simulated):
    x = torch.randn(4, 32)
    hal.ops.rms_norm(x, torch.ones(32))
    x.untyped_storage().resize_(0)
    with pytest.raises(hal.ContractError, match="has no memory"):
        hal.ops.rms_norm(x, torch.ones(32))
