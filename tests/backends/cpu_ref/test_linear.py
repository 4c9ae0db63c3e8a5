"""linear's own products: any shape and strides, any number of threads, only requested gradients."""

import pytest
import torch

import hal
from hal.backends.cpu_ref import linear
from hal.backends.cpu_ref.build import lib
from hal.backends.cpu_ref.tensors import CODE

SHAPES = [(1, 1, 1), (7, 3, 5), (192, 8, 48), (193, 9, 49), (500, 97, 47), (385, 200, 2100), (40, 16, 96)]
# In float32, both operands are read in place if the narrower one has at most 80 columns, x only from 512 rows on.
SHAPES += [(600, 130, 17), (512, 700, 1), (64, 80, 96), (530, 81, 80), (193, 81, 96), (513, 49, 24), (63, 1, 47)]
SHAPES += [(511, 130, 17), (200, 64, 64), (520, 64, 8)]


def product(dy, x, initial=None):
    """dy^T x and the sum of dy's rows, from the kernel; added to `initial` if it is given."""
    shapes = (dy.shape[1], x.shape[1]), (dy.shape[1],)
    dw, db = [torch.full(s, float("nan")) for s in shapes] if initial is None else [h.clone() for h in initial]
    at = [t.data_ptr() for t in (dy, x, dw, db)]
    done = lib().hal_linear_wgrad(CODE[x.dtype], *at, x.shape[0], *dw.shape, initial is not None)
    if not done:
        assert x.dtype == torch.bfloat16 and not linear.fast(x.dtype)
        pytest.skip("this processor does not multiply bfloat16")
    return dw, db


@pytest.fixture(autouse=True)
def cpu_ref():
    with hal.activated(hal.core.registry.make("cpu_ref")):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "n_out", "n_in"), SHAPES)
def test_the_kernel_is_the_product_in_float64(rows, n_out, n_in, dtype):
    torch.manual_seed(rows)
    dy, x = torch.randn(rows, n_out).to(dtype), torch.randn(rows, n_in).to(dtype)
    initial = torch.randn(n_out, n_in), torch.randn(n_out)
    bound = 4e-6 * rows**0.5 + 4e-6  # sums are float32 in both
    right = dy.double().t() @ x.double(), dy.double().sum(0)
    for got, want in zip(product(dy, x), right):
        torch.testing.assert_close(got.double(), want, atol=bound, rtol=1e-6)
    for got, want, before in zip(product(dy, x, initial), right, initial):
        torch.testing.assert_close(got.double(), want + before, atol=bound, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "n_out", "n_in"), [(193, 300, 130), (1000, 300, 130), (500, 10, 400), (530, 400, 10), (200, 900, 4700)]
)
def test_the_result_does_not_depend_on_the_number_of_threads(rows, n_out, n_in, dtype):
    torch.manual_seed(0)
    dy, x = torch.randn(rows, n_out).to(dtype), torch.randn(rows, n_in).to(dtype)
    initial = torch.randn(n_out, n_in), torch.randn(n_out)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            results.append((*product(dy, x), *product(dy, x, initial)))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0]))


def test_a_dtype_without_products_is_refused_and_nothing_written():
    x, dw = torch.ones(8, 8, dtype=torch.float16), torch.zeros(8, 8)
    at = [t.data_ptr() for t in (x, x, dw)]
    assert not lib().hal_linear_wgrad(CODE[x.dtype], *at, 0, 8, 8, 8, False)
    assert not dw.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_gradients_are_added_to_the_sums_whatever_the_strides(dtype):
    torch.manual_seed(2)
    x, dy = torch.randn(3, 160, 2, 130).to(dtype)[:, :, 1], torch.randn(210, 480).to(dtype).t().reshape(3, 160, 210)
    assert x.numel() * dy.shape[-1] >= linear._SMALL and not x.is_contiguous()
    weight, bias = torch.randn(210, 130), torch.randn(210)
    want = [weight + dy.flatten(0, 1).float().t() @ x.flatten(0, 1).float(), bias + dy.flatten(0, 1).float().sum(0)]
    hal.ops.linear_wgrad(x, dy, weight, bias)
    error = {torch.float32: 1e-5, torch.bfloat16: 1e-5 if linear.fast(dtype) else 2**-7, torch.float16: 2**-10}[dtype]
    for got, right in zip((weight, bias), want):
        torch.testing.assert_close(got, right, rtol=error, atol=error * 60)


