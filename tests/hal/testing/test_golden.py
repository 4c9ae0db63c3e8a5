"""The golden loss: equal backends pass; errors that are visible only in training are caught at the first bad step."""

import dataclasses

import pytest
import torch

import hal
from hal import ops
from hal.testing import Reference, golden

F32 = torch.float32


def with_op(op, function):
    """The reference backend with one `op` replaced."""
    backend = Reference()
    (impl,) = backend.impls[op.name]
    backend.impls[op.name] = [dataclasses.replace(impl, call=function, forward=function)]
    return backend


@pytest.mark.parametrize("shape", golden.SHAPES)
def test_the_references_agree_with_themselves_and_learn(shape):
    row = golden.golden_row(Reference(), shape, F32)
    assert (row.status, row.worst_error_in_tolerances) == ("pass", 0.0)
    with hal.activated(Reference()):
        losses = golden.train(shape, F32).losses
    assert len(losses) == golden.STEPS
    assert losses[-1] < 0.9 * losses[0]


class Remasked(torch.autograd.Function):
    """Dropout whose backward pass uses a different mask."""

    @staticmethod
    def forward(ctx, x, residual, p, rng):
        ctx.p, ctx.rng = p, rng
        return ops.bias_dropout_add.reference(x, None, residual, p=p, rng=rng)

    @staticmethod
    def backward(ctx, dy):
        rng = ctx.rng and ctx.rng.fork("again")
        return ops.dropout.reference(dy, ctx.p, rng), dy, None, None


def remasked(x, bias, residual, *, p=0.0, rng=None):
    return Remasked.apply(x if bias is None else x + bias, residual, p, rng)


def late_bias_correction(*tensors, step, **options):
    ops.adamw.reference(*tensors, step=step + 1, **options)


def another_eps(x, weight, bias, eps=1e-5):
    return ops.layer_norm.reference(x, weight, bias, 3 * eps)


def unscaled_embedding_gradient(weight, ids, *, vocab_start=0, comm=None):
    y = ops.embedding.reference(weight, ids, vocab_start=vocab_start, comm=comm)
    if y.requires_grad:
        y.register_hook(lambda dy: dy * 0.999)
    return y


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, function",
    [
        (ops.bias_dropout_add, remasked),
        (ops.adamw, late_bias_correction),
        (ops.layer_norm, another_eps),
        (ops.embedding, unscaled_embedding_gradient),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_a_wrong_op_makes_the_losses_part(op, function):
    row = golden.golden_row(with_op(op, function), "gpt2", F32)
    assert row.status == "fail"
    assert "the losses diverge at step" in row.message


def test_a_run_that_crashes_is_a_failure_with_its_code():
    def crash(x, weight, bias, eps=1e-5):
        raise RuntimeError("device lost")

    row = golden.golden_row(with_op(ops.layer_norm, crash), "gpt2", F32)
    assert row.status == "fail"
    assert row.message == "training raised RuntimeError: device lost"
    assert "golden.train('gpt2', torch.float32)" in row.code


class WithoutAttentionDropout(Reference):
    """The references, except that dropout in attention is not among the capabilities."""

    def capabilities(self):
        return dataclasses.replace(super().capabilities(), attention_dropout=False)


def test_a_backend_without_dropout_in_attention_trains_with_the_other_dropout():
    backend = WithoutAttentionDropout()
    (impl,) = backend.impls["flash_attention"]

    def refuse(*given, dropout_p=0.0, **options):
        assert dropout_p == 0.0
        return impl.call(*given, **options)

    backend.impls["flash_attention"] = [dataclasses.replace(impl, call=refuse, forward=refuse)]
    row = golden.golden_row(backend, "gpt2", F32)
    assert (row.status, row.implementation) == ("pass", "model/gpt2, attention dropout 0")
    backend.impls["layer_norm"] = [dataclasses.replace(backend.impls["layer_norm"][0], call=another_eps)]
    row = golden.golden_row(backend, "gpt2", F32)
    assert row.status == "fail" and "golden.train('gpt2', torch.float32, attention_dropout=0.0)" in row.code
    # Scores that the model forms are dropped by another op.
    assert golden.golden_row(backend, "unfused", F32).implementation == "model/unfused"


def test_a_backend_that_lacks_an_op_is_declined_with_the_reason():
    backend = Reference()
    del backend.impls["rms_norm"]
    row = golden.golden_row(backend, "llama", F32)
    assert row.status == "declined"
    assert "rms_norm on backend 'reference': no implementation is registered" in row.reasons[0]


def test_the_tolerance_is_above_rounding_and_below_anything_else():
    def rounded_elsewhere(x, weight, bias, eps=1e-5):
        return ops.layer_norm.reference(x, weight, bias, eps) * (1.0 + 2.0**-23)

    row = golden.golden_row(with_op(ops.layer_norm, rounded_elsewhere), "gpt2", F32)
    assert row.status == "pass"
    assert row.worst_error_in_tolerances > 0
