"""An op under torch's tracers, over the backend's own kernels: `torch.library.opcheck`, and full-graph compilation.

opcheck checks that schema, fake, autograd registration and ahead-of-time dispatch of the lowered form agree with what
the op does; see hal/core/lower.py for the purpose of the lowered form. The compiled call must have the results and
gradients of the eager one, and `fullgraph=True` raises an error where the graph would break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hal.core.backend import Backend
from hal.core.dispatch import activated, why
from hal.core.lower import lower
from hal.core.op import Op, Sample, Tol

from .calls import backward, build, code, invoke, not_stored, run, tensors, upstream
from .comparison import equal_bits
from .parity_rows import NO_IMPLEMENTATION, Row
from .subject import op_source


def untraced(backend: Backend, op: Op[Any, Any]) -> Row:
    """The row of an op that is wrong in eager code, in place of that of `check_lowered`."""
    row = _row(backend, op)
    row.status, row.reasons = "not run", ["the op failed in eager code"]
    return row


def _row(backend: Backend, op: Op[Any, Any]) -> Row:
    return Row(op.name, "float32", backend.name, backend.simulated, "pass", 0, None, implementation="hal.lower")


def check_lowered(backend: Backend, op: Op[Any, Any]) -> Row:
    """One row, in float32: opcheck, and a full graph, of the first edge case with gradients that the backend accepts.

    An op with a random stream is checked a second time, with the first one that draws.
    """
    row = _row(backend, op)
    if not backend.implementations(op):
        row.status, row.reasons = "declined", [NO_IMPLEMENTATION]
        return row
    with activated(backend):
        try:
            samples, refusals = _accepted(backend, op)
        except Exception as error:
            row.status, row.message = "fail", f"asking for reasons raised {type(error).__name__}: {error}"
            return row
        if not samples:
            row.status, row.reasons = "declined", refusals
            return row
        for sample in samples:
            row.samples += 1
            if wrong := _opcheck(backend, op, sample):
                row.status, row.message, row.code = "fail", wrong, _code(backend, op, sample, _OPCHECK)
                break
            if wrong := _full_graph(backend, op, sample):
                row.status, row.message, row.code = "fail", wrong, _code(backend, op, sample, _COMPILE)
                break
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


def _full_graph(backend: Backend, op: Op[Any, Any], sample: Sample) -> str:
    """How a compiled call of the op differs from an eager one, or why it is not one graph; "" if it is equal."""
    with_grad = bool(op.grads) and sample.grad
    torch._dynamo.reset()  # a function has a limited number of graphs, and every op compiles this one

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    # aot_eager traces forward and backward as every compiler does, and then runs the graphs' ops one by one.
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = run(op, op, build(op, sample, torch.float32, backend.device(0)), with_grad)
    try:
        traced = run(op, compiled, build(op, sample, torch.float32, backend.device(0)), with_grad)
        if eager.outputs.keys() != traced.outputs.keys():
            return f"a full graph returns {list(traced.outputs)}, an eager call {list(eager.outputs)}"
        pairs = {name: (y, traced.outputs[name]) for name, y in eager.outputs.items()}
        if with_grad:
            dys = upstream(eager.differentiable, seed=0)
            expected, got = backward(eager, dys), backward(traced, dys)
            for name, leaf in eager.leaves.items():
                # A graph may return zeros where autograd returns no gradient.
                both = (torch.zeros_like(leaf) if g is None else g for g in (expected[name], got[name]))
                pairs[f"the gradient of {name}"] = next(both), next(both)
        same = equal_bits if backend.capabilities().deterministic else _close(op.tol[torch.float32])
        different = [name for name, (a, b) in pairs.items() if not same(a, b)]
    except Exception as error:
        return f"a full graph raised {type(error).__name__}: {' '.join(str(error).split())[:1000]}"
    return f"in a full graph, other results than in an eager call: {', '.join(different)}" if different else ""


def _close(tol: Tol) -> Callable[[Tensor, Tensor], bool]:
    """Equality of results where equal calls may give different bits."""

    def close(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a, b, tol.rtol, tol.atol * max(1.0, float(a.abs().max())), True)

    return close


def _accepted(backend: Backend, op: Op[Any, Any]) -> tuple[list[Sample], list[str]]:
    """The first edge case that an implementation accepts, and the first of those that draw random numbers; or all
    reasons why none is accepted."""
    samples: list[Sample] = []
    reasons: list[str] = []
    for sample in op.edge_cases():
        if not sample.grad:
            continue
        if not_storable := not_stored(sample, backend.capabilities().dtypes):
            reasons += not_storable
            continue
        arguments = build(op, sample, torch.float32, backend.device(0))
        draws = arguments.get("rng") is not None
        if samples and not draws:
            continue
        answer = invoke(op, lambda *a, **k: why(op, *a, **k), arguments)
        if answer.chosen is not None:
            samples.append(sample)
            if draws or "rng" not in arguments:
                break
        reasons += [r for refusals in answer.reasons.values() for r in refusals]
    return samples, sorted(set(reasons))


_OPCHECK = """lowered = hal.lower(op)
torch.library.opcheck(lowered.torch_op, tuple(lowered.flatten(*args, **kwargs)))
"""
_COMPILE = """print(op(*args, **kwargs), torch.compile(op, fullgraph=True, backend="aot_eager")(*args, **kwargs))
"""


def _code(backend: Backend, op: Op[Any, Any], sample: Sample, what: str) -> str:
    """A program that makes the sample's call and does `what` with it."""
    options = "".join(f", {k}={v!r}" for k, v in backend.options().items() if v is not None)
    return (
        "import hal, torch\nfrom hal import DtypeSpec, Rng, Sample, TensorSpec, ops\n"
        f"hal.use({backend.name!r}{options})\n"
        f"args, kwargs = {code(sample)}.build(torch.float32, hal.device())\n"
        f"for x in [*args, *kwargs.values()]:\n"
        "    if isinstance(x, torch.Tensor) and x.is_floating_point():\n"
        "        x.requires_grad_()\n"
        f"op = {op_source(op)}\n{what}"
    )
