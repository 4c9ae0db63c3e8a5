"""Functions with the signature of an op: parameters passed on, derived, refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_backend import HostBackend
from torch import Tensor

import hal
from hal import backend_tools, ops
from hal.backend_tools import with_signature_of
from hal.core.adapters import require_same_signature


def arguments(op: Any) -> dict[str, object]:
    """A distinct value for every parameter of the op."""
    return {name: f"the {name}" for name in op.signature.parameters}


def call(op: Any, function: Callable[..., Any], given: dict[str, object]) -> Any:
    """Calls `function` as HAL's dispatch does: keyword-only parameters by name, the others in order."""
    parameters = op.signature.parameters
    positional = [given[n] for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    return function(*positional, **{n: given[n] for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY})


@pytest.mark.parametrize("op", [ops.flash_attention, ops.swiglu, ops.adamw, ops.cross_entropy], ids=lambda op: op.name)
def test_a_function_of_some_parameters_gets_the_signature_and_its_own_values(op: Any) -> None:
    names = list(op.signature.parameters)
    subset = [names[-1], names[0]]
    function = eval(f"lambda {', '.join(subset)}: ({', '.join(subset)})")
    adapted = with_signature_of(op)(function)
    require_same_signature(op, adapted, "the adapted function")
    assert call(op, adapted, arguments(op)) == (f"the {subset[0]}", f"the {subset[1]}")


def test_a_parameter_left_out_does_not_move_those_behind_it() -> None:
    names = list(ops.flash_attention.signature.parameters)
    left_out, behind = names[-2:]
    function = eval(f"lambda {left_out}='its default', {behind}=None: ({left_out}, {behind})")
    adapted = with_signature_of(ops.flash_attention, without=(left_out,))(function)
    given = {name: f"the {name}" for name in names if name != left_out}
    q, k, v = (given.pop(name) for name in "qkv")
    assert adapted(q, k, v, **given) == ("its default", f"the {behind}")


def test_parameters_left_out_are_refused_and_need_no_gradient() -> None:
    class Without(HostBackend):
        name = "without"

    @Without.impl(ops.linear, id="w", bwd=lambda residuals, dy: (dy @ residuals[1], dy.flatten(0, -2).T @ residuals[0]))
    @with_signature_of(ops.linear, without=("bias",))
    def linear(x: Tensor, weight: Tensor) -> Any:
        return x @ weight.T, (x, weight)

    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    with hal.activated(Without()):
        ops.linear(x, weight).sum().backward()
        with pytest.raises(hal.UnsupportedOp, match="bias"):
            ops.linear(x, weight, torch.zeros(2))
    assert weight.grad is not None
    assert torch.allclose(weight.grad[0], x.detach().sum(0))


def test_the_ops_defaults_hold_not_those_of_the_function() -> None:
    adapted = with_signature_of(ops.rotary)(lambda x, layout="TND", *, interleaved=True: (layout, interleaved))
    assert adapted(1, 2, 3) == ("SBND", False)
    assert adapted(1, 2, 3, layout="BSND", interleaved=True) == ("BSND", True)


def test_a_derived_parameter_is_computed_from_the_call() -> None:
    def total(call: hal.Call) -> float:
        return 10 * call.x + call.p

    adapted = with_signature_of(ops.dropout, both=total)(lambda both, rng: (both, rng))
    assert adapted(2, 0.5, "rng") == (20.5, "rng")


@pytest.mark.parametrize(
    "adapt",
    [
        lambda: with_signature_of(ops.dropout)(lambda x, probability: x),
        lambda: backend_tools.why_not_tensors(ops.dropout, "y", reasons=list),
    ],
    ids=["parameter", "tensor"],
)
def test_a_parameter_that_the_op_lacks_is_refused_by_name(adapt: Callable[[], object]) -> None:
    with pytest.raises(hal.HalError, match=r"takes (probability|y), which dropout\("):
        adapt()


def test_names_and_places_survive() -> None:
    @with_signature_of(ops.dropout)
    def forward(x: Tensor) -> Tensor:
        """Forward."""
        return x

    assert (forward.__name__, forward.__doc__, forward.__module__) == ("forward", "Forward.", __name__)


def test_why_not_passes_the_tensors_that_have_gradients_or_are_named() -> None:
    def reasons(*tensors: object) -> list[str]:
        return [str(t) for t in tensors]

    default = backend_tools.why_not_tensors(ops.cross_entropy, reasons=reasons)
    assert default(ops.cross_entropy.Call(**arguments(ops.cross_entropy))) == ["the logits"]
    named = backend_tools.why_not_tensors(ops.rotary, "sin", "x", reasons=reasons)
    assert named(ops.rotary.Call(**arguments(ops.rotary))) == ["the sin", "the x"]
    lists = backend_tools.why_not_tensors(ops.adamw, "grads", "model_params", reasons=reasons)
    call = ops.adamw.Call(**{**arguments(ops.adamw), "grads": [1, 2], "model_params": None})
    assert lists(call) == ["1", "2"]
    assert not default.by_metadata
    assert backend_tools.why_not_tensors(ops.l2norm, "tensors", reasons=reasons, by_metadata=True).by_metadata


def test_a_backend_of_adapted_functions_runs_and_refuses(make_backend: Any) -> None:
    Small = make_backend()
    reasons = backend_tools.host_tensor_reasons((torch.float32,), "float32 only", "in host memory")

    @Small.impl(ops.bias_gelu, id="small", why_not=backend_tools.why_not_tensors(ops.bias_gelu, reasons=reasons))
    @with_signature_of(ops.bias_gelu)
    def bias_gelu(x: Tensor, approximate: str) -> Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    x = torch.randn(3, 4)
    with hal.activated(Small()):
        torch.testing.assert_close(ops.bias_gelu(x), ops.bias_gelu.reference(x))
        with pytest.raises(hal.UnsupportedOp, match=r"dtype torch.bfloat16 \(float32 only\)"):
            ops.bias_gelu(x.bfloat16())


def test_every_helper_says_what_it_is_for() -> None:
    undocumented = [
        name
        for name in backend_tools.__all__
        if callable(getattr(backend_tools, name)) and not inspect.getdoc(getattr(backend_tools, name))
    ]
    assert undocumented == []
