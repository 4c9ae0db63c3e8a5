"""`torch.library.opcheck` on the lowered form of an op, over the backend's own kernels.

It checks that schema, fake, autograd registration and ahead-of-time dispatch agree with what the op does; see
hal/core/lower.py for the purpose of the lowered form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hal.core.backend import Backend
from hal.core.dispatch import activated, why
from hal.core.lower import lower
from hal.core.op import Op, Sample

from .calls import build, code, invoke, not_stored, tensors
from .parity_rows import NO_IMPLEMENTATION, Row
from .subject import op_source


def check_lowered(backend: Backend, op: Op[Any, Any]) -> Row:
    """One row: opcheck on the first edge case with gradients that the backend accepts, in float32."""
    row = Row(op.name, "float32", backend.name, backend.simulated, "pass", 0, None, implementation="hal.lower")
    if not backend.implementations(op):
        row.status, row.reasons = "declined", [NO_IMPLEMENTATION]
        return row
    with activated(backend):
        try:
            sample, refusals = _accepted(backend, op)
        except Exception as error:
            row.status, row.message = "fail", f"asking for reasons raised {type(error).__name__}: {error}"
            return row
        if sample is None:
            row.status, row.reasons = "declined", refusals
            return row
        wrong = _opcheck(backend, op, sample)
    row.samples = 1
    if wrong:
        row.status, row.message, row.code = "fail", wrong, _code(backend, op, sample)
    return row


def _opcheck(backend: Backend, op: Op[Any, Any], sample: Sample) -> str:
    arguments = build(op, sample, torch.float32, backend.device(0))
    for name in op.grads:
        if isinstance(arguments[name], torch.Tensor):
            arguments[name] = arguments[name].detach().requires_grad_()
    # On other devices, torch's check of the registration raises.
    return opcheck_errors(op, arguments, registration=backend.device(0).type in ("cpu", "cuda", "xpu"))


def opcheck_errors(op: Op[Any, Any], arguments: Mapping[str, Any], *, registration: bool = True) -> str:
    """The errors of opcheck for a call of the lowered op as text, "" if there are none.

    registration: whether the registration for autograd is checked.
    """
    lowered = lower(op)
    tests = ["test_faketensor", "test_aot_dispatch_dynamic"] + ["test_autograd_registration"] * registration
    if not any(x.is_floating_point() and x.itemsize == 1 for _, _, x in tensors(arguments)):
        tests.append("test_schema")  # multiplies its arguments, which torch does not do with float8
    flat = tuple(invoke(op, lowered.flatten, arguments))
    results = torch.library.opcheck(lowered.torch_op, flat, test_utils=tests, raise_exception=False)
    return "; ".join(
        f"{test}: {' '.join(str(result).split())}" for test, result in results.items() if result != "SUCCESS"
    )


def _accepted(backend: Backend, op: Op[Any, Any]) -> tuple[Sample | None, list[str]]:
    """The first edge case that an implementation accepts, or all reasons why none is accepted."""
    reasons: list[str] = []
    for sample in op.edge_cases():
        if not sample.grad:
            continue
        if not_storable := not_stored(sample, backend.capabilities().dtypes):
            reasons += not_storable
            continue
        answer = invoke(op, lambda *a, **k: why(op, *a, **k), build(op, sample, torch.float32, backend.device(0)))
        if answer.chosen is not None:
            return sample, []
        reasons += [r for refusals in answer.reasons.values() for r in refusals]
    return None, sorted(set(reasons))


def _code(backend: Backend, op: Op[Any, Any], sample: Sample) -> str:
    options = "".join(f", {k}={v!r}" for k, v in backend.options().items() if v is not None)
    return (
        "import hal, torch\nfrom hal import DtypeSpec, Rng, Sample, TensorSpec, ops\n"
        f"hal.use({backend.name!r}{options})\n"
        f"args, kwargs = {code(sample)}.build(torch.float32, hal.device())\n"
        f"for x in [*args, *kwargs.values()]:\n"
        "    if isinstance(x, torch.Tensor) and x.is_floating_point():\n"
        "        x.requires_grad_()\n"
        f"lowered = hal.lower({op_source(op)})\n"
        "torch.library.opcheck(lowered.torch_op, tuple(lowered.flatten(*args, **kwargs)))\n"
    )
