"""The kit detects errors: each backend here has exactly one, and the kit must name it."""

import dataclasses
import itertools
import math
import threading
import time

import pytest
import torch
from planted import Cpu, plant, verdict, with_op_signature

import hal
from hal import ops
from hal.testing import kit

softmax, attention = ops.scale_mask_softmax, ops.flash_attention


def minus_10000(x, mask, scale, causal):
    s = x.float() * scale
    if causal:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1 + x.shape[-1] - x.shape[-2])
    return torch.softmax(s if mask is None else s.masked_fill(mask, -10000.0), -1).to(x.dtype)


def without_last_key(q, k, v, layout, mask=None, **rest):
    if layout != "BNSD" or k.shape[2] < 2 or mask is not None or rest["rng"] is not None:
        return attention.reference(q, k, v, layout=layout, mask=mask, **rest)
    return attention.reference(q, k[:, :, :-1], v[:, :, :-1], layout=layout, **rest)


def swapped_window(pre_tokens, next_tokens, **rest):
    return attention.reference(pre_tokens=next_tokens, next_tokens=pre_tokens, **rest)


def lse_in_base_2_beside_a_mask(mask, return_lse, **rest):
    result = ops.flash_attention.reference(mask=mask, return_lse=return_lse, **rest)
    return (result[0], result[1] / 0.6931) if return_lse and mask is not None else result


def stale_offset(x, p, rng):
    return ops.dropout.reference(x, p, rng and hal.Rng(rng.seed, 0, rng.full_shape, rng.start))


def strict_comparison(x, p, rng):
    if p == 0:
        return x.clone()
    draw = ops.philox_uniform.reference(x.shape, rng, device=x.device)
    return torch.where(draw > p, x / (1 - p), torch.zeros_like(x))


def overwrites_input(x, weight, eps):
    y = ops.rms_norm.reference(x, weight, eps)
    with torch.no_grad():
        x.mul_(2.0)
    return y