@pytest.mark.parametrize("size", [8, 256])
def test_sums_have_no_graph_behind_them(size):
    x, dy, sums = torch.randn(300, size, requires_grad=True), torch.randn(300, size), torch.zeros(size, size)
    leaf = torch.zeros(size, size, requires_grad=True)
    for main_grad in (sums, leaf):
        hal.ops.linear_wgrad(x, dy, main_grad)
        assert main_grad.grad_fn is None
        torch.testing.assert_close(main_grad.detach(), (dy.t() @ x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_sums_that_are_not_contiguous_are_refused_whatever_was_asked_before(first):
    x, dy, bias = torch.randn(480, 130), torch.randn(480, 210), torch.zeros(210)
    contiguous, other = torch.zeros(210, 130), torch.zeros(130, 210).t()
    for sums in ((contiguous, other), (other, contiguous))[first]:
        if sums is contiguous:
            hal.ops.linear_wgrad(x, dy, sums, bias)
            torch.testing.assert_close(sums, dy.t() @ x, rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(hal.UnsupportedOp, match="main_grad or main_bias_grad that is not contiguous"):
                hal.ops.linear_wgrad(x, dy, sums, bias)
            assert not sums.any()


def narrow(x, w, bias=None):
    """x w^T + bias from the kernel for few outputs or inputs."""
    y = torch.full((x.shape[0], w.shape[0]), float("nan"))
    at = x.data_ptr(), x.stride(0), w.data_ptr(), *w.stride(), 0 if bias is None else bias.data_ptr(), y.data_ptr()
    assert lib().hal_linear_narrow(*at, *x.shape, w.shape[0])
    return y


FEW_OUTPUTS = [(1, 1, 1), (64, 512, 16), (65, 513, 17), (7, 1030, 32), (200, 47, 31), (130, 15, 8)]
FEW_INPUTS = [(1, 1, 33), (8, 16, 48), (17, 32, 150), (65, 31, 96), (100, 1, 513), (3, 9, 1000)]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), FEW_OUTPUTS + FEW_INPUTS)
def test_a_narrow_product_is_the_product_in_float64(rows, inputs, outputs):
    torch.manual_seed(rows)
    x, w, bias = torch.randn(rows, inputs + 3), torch.randn(outputs + 1, inputs), torch.randn(outputs)
    bound = 4e-6 * inputs**0.5 + 4e-6
    for left, right in (
        (x[:, :inputs], w[:outputs]),
        (x[:, 3:], w.t().contiguous().t()[1:]),
        (x[:, 1 : inputs + 1], torch.stack((w, w), 2)[:outputs, :, 1]),
    ):
        want = left.double() @ right.double().t()
        torch.testing.assert_close(narrow(left, right).double(), want, atol=bound, rtol=1e-6)
        torch.testing.assert_close(narrow(left, right, bias).double(), want + bias, atol=bound, rtol=1e-6)


@pytest.mark.parametrize(("inputs", "outputs"), [(700, 20), (20, 700)])
def test_a_narrow_product_depends_neither_on_the_number_of_threads_nor_on_other_rows(inputs, outputs):
    torch.manual_seed(0)
    x, w, bias = torch.randn(150, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    want, threads = narrow(x, w, bias), torch.get_num_threads()
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            assert torch.equal(narrow(x, w, bias), want)
            assert torch.equal(narrow(x[37:41], w, bias), want[37:41])
    finally:
        torch.set_num_threads(threads)


def test_a_product_that_is_not_narrow_is_refused_and_nothing_written():
    n = linear._FEW + 1
    x, w, y = torch.ones(4, n), torch.ones(n, n), torch.zeros(4, n)
    at = x.data_ptr(), n, w.data_ptr(), n, 1, 0, y.data_ptr()
    assert not lib().hal_linear_narrow(*at, 4, n, n)
    assert not y.any()
    assert lib().hal_linear_narrow(*at, 4, n - 1, n) and lib().hal_linear_narrow(*at, 4, n, n - 1)


@pytest.mark.parametrize("size", [8, linear._FEW, linear._FEW + 1])
@pytest.mark.parametrize("wide", ["inputs", "outputs"])
def test_a_layer_uses_the_kernel_for_narrow_products(size, wide, monkeypatch):
    if linear._onednn() is None or not linear.fast(torch.float32):
        pytest.skip("torch.mm is not slow on this processor")
    calls, kernel = [], linear._narrow
    monkeypatch.setattr(linear, "_narrow", lambda *args: calls.append(1) or kernel(*args))
    torch.manual_seed(3)
    inputs, outputs = (448, size) if wide == "inputs" else (size, 448)
    x, weight, bias = torch.randn(2, 600, inputs + 2)[:, :, 2:], torch.randn(outputs, inputs), torch.randn(2 * outputs)
    assert x.numel() * outputs >= linear._SMALL
    for b in (None, bias[::2]):
        y = hal.ops.linear(x, weight, b)
        want = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        torch.testing.assert_close(y.double(), want, atol=2e-4, rtol=1e-6)
    assert len(calls) == (2 if size <= linear._FEW else 0)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "used"),
    [(512, 448, 20, True), (511, 448, 20, False), (5000, 900, 1, False), (512, 20, 448, True), (511, 20, 448, False)],
)
def test_few_rows_and_a_single_output_are_left_to_onednn(rows, inputs, outputs, used):
    assert linear._is_narrow(torch.empty(rows, inputs), torch.empty(outputs, inputs)) is used


