"""The kit detects errors of fused implementations of composite ops, and names what they resemble."""

import pytest
import torch
from planted import plant, verdict

import hal
from hal import ops
from hal.testing.production.check import check_production

pytestmark = pytest.mark.slow


def forgets_the_residual(x, residual, weight, eps):
    y, _ = ops.add_rms_norm.reference(x, torch.zeros_like(residual), weight, eps)
    return y, ops.add_rms_norm.reference(x, residual, weight, eps)[1]


def adds_no_residual(x, residual, weight, bias, eps):
    return ops.layer_norm.reference(x, weight, bias, eps), x.clone()


def norm_of_x_instead_of_the_sum(x, residual, weight, bias, eps):
    return ops.layer_norm.reference(x, weight, bias, eps), ops.add_layer_norm.reference(x, residual, weight, bias)[1]


def sum_without_gradient(x, residual, weight, eps):
    y, total = ops.add_rms_norm.reference(x, residual, weight, eps)
    return y, total.detach()


def label_smoothing_dropped(label_smoothing, **rest):
    return ops.linear_cross_entropy.reference(**rest)


def in_chunks(x, weight, target, label_smoothing, vocab_start, comm, *, chunk, between):
    """The loss in chunks of rows; `between` makes of each chunk but the last what the sums over the rows get."""
    reference = ops.linear_cross_entropy.reference
    rest = {"label_smoothing": label_smoothing, "vocab_start": vocab_start, "comm": comm}
    if target.ndim != 1 or len(target) <= chunk:
        return reference(x, weight, target, **rest)
    losses = []
    for start in range(0, len(target), chunk):
        part = slice(start, start + chunk)
        loss = reference(x[part], weight, target[part], **rest)
        losses.append(loss if start + chunk >= len(target) else between(loss))
    return torch.cat(losses)


def last_row_of_a_chunk_is_lost(**arguments):
    return in_chunks(**arguments, chunk=256, between=lambda loss: torch.cat((loss[:-1], loss[-1:].detach())))


def only_the_last_chunk_reaches_the_weight(**arguments):
    return in_chunks(**arguments, chunk=256, between=torch.Tensor.detach)


def classes_beyond_a_slice_are_lost(weight, target, **rest):
    kept = torch.cat((weight[:8192], weight[8192:].detach() - 1e3)) if len(weight) > 8192 else weight
    return ops.linear_cross_entropy.reference(weight=kept, target=target.clamp(max=8191), **rest)


def gradient_of_x_on_every_rank(x, comm, **rest):
    return ops.linear_cross_entropy.reference(x=ops.mappings.copy_to_region(x, comm), comm=comm, **rest)


def bias_after_the_activation(bias, activation, **rest):
    y = ops.linear_bias_activation.reference(**rest, activation=activation)
    return y if bias is None else y + bias[: y.shape[-1]]


def the_other_form_of_gelu(approximate, **rest):
    return ops.linear_bias_activation.reference(**rest, approximate="none")


def k_normalised_with_the_weight_of_q(k_weight, **rest):
    return ops.qk_norm_rotary.reference(**rest, k_weight=rest["q_weight"] + 0 * k_weight)


def norm_after_the_rotation(q, k, q_weight, k_weight, cos, sin, eps, **rest):
    turned = (ops.rotary.reference(x, cos, sin, **rest) for x in (q, k))
    return tuple(ops.rms_norm.reference(x, w, eps) for x, w in zip(turned, (q_weight, k_weight)))


