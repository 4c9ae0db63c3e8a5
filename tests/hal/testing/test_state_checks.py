"""Implementations that are right in every call alone, and wrong because of what they remember of earlier ones."""

import threading
import time
import weakref

import pytest
import torch
from planted import Cpu, plant, verdict

import hal
from hal import ops


def reference(x, weight, eps):
    return ops.rms_norm.reference(x, weight, eps)


def reuses_its_buffer():
    pool = {}

    def function(x, weight, eps):
        y = reference(x, weight, eps)
        if y.requires_grad or not y.numel():
            return y
        # Memory that no tensor owns, so that the check of leaks has nothing to find.
        memory = pool.setdefault((y.shape, y.dtype), bytearray(y.nbytes))
        return torch.frombuffer(memory, dtype=y.dtype).view(y.shape).copy_(y)

    return function


def keeps_the_first_weight():
    kept = {}

    def function(x, weight, eps):
        key = weight.data_ptr()
        alive = key in kept and kept[key][0]() is weight
        if not alive:
            kept[key] = (weakref.ref(weight), weight.detach().clone())
        return reference(x, weight if weight.requires_grad else kept[key][1], eps)

    return function


def takes_a_result_for_normalised():
    last = []

    def function(x, weight, eps):
        known = bool(last) and last[0]() is not None and last[0]().data_ptr() == x.data_ptr()
        y = (x * weight).to(x.dtype) if known else reference(x, weight, eps)
        last[:] = [weakref.ref(y)]
        return y

    return function


def keeps_the_first(kept, x):
    """A copy of x as it was when this tensor was seen first; `kept` remembers it."""
    first = kept.get(x.data_ptr())
    if first is None or first[0]() is not x:
        first = kept[x.data_ptr()] = (weakref.ref(x), x.detach().clone())
    return first[1]


def keeps_the_first_gradients():
    kept = {}

    def function(grads, **others):
        ops.adamw.reference(grads=[keeps_the_first(kept, g) for g in grads], **others)

    return function


def keeps_the_first_logits():
    kept = {}

    def function(logits, **others):
        return ops.moe_router.reference(logits if logits.requires_grad else keeps_the_first(kept, logits), **others)

    return function


@pytest.mark.parametrize(
    "op, make, text",
    [
        (ops.adamw, keeps_the_first_gradients, "is wrong after grads[0] was changed in place"),
        (ops.moe_router, keeps_the_first_logits, "is wrong after logits was changed in place"),
    ],
)
def test_stale_values_of_ops_that_write_in_place_or_choose_are_named(op, make, text):
    report = hal.testing.run(plant(op, make()), ops=[op.name], examples=0, dtypes=[torch.float32])
    assert text in " | ".join(row.message for row in report.failed)


@pytest.mark.parametrize(
    "make, text",
    [
        (reuses_its_buffer, "the output changed when the op was called again with other values"),
        (keeps_the_first_weight, "the output is wrong after weight was changed in place"),
        (takes_a_result_for_normalised, "the output is wrong if x is the output of the call before (a chained call)"),
    ],
)
def test_what_an_implementation_remembers_is_named(make, text):
    report, messages = verdict(plant(ops.rms_norm, make()), ops.rms_norm, examples=0)
    assert text in messages
    row = next(row for row in report.failed if text in row.message)
    assert "check='state'" in row.code


def test_late_results_of_a_thread_that_synchronize_does_not_wait_for_are_named():

    def late(tensors):
        out = torch.zeros(())
        right = ops.l2norm.reference(tensors)
        threading.Thread(target=lambda: (time.sleep(0.02), out.copy_(right))).start()
        return out

    _, messages = verdict(plant(ops.l2norm, late), ops.l2norm, examples=0)
    assert "the output was read before the work was done: it changed after synchronize() had returned" in messages


def test_the_row_is_reported_before_its_first_call():
    seen = []

    def recorded(tensors):
        seen.append("call")
        return ops.l2norm.reference(tensors)

    for scale in ("default", "production"):
        backend = plant(ops.l2norm, recorded)
        backend.simulated = True
        seen.clear()
        hal.testing.run(backend, ops=["l2norm"], examples=0, scale=scale, dtypes=[torch.float32],
                        on_call=lambda row, calls: seen.append((row, calls)))  # fmt: skip
        assert seen[:2] == [("l2norm float32 planted/wrong", 0), "call"]
        assert issubclass(type(backend), Cpu)