def large(bias=True):
    """Operands of a product that is large enough for the kernel, with strided rows."""
    torch.manual_seed(1)
    x = torch.randn(128, 2, 160)[:, 1].requires_grad_()
    weight = torch.randn(224, 160, requires_grad=True)
    return x, weight, torch.randn(224, requires_grad=True) if bias else None


def test_it_takes_part_where_the_vendors_product_is_slow():
    x, weight, _ = large()
    if linear._onednn() is None or not linear.fast(torch.float32):
        pytest.skip("torch.mm is not slow on this processor")
    assert x.shape[0] * x.shape[1] * weight.shape[0] >= linear._SMALL and linear._onednn_for(x, weight) is not None


@pytest.mark.parametrize("biased", [True, False])
def test_the_gradients_of_a_large_layer_are_those_of_torch(biased):
    x, weight, bias = large(biased)
    dy = torch.randn(128, 224)
    leaves = [t for t in (x, weight, bias) if t is not None]
    ours = torch.autograd.grad(hal.ops.linear(x, weight, bias), leaves, dy)
    theirs = torch.autograd.grad(
        torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()),
        leaves,
        dy.double(),
    )
    for got, expected in zip(ours, theirs):
        torch.testing.assert_close(got, expected.to(got.dtype), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("biased", [True, False])
def test_bfloat16_gradients_by_the_kernel_are_rounded_once(biased, monkeypatch):
    if not linear.fast(torch.bfloat16):
        pytest.skip("the kernel multiplies no bfloat16 on this processor")
    monkeypatch.setattr(linear, "_has_amx", lambda: True)
    torch.manual_seed(1)
    x, dy = torch.randn(2, 2, 1030, 48).bfloat16()[:, 0], torch.randn(2, 1030, 80).bfloat16()
    weight, bias = torch.randn(80, 48).bfloat16().requires_grad_(), torch.randn(80).bfloat16().requires_grad_()
    calls = []
    kernel = linear._kernel
    monkeypatch.setattr(linear, "_kernel", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    leaves = (weight, bias) if biased else (weight,)
    got = torch.autograd.grad(hal.ops.linear(x, weight, bias if biased else None), leaves, dy)
    assert calls and all(g.dtype == torch.bfloat16 for g in got)
    rows, x_rows = dy.double().reshape(-1, 80), x.double().reshape(-1, 48)
    for g, expected in zip(got, (rows.T @ x_rows, rows.sum(0))):
        torch.testing.assert_close(g.double(), expected, atol=1e-3, rtol=2**-8)


def test_a_frozen_weight_costs_no_product(monkeypatch):
    x, weight, bias = large()

    def never(*args):
        raise AssertionError("the gradient of a weight that wants none was computed")

    monkeypatch.setattr(linear, "_weight_gradient", never)
    monkeypatch.setattr(torch.Tensor, "sum", never)
    dy = torch.randn(128, 224)
    (dx,) = torch.autograd.grad(hal.ops.linear(x, weight.detach(), bias.detach()), (x,), dy)
    assert dx.shape == x.shape


@pytest.mark.parametrize(
    "shape", [(1536,), (1, 1536), (0, 1536), (2, 3, 1536), (2, 0, 1536), (9, 4, 16, 1536)], ids=str
)
@pytest.mark.parametrize("how", ["dense", "reversed", "every second"])
def test_any_leading_dimensions_in_small_and_large_products(shape, how):
    torch.manual_seed(2)
    if how == "reversed":
        x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    else:
        x = torch.randn(shape) if how == "dense" else torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    weight = torch.randn(2800, 1536, requires_grad=True)  # a single row is already a large product
    for w in (weight, weight[:40]):
        y = hal.ops.linear(x.requires_grad_(), w)
        dy = torch.randn(y.shape)
        want = torch.nn.functional.linear(x.double(), w.double())
        theirs = torch.autograd.grad(want, (x, weight), dy.double())
        for got, expected in zip((y, *torch.autograd.grad(y, (x, weight), dy)), (want, *theirs)):
            torch.testing.assert_close(got, expected.float(), atol=4e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_a_result_does_not_depend_on_how_its_input_lies(dtype, biased):
    """By default, torch may multiply each matrix of such an input separately and add the bias afterwards."""
    torch.manual_seed(3)
    x = torch.randn(6, 48, 64).to(dtype)
    weight, bias = torch.randn(40, 64).to(dtype), torch.randn(40).to(dtype) if biased else None
    want = hal.ops.linear(x, weight, bias)
    for strided in (x.transpose(0, 1).contiguous().transpose(0, 1), torch.stack((x, x), -1)[..., 0]):
        assert not strided.is_contiguous()
        assert torch.equal(hal.ops.linear(strided, weight, bias), want)
    once = x[:1].expand(6, -1, -1)
    assert torch.equal(hal.ops.linear(once, weight, bias), hal.ops.linear(once.contiguous(), weight, bias))
