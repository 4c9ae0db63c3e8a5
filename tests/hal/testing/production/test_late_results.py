"""Results that are complete only some time after the call has returned, and sums without their last rows."""

import dataclasses
import threading
import time

import pytest
import torch
from planted import plant

from hal import Sample, TensorSpec, ops
from hal.testing import comparison
from hal.testing.production import check
from hal.testing.production.cases import cases
from hal.testing.production.check import check_production

LATE = "results were read before the work was done: "


def rows(backend, op, dtype):
    return list(check_production(backend, [op], dtypes=[dtype], reduced=True))


def later(right, seconds):
    """A tensor of zeros that a thread fills with `right` after `seconds`."""
    result = torch.zeros_like(right)
    memory = result.detach()

    def fill():
        time.sleep(seconds)
        memory.copy_(right)

    threading.Thread(target=fill).start()
    return result


def with_backward(forward, backward):
    """rms_norm, whose output `forward(y)` and whose gradients `backward(dx, dweight)` replace."""

    def function(x, weight, eps):
        return forward(ops.rms_norm.reference(x, weight, eps)), (x, weight, eps)

    def bwd(residuals, dy):
        *tensors, eps = residuals
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in tensors]
            y = ops.rms_norm.reference(*leaves, eps)
        return backward(*torch.autograd.grad(y, leaves, dy))

    return plant(ops.rms_norm, function, bwd=bwd)


def same(*values):
    return values if len(values) > 1 else values[0]


def test_an_output_that_is_5_ms_late_in_large_calls_is_named():
    backend = with_backward(lambda y: later(y, 0.005) if y.numel() >= 1 << 15 else y, same)
    (row,) = rows(backend, ops.rms_norm, torch.float32)
    assert LATE + "the output" in row.message


def test_a_gradient_that_is_half_a_second_late_is_named():
    backend = with_backward(same, lambda dx, dw: (dx, later(dw, 0.5) if dx.numel() >= 1 << 15 else dw))
    (row,) = rows(backend, ops.rms_norm, torch.float32)
    assert LATE + "the gradient of weight" in row.message


def without_last_rows(count):
    """layer_norm whose weight and bias get no gradient from the last `count(n)` of n > 1024 rows."""

    def function(x, weight, bias, eps):
        end = len(x) - (count(len(x)) if len(x) > 1024 else 0)
        parts = [ops.layer_norm.reference(x[:end], weight, bias, eps)]
        return torch.cat([*parts, ops.layer_norm.reference(x[end:], weight.detach(), bias.detach(), eps)])

    return function


def narrow(monkeypatch, op, width):
    """The number of rows of the full call, which the reduced one does not have, with few columns."""
    case = next(c for c in cases() if c.op == op.name and c.name == "100,000 rows")
    specs = [TensorSpec((*spec.shape[:-1], width)) for spec in case.sample.args]
    monkeypatch.setattr(check, "cases", lambda: [dataclasses.replace(case, reduced=Sample(tuple(specs)))])


@pytest.mark.parametrize("count", [lambda n: 1, lambda n: n % 8], ids=["one", "three"])
def test_sums_without_the_last_rows_fail_in_16_bits(monkeypatch, count):
    narrow(monkeypatch, ops.layer_norm, 8)
    (row,) = rows(plant(ops.layer_norm, without_last_rows(count)), ops.layer_norm, torch.bfloat16)
    assert "the gradient of weight, all rows, of upstream gradients in the last 8 rows only" in row.message


def test_columns_without_the_last_row_fail_in_16_bits(monkeypatch):
    def function(x, bias):
        return torch.cat([ops.swiglu.reference(x[:-1], bias), ops.swiglu.reference(x[-1:], bias.detach())])

    narrow(monkeypatch, ops.swiglu, 16)
    (row,) = rows(plant(ops.swiglu, function), ops.swiglu, torch.bfloat16)
    assert "the gradient of bias, columns" in row.message and "in the last 8 rows only" in row.message


def test_the_tolerance_of_a_sum_in_float32_grows_with_the_square_root_of_its_rows():
    """Terms added in sequence pass; a sum without one row does not, nor does one that is rounded to 16 bits."""
    tol = ops.bias_gelu.tol[torch.float32]
    terms = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
    exact, native = terms.double().sum(0), terms.sum(0)
    total = torch.zeros(64)
    for row in terms:
        total += row

    def tolerances(y, summands):
        expected = comparison.Expected(exact, native, tol, torch.float32, gradient=True, summands=summands)
        return expected.measure(y).tolerances

    assert 0.1 < tolerances(total, 8192) < 1.0
    assert tolerances(total, 8192) < tolerances(total, 1)
    assert tolerances(total - terms[-1], 8192) > 10
    assert tolerances(native.bfloat16().float(), 8192) > 10


def test_the_reduced_calls_draw_more_than_2_to_the_16_elements():
    def elements(case):
        first = case.reduced.args[0]
        shape = first if isinstance(first, tuple) else first.shape
        return torch.Size(shape).numel()

    for op in ("dropout", "philox_uniform", "bias_dropout_add"):
        assert max(elements(c) for c in cases() if c.op == op and c.reduced is not None) > 1 << 16


def test_the_case_of_draws_finds_a_counter_that_is_wrong_after_2_to_the_16_elements():
    def function(x, p, rng):
        y = ops.dropout.reference(x, p, rng)
        if x.numel() > 1 << 16:
            draw = ops.philox_uniform.reference(x.shape, rng).reshape(-1).roll(4)
            again = torch.where(draw >= p, x.reshape(-1) / (1 - p), torch.zeros(()))
            y = torch.cat([y.reshape(-1)[: 1 << 16], again[1 << 16 :]]).view_as(y)
        return y

    (row,) = rows(plant(ops.dropout, function), ops.dropout, torch.float32)
    assert row.status == "fail" and "100,000 rows: the output" in row.message