FAULTS = [
    (ops.add_rms_norm, forgets_the_residual, "output 0: error of", "is that of a call without the residual"),
    (ops.add_layer_norm, adds_no_residual, "error of", "is that of a call without the residual"),
    (ops.add_layer_norm, norm_of_x_instead_of_the_sum, "output 0: error of", "a call without the residual"),
    (ops.add_rms_norm, sum_without_gradient, "the gradient of", "error of"),
    (ops.linear_cross_entropy, label_smoothing_dropped, "error of", "is that of label_smoothing=0"),
    (ops.linear_cross_entropy, last_row_of_a_chunk_is_lost, "the gradient of x", "have index 255 in dimension 0"),
    (ops.linear_cross_entropy, only_the_last_chunk_reaches_the_weight, "the gradient of", "error of"),
    (ops.linear_cross_entropy, classes_beyond_a_slice_are_lost, "error of", ""),
    (ops.linear_cross_entropy, gradient_of_x_on_every_rank, "the sum of the ranks' gradients of x", "sharded over 2"),
    (ops.linear_bias_activation, bias_after_the_activation, "error of", ""),
    (ops.linear_bias_activation, the_other_form_of_gelu, "error of", ""),
    (ops.qk_norm_rotary, k_normalised_with_the_weight_of_q, "output 1: error of", "q_weight in the place of k_weight"),
    (ops.qk_norm_rotary, norm_after_the_rotation, "error of", ""),
]


@pytest.mark.parametrize("op, function, first, second", FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_a_fault_is_caught_in_float32(op, function, first, second):
    report, messages = verdict(plant(op, function), op, examples=0)
    assert "float32" in {row.dtype for row in report.failed}
    assert first in messages and second in messages, messages


COARSE = [fault for fault in FAULTS if fault[1] is not the_other_form_of_gelu]


@pytest.mark.parametrize("op, function", [fault[:2] for fault in COARSE], ids=lambda x: getattr(x, "__name__", None))
def test_a_fault_is_caught_in_bfloat16_too(op, function):
    report, _ = verdict(plant(op, function), op, examples=0)
    assert "bfloat16" in {row.dtype for row in report.failed}


PRODUCTION = [
    (ops.linear_cross_entropy, only_the_last_chunk_reaches_the_weight, "100,000 tokens: the gradient of"),
    (ops.linear_cross_entropy, classes_beyond_a_slice_are_lost, "vocabulary of 152064: the output, rows"),
    (ops.add_rms_norm, forgets_the_residual, "output 0, rows"),
    (ops.add_layer_norm, adds_no_residual, "the gradient of residual is missing"),
    (ops.qk_norm_rotary, k_normalised_with_the_weight_of_q, "output 1, rows"),
]


@pytest.mark.parametrize("op, function, text", PRODUCTION, ids=lambda x: getattr(x, "__name__", None))
def test_a_fault_is_caught_at_production_sizes(op, function, text):
    rows = check_production(plant(op, function), [op], reduced=True, dtypes=[torch.float32])
    row = next(row for row in rows if row.implementation == "planted/wrong")
    assert row.status == "fail" and text in row.message, row.message


def test_a_part_that_is_wrong_fails_the_composition():
    def unscaled(x, weight, eps):
        return ops.rms_norm.reference(x, torch.ones_like(weight) + 0 * weight, eps)

    backend = plant(ops.rms_norm, unscaled)
    type(backend).impl(ops.bias_dropout_add, id="planted/right")(ops.bias_dropout_add.reference)
    report, _ = verdict(backend, ops.add_rms_norm, examples=0)
    assert {row.implementation for row in report.failed} >= {"composition"}


def test_a_composition_whose_parts_are_missing_is_declined_and_one_that_needs_fewer_runs():
    backend = plant(ops.linear, ops.linear.reference)
    assert {row.status for row in verdict(backend, ops.linear_bias_activation, examples=0)[0].rows} == {"declined"}
    type(backend).impl(ops.swiglu, id="planted/right")(ops.swiglu.reference)
    rows = verdict(backend, ops.linear_bias_activation, examples=0)[0].rows
    assert {row.status for row in rows} == {"pass"}
    assert "geglu has no implementation" in rows[0].reasons
    call = {"x": torch.ones(2, 4), "weight": torch.ones(6, 4)}
    with hal.activated(backend):
        assert hal.why(ops.linear_bias_activation, **call, activation="swiglu").parts == ("linear", "swiglu")
        with pytest.raises(hal.UnsupportedOp, match="composition of linear, bias_gelu: refuses: bias_gelu has no"):
            ops.linear_bias_activation(**call, activation="gelu")
