"""The kit detects errors of fused implementations of composite ops, and names what they resemble."""

import pytest
import torch
from planted import Faults, plant, verdict

import hal
from hal import ops
from hal.testing.production.check import check_production

pytestmark = pytest.mark.slow
faults, production = Faults(), Faults()


@production(ops.add_rms_norm, "output 0, rows")
@faults(ops.add_rms_norm, "output 0: error of", "is that of a call without the residual")
def forgets_the_residual(x, residual, weight, eps):
    y, _ = ops.add_rms_norm.reference(x, torch.zeros_like(residual), weight, eps)
    return y, ops.add_rms_norm.reference(x, residual, weight, eps)[1]


@production(ops.add_layer_norm, "the gradient of residual is missing")
@faults(ops.add_layer_norm, "error of", "is that of a call without the residual")
def adds_no_residual(x, residual, weight, bias, eps):
    return ops.layer_norm.reference(x, weight, bias, eps), x.clone()


@faults(ops.add_layer_norm, "output 0: error of", "a call without the residual")
def norm_of_x_instead_of_the_sum(x, residual, weight, bias, eps):
    return ops.layer_norm.reference(x, weight, bias, eps), ops.add_layer_norm.reference(x, residual, weight, bias)[1]


@faults(ops.add_rms_norm, "the gradient of", "error of")
def sum_without_gradient(x, residual, weight, eps):
    y, total = ops.add_rms_norm.reference(x, residual, weight, eps)
    return y, total.detach()


@faults(ops.linear_cross_entropy, "error of", "is that of label_smoothing=0")
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


@faults(ops.linear_cross_entropy, "the gradient of x", "have index 255 in dimension 0")
def last_row_of_a_chunk_is_lost(**arguments):
    return in_chunks(**arguments, chunk=256, between=lambda loss: torch.cat((loss[:-1], loss[-1:].detach())))


@production(ops.linear_cross_entropy, "100,000 tokens: the gradient of")
@faults(ops.linear_cross_entropy, "the gradient of", "error of")
def only_the_last_chunk_reaches_the_weight(**arguments):
    return in_chunks(**arguments, chunk=256, between=torch.Tensor.detach)


@production(ops.linear_cross_entropy, "vocabulary of 152064: the output, rows")
@faults(ops.linear_cross_entropy, "error of")
def classes_beyond_a_slice_are_lost(weight, target, **rest):
    kept = torch.cat((weight[:8192], weight[8192:].detach() - 1e3)) if len(weight) > 8192 else weight
    return ops.linear_cross_entropy.reference(weight=kept, target=target.clamp(max=8191), **rest)


@faults(ops.linear_cross_entropy, "the sum of the ranks' gradients of x", "sharded over 2")
def gradient_of_x_on_every_rank(x, comm, **rest):
    return ops.linear_cross_entropy.reference(x=ops.mappings.copy_to_region(x, comm), comm=comm, **rest)


@faults(ops.linear_bias_activation, "error of")
def bias_after_the_activation(bias, activation, **rest):
    y = ops.linear_bias_activation.reference(**rest, activation=activation)
    return y if bias is None else y + bias[: y.shape[-1]]


@faults(ops.linear_bias_activation, "error of")
def the_other_form_of_gelu(approximate, **rest):
    return ops.linear_bias_activation.reference(**rest, approximate="none")


@production(ops.qk_norm_rotary, "output 1, rows")
@faults(ops.qk_norm_rotary, "output 1: error of", "q_weight in the place of k_weight")
def k_normalised_with_the_weight_of_q(k_weight, **rest):
    return ops.qk_norm_rotary.reference(**rest, k_weight=rest["q_weight"] + 0 * k_weight)


@faults(ops.qk_norm_rotary, "error of")
def norm_after_the_rotation(q, k, q_weight, k_weight, cos, sin, eps, **rest):
    turned = (ops.rotary.reference(x, cos, sin, **rest) for x in (q, k))
    return tuple(ops.rms_norm.reference(x, w, eps) for x, w in zip(turned, (q_weight, k_weight)))


@production(ops.scaled_linear, "scales of blocks: the output, rows")
@faults(ops.scaled_linear, "error of")
def the_first_scale_of_a_row_for_all_blocks(x_scale, **rest):
    return ops.scaled_linear.reference(x_scale=x_scale[..., :1] if x_scale.ndim else x_scale, **rest)


@faults(ops.scaled_linear, "error of")
def no_scale_of_the_weight(weight_scale, **rest):
    return ops.scaled_linear.reference(weight_scale=torch.ones_like(weight_scale), **rest)


@faults(ops.scaled_linear, "error of")
def e5m2_read_as_e4m3(x, **rest):
    return ops.scaled_linear.reference(x=x.view(torch.float8_e4m3fn), **rest)


@faults(ops.scaled_linear, "error of")
def elements_beyond_the_last_whole_block_dropped(x, weight, **rest):
    whole = weight.shape[1] // 128 * 128 or weight.shape[1]
    kept = x.float().masked_fill(torch.arange(weight.shape[1]) >= whole, 0.0).to(x.dtype)
    return ops.scaled_linear.reference(x=kept, weight=weight, **rest)


@production(ops.merge_attention, "output 0")
@faults(ops.merge_attention, "output 0: error of", "the shares of the other result")
def shares_exchanged(out, lse, part, part_lse):
    return ops.merge_attention.reference(out, part_lse, part, lse)


@faults(ops.merge_attention, "output 0: error of", "equal shares")
def mean_of_both_results(out, lse, part, part_lse):
    _, total = ops.merge_attention.reference(out, lse, part, part_lse)
    return (out + part) / 2, total


@faults(ops.merge_attention, "output 1: error of")
def largest_instead_of_the_sum(out, lse, part, part_lse):
    merged, _ = ops.merge_attention.reference(out, lse, part, part_lse)
    return merged, torch.maximum(lse, part_lse)


@pytest.mark.parametrize("op, function, texts", faults.cases)
def test_a_fault_is_caught_in_float32(op, function, texts):
    report, messages = verdict(plant(op, function), op, examples=0)
    assert "float32" in {row.dtype for row in report.failed}
    assert all(text in messages for text in texts), messages


@pytest.mark.parametrize("op, function, _", [c for c in faults.cases if c.values[1] is not the_other_form_of_gelu])
def test_a_fault_is_caught_in_bfloat16_too(op, function, _):
    report, _ = verdict(plant(op, function), op, examples=0)
    assert "bfloat16" in {row.dtype for row in report.failed}


@pytest.mark.parametrize("op, function, texts", production.cases)
def test_a_fault_is_caught_at_production_sizes(op, function, texts):
    rows = check_production(plant(op, function), [op], reduced=True, dtypes=[torch.float32])
    row = next(row for row in rows if row.implementation == "planted/wrong")
    assert row.status == "fail" and all(text in row.message for text in texts), row.message


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