def writes_between_elements(grads, inv_scale):
    for g in grads:
        g.as_strided((g.untyped_storage().nbytes() // g.element_size(),), (1,), 0).add_(1.0).sub_(1.0 - 1e-3)
    for g in grads:
        g.sub_(1e-3)
    return ops.unscale_and_check.reference(grads, inv_scale)


def seeds_torch(x, bias):
    torch.manual_seed(3)
    return ops.swiglu.reference(x, bias)


def loses_nan(x, bias):
    return torch.nan_to_num(ops.swiglu.reference(x, bias))


_OWN = torch.Generator()


def noisy(x, bias):
    return ops.swiglu.reference(x, bias) * (1.0 + 1e-7 * torch.rand((), generator=_OWN))


def returns_its_input(x, p, rng):
    return x if p == 0.0 else ops.dropout.reference(x, p, rng)


def of_another_shape(x, bias):
    return ops.swiglu.reference(x, bias)[..., :1]


_KEPT = []


def keeps_its_input(x, bias):
    _KEPT.append(x.view(-1))
    return ops.swiglu.reference(x, bias)


def all_in_low_precision(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias


def wrong_dtype(logits, target, **rest):
    return ops.cross_entropy.reference(logits, target, **rest).to(logits.dtype)


def ignores_vocab_start(weight, ids, vocab_start, comm):
    return ops.embedding.reference(weight, ids % weight.shape[0], vocab_start=0, comm=None)


def forgets_other_ranks(logits, target, label_smoothing, vocab_start, comm, inplace_backward):
    if comm is None:
        return ops.cross_entropy.reference(logits, target, label_smoothing=label_smoothing)
    return ops.cross_entropy.reference(logits, target % logits.shape[-1], label_smoothing=label_smoothing)


def dead_rows_give_nan(x, mask, scale, causal):
    y = softmax.reference(x, mask, scale, causal)
    return y.masked_fill((y == 0).all(-1, keepdim=True), math.nan)


PLANTED = [
    (softmax, minus_10000, "the output: error"),
    (softmax, dead_rows_give_nan, "got nan"),
    pytest.param(attention, without_last_key, "the output: error", marks=pytest.mark.slow),
    pytest.param(attention, swapped_window, "the output: error", marks=pytest.mark.nightly),
    (attention, lse_in_base_2_beside_a_mask, "output 1: error"),
    (ops.dropout, stale_offset, "the output: error of inf tolerances"),
    (ops.dropout, strict_comparison, "got 0, float64 reference 0.34"),
    (ops.dropout, returns_its_input, "shares memory with the argument x"),
    (ops.rms_norm, overwrites_input, "the call wrote to x"),
    (ops.unscale_and_check, writes_between_elements, "memory between the elements of grads[0]"),
    (ops.swiglu, seeds_torch, "changed the state of torch's random generator"),
    (ops.swiglu, loses_nan, "float64 reference nan"),
    (ops.swiglu, noisy, "differs in bits in a second, equal call"),
    (ops.swiglu, of_another_shape, "the output is torch.float32"),
    (ops.swiglu, keeps_its_input, "the memory of x is not freed after the call, its results and its graph are deleted"),
    (ops.layer_norm, all_in_low_precision, "error of"),
    (ops.cross_entropy, wrong_dtype, "the reference gives torch.float32"),
    (ops.embedding, ignores_vocab_start, "sharded over 2 ranks"),
    (ops.cross_entropy, forgets_other_ranks, "sharded over 2 ranks"),
]


@pytest.mark.parametrize("op, function, message", PLANTED, ids=lambda v: getattr(v, "__name__", None))
def test_a_wrong_forward_is_caught_and_named(op, function, message):
    report, messages = verdict(plant(op, function), op)
    assert not report.ok
    assert message in messages


def test_memory_that_a_thread_frees_a_little_later_is_not_a_leak():
    timers = []

    def keeps_its_input_for_a_moment(x, bias):
        if not timers:
            kept = [x.detach()]
            timers.append(threading.Timer(0.5, kept.clear))
            timers[0].start()
        return ops.swiglu.reference(x, bias)

    backend = plant(ops.swiglu, keeps_its_input_for_a_moment)
    assert kit.run(backend, ops=["swiglu"], examples=1, dtypes={torch.float32}).ok


def softmax_forward(x, mask, scale, causal):
    y = softmax.reference(x, mask, scale, causal)
    return y, (y, scale)


def right_backward(residuals, dy):
    y, scale = residuals
    y32, dy32 = y.float(), dy.float()
    return ((y32 * (dy32 - (y32 * dy32).sum(-1, keepdim=True)) * scale).to(y.dtype),)


def forgets_scale(residuals, dy):
    return right_backward((residuals[0], 1.0), dy)


def needs_contiguous(residuals, dy):
    return right_backward(residuals, torch.as_strided(dy, dy.shape, residuals[0].stride(), 0))


def writes_to_dy(residuals, dy):
    (dx,) = right_backward(residuals, dy)
    dy.zero_()
    return (dx,)


def no_gradient(residuals, dy):
    return (None,)


def different_each_time(residuals, dy):
    residuals[0].mul_(1.0 - 1e-6)
    return right_backward(residuals, dy)


@pytest.mark.parametrize(
    "bwd, message",
    [
        (forgets_scale, "the gradient of x: error"),
        (needs_contiguous, "(upstream gradient not contiguous)"),
        (writes_to_dy, "the call wrote to the upstream gradient[0]"),
        (no_gradient, "the gradient of x is missing"),
        (different_each_time, "the backward raised RuntimeError"),  # autograd notices, because y is also the output
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_a_wrong_backward_is_caught_and_named(bwd, message):
    report, messages = verdict(plant(softmax, softmax_forward, bwd=bwd), softmax)
    assert not report.ok
    assert message in messages


class Late(Cpu):
    """Computes in threads, which `synchronize` waits for."""

    def __init__(self):
        self.running = []

    def synchronize(self):
        while self.running:
            self.running.pop().join()

    def start(self, work):
        self.running.append(threading.Thread(target=work))
        self.running[-1].start()


def test_results_that_are_there_too_late_are_caught():
    def late(tensors):
        out = torch.zeros(())

        def work():
            time.sleep(0.02)
            out.copy_(ops.l2norm.reference(tensors))

        backend.start(work)
        return out

    backend = plant(ops.l2norm, late, backend=Late)
    _, messages = verdict(backend, ops.l2norm, examples=0)
    assert "the output was read before the work was done: it changed when the device was synchronised" in messages


def test_gradients_that_are_there_too_late_are_caught():
    def bwd(residuals, dy):
        (gradient,) = right_backward(residuals, dy)
        out = torch.zeros_like(gradient)

        def work():
            time.sleep(0.02)
            out.copy_(gradient)

        backend.start(work)
        return (out,)

    backend = plant(softmax, softmax_forward, bwd=bwd, backend=Late)
    _, messages = verdict(backend, softmax, examples=0)
    assert "the gradient of x was read before the work was done" in messages


class ReadWhenUsed(torch.Tensor):
    """A result that is computed when it is copied to the host, from what the arguments hold by then."""

    work = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.detach:
            with torch._C.DisableTorchFunctionSubclass():
                args[0].copy_(args[0].work())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_arguments_that_are_still_read_after_the_call_are_caught():
    def lazy(tensors):
        out = torch.zeros(()).as_subclass(ReadWhenUsed)
        first = []

        def work():
            return first[0] if first else first.append(ops.l2norm.reference(tensors)) or first[0]

        out.work = work
        return out

    _, messages = verdict(plant(ops.l2norm, lazy), ops.l2norm, examples=0)
    assert "the output is wrong if the arguments are overwritten once the call has returned" in messages


def test_forgotten_residuals_are_named():
    report, messages = verdict(plant(softmax, softmax.reference, bwd=right_backward), softmax)
    assert not report.ok
    assert "'planted/wrong' has a bwd, so it must return (output, residuals)" in messages


@dataclasses.dataclass
class Saved:
    y: torch.Tensor


NESTED = {"list": lambda y: [y], "tuple": lambda y: (None, (y,)), "dict": lambda y: {"y": y}, "Saved": Saved}


@pytest.mark.parametrize("name", NESTED)
def test_tensors_inside_of_residuals_are_named(name):
    def forward(x, mask, scale, causal):
        y = softmax.reference(x, mask, scale, causal)
        return y, (y.clone(), scale, NESTED[name](y.clone()))

    def bwd(residuals, dy):
        return right_backward(residuals[:2], dy)

    _, messages = verdict(plant(softmax, forward, bwd=bwd), softmax, examples=0)
    assert f"the residuals hold a tensor inside of a {name}" in messages


def test_the_right_backward_passes_in_float32():
    report, _ = verdict(plant(softmax, softmax_forward, bwd=right_backward), softmax)
    assert {r.status for r in report.rows if r.dtype == "float32"} == {"pass"}


def test_a_backward_that_changes_its_residuals_is_caught():
    def forward(x, mask, scale, causal):
        y = softmax.reference(x, mask, scale, causal)
        return y, (y.clone(), torch.tensor([1.0]), scale)

    def bwd(residuals, dy):
        y, factor, scale = residuals
        factor.data.mul_(1.0 - 1e-6)
        return (right_backward((y, scale), dy)[0] * factor.to(dy.dtype),)

    _, messages = verdict(plant(softmax, forward, bwd=bwd), softmax)
    assert "differs in bits when backward runs twice" in messages


def linear_forward(x, weight, bias):
    return ops.linear.reference(x, weight, bias), (x, weight, bias is not None)


def linear_backward(residuals, dy, *, needs):
    x, weight, has_bias = residuals
    rows = math.prod(x.shape[:-1])
    dy_rows, x_rows = dy.reshape(rows, dy.shape[-1]), x.reshape(rows, x.shape[-1])
    dx = (dy @ weight).reshape(x.shape) if needs[0] else None
    dweight = dy_rows.t() @ x_rows if needs[1] else None
    return dx, dweight, dy_rows.sum(0) if has_bias and needs[2] else None


def weight_by_the_way(residuals, dy, *, needs):
    """Computes the weight's gradient only if x's is computed."""
    dx, dweight, dbias = linear_backward(residuals, dy, needs=(needs[0], needs[0], needs[2]))
    return dx, dweight, dbias


@pytest.mark.parametrize("bwd, ok", [(linear_backward, True), (weight_by_the_way, False)])
def test_a_gradient_that_depends_on_which_others_are_wanted_is_caught(bwd, ok):
    report, messages = verdict(plant(ops.linear, linear_forward, bwd=bwd), ops.linear)
    assert ({r.status for r in report.rows if r.dtype == "float32"} == {"pass"}) is ok
    assert ok or "the gradient of weight differs when it is the only one requested (needs)" in messages


def test_a_hint_that_changes_a_gradient_is_caught():
    reference = ops.cross_entropy.reference

    def forward(logits, target, label_smoothing, vocab_start, comm, inplace_backward):
        y = reference(logits, target, label_smoothing=label_smoothing, vocab_start=vocab_start, comm=comm)
        return y + 0.0 * logits.sum() if inplace_backward else y.clone()

    def doubled(**arguments):
        y = forward(**arguments)
        return y * 2 - y.detach() if arguments["inplace_backward"] else y

    _, messages = verdict(plant(ops.cross_entropy, doubled), ops.cross_entropy)
    assert "the gradient of logits differs with inplace_backward=True, a hint" in messages


def refuses_except_every(nth):
    """A why_not that accepts the nth question, the next but n, ..., and refuses all others."""
    calls = itertools.count(1)
    return lambda call: ["not this time"] if next(calls) % nth else []


def test_a_refusal_that_does_not_hold_is_caught():
    fickle = refuses_except_every(4)
    report, messages = verdict(plant(ops.swiglu, ops.swiglu.reference, why_not=fickle), ops.swiglu)
    assert not report.ok
    assert "but the implementation was called" in messages


def test_a_why_not_that_changes_its_mind_is_caught():
    _, messages = verdict(plant(ops.swiglu, ops.swiglu.reference, why_not=refuses_except_every(2)), ops.swiglu)
    assert "why_not is not pure" in messages


def test_a_why_not_that_accepts_what_then_raises_is_caught():
    def only_two_dimensions(x, bias):
        if x.ndim != 2:
            raise RuntimeError("this kernel wants two dimensions")
        return ops.swiglu.reference(x, bias)

    _, messages = verdict(plant(ops.swiglu, only_two_dimensions), ops.swiglu)
    assert "accepted the call and raised RuntimeError: this kernel wants two dimensions" in messages


@pytest.mark.parametrize(
    "why_not, message",
    [
        (lambda call: 1 / 0, "why_not raised on a valid call: ZeroDivisionError"),
        (lambda call: "no", "must return a sequence of reasons, not str"),
        (lambda call: [""], "must give reasons in words"),
        (lambda call: [] if call.x.device.type == "cpu" else ["x is not on the CPU"], "on meta tensors"),
    ],
    ids=["raises", "string", "empty", "looks at the device"],
)
def test_a_why_not_that_breaks_its_contract_is_caught(why_not, message):
    _, messages = verdict(plant(ops.swiglu, ops.swiglu.reference, why_not=why_not), ops.swiglu)
    assert message in messages


def test_a_why_not_marked_by_metadata_that_looks_at_strides_is_caught():
    def dense_only(call):
        return [] if call.x.is_contiguous() else ["x has gaps"]

    backend = plant(ops.swiglu, ops.swiglu.reference)
    (impl,) = backend.impls["swiglu"]
    for marked in (False, True):
        backend.impls["swiglu"] = [dataclasses.replace(impl, why_not=dense_only, by_metadata=marked)]
        _, messages = verdict(backend, ops.swiglu)
        assert ("why_not is marked by_metadata, but it says ['x has gaps']" in messages) == marked


def test_an_implementation_that_ran_nothing_fails_with_its_reasons():
    def never(call):
        return ["the moon is not full"]

    report, messages = verdict(plant(ops.swiglu, ops.swiglu.reference, why_not=never), ops.swiglu)
    assert {r.status for r in report.rows if r.implementation == "planted/wrong"} == {"fail"}
    assert "ran no sample at all" in messages
    assert "the moon is not full" in messages


def test_an_implementation_that_is_not_available_on_this_machine_is_declined():
    why_not = lambda call: ["x is not round", hal.Unavailable("moon is not installed")]  # noqa: E731
    report, _ = verdict(plant(ops.swiglu, ops.swiglu.reference, why_not=why_not), ops.swiglu)
    rows = [r for r in report.rows if r.implementation == "planted/wrong"]
    assert {r.status for r in rows} == {"declined"} and "moon is not installed" in rows[0].reasons


def test_one_refused_dtype_is_declined_and_not_a_failure():
    def no_halves(call):
        return [f"no kernel for {call.x.dtype}"] if call.x.dtype == torch.float16 else []

    report, _ = verdict(plant(ops.swiglu, ops.swiglu.reference, why_not=no_halves), ops.swiglu)
    assert report.ok
    rows = {r.dtype: r for r in report.rows if r.implementation == "planted/wrong"}
    assert {d: r.status for d, r in rows.items()} == {"float32": "pass", "bfloat16": "pass", "float16": "declined"}
    assert rows["float16"].reasons == ["no kernel for torch.float16"]


def test_a_draw_that_remembers_earlier_draws_is_caught():
    last = [hal.Rng(0)]

    def remembers(shape, rng, device):
        used = last[0] if shape == () and min(rng.seed, last[0].seed) > 2**32 else rng
        last[0] = rng
        return ops.philox_uniform.reference(shape, used, device=device)

    _, messages = verdict(plant(ops.philox_uniform, remembers), ops.philox_uniform)
    assert "fork order matters" in messages


def test_every_implementation_is_tested_not_only_the_preferred_one():
    backend = plant(ops.swiglu, ops.swiglu.reference)
    type(backend).impl(ops.swiglu, id="planted/second")(with_op_signature(ops.swiglu, loses_nan))
    report, _ = verdict(backend, ops.swiglu)
    assert {r.implementation for r in report.failed} == {"planted/second"}
    assert {r.implementation for r in report.rows if r.status == "pass"} == {"planted/wrong"}


def test_a_signature_changed_behind_the_registrations_back_is_caught():
    backend = plant(ops.swiglu, ops.swiglu.reference)
    (impl,) = backend.impls["swiglu"]
    backend.impls = {"swiglu": [hal.Impl(impl.op, impl.id, impl.call, impl.why_not, lambda x: x, None, {})]}
    _, messages = verdict(backend, ops.swiglu)
    assert "must have the signature of the reference" in messages


def test_a_waiver_is_applied_and_printed():
    def rough(x, bias):
        return ops.swiglu.reference(x, bias) * (1.0 + 2.5e-6)

    waivers = {torch.float32: (4.0, "the exponential of this device has 20 bits")}
    refused, _ = verdict(plant(ops.swiglu, rough), ops.swiglu)
    assert "float32" in {r.dtype for r in refused.failed}
    report, _ = verdict(plant(ops.swiglu, rough, waivers=waivers), ops.swiglu)
    row = report.rows[0]
    assert (row.status, row.reasons[0]) == ("waived", "waiver x4: the exponential of this device has 20 bits")
    assert 1.0 < row.worst_error_in_tolerances <= 4.0
    assert "the exponential of this device has 20 bits" in str(report)


def test_ops_without_implementation_are_listed():
    report, _ = verdict(Cpu(), ops.swiglu)
    assert report.ok
    assert report.missing == ["swiglu"]
    assert {(r.status, r.samples) for r in report.rows} == {("declined", 0)}


def test_a_device_that_cannot_hold_a_dtype_is_a_failure_and_not_a_crash():
    backend = plant(ops.swiglu, ops.swiglu.reference)
    backend.device = lambda index=0: torch.device("cuda", 0) if not torch.cuda.is_available() else torch.device("xpu")
    report = kit.check_dtype(backend, backend.impls["swiglu"][0], torch.float32, kit.Effort(examples=0))
    assert report.status == "fail"
    assert "cannot hold the arguments" in report.message
