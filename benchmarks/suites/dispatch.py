"""HAL's overhead over a direct call, against that of a custom op of torch.library with the same implementation.

The implementation makes one call through cffi (eleven arguments, no rows, so the kernel returns immediately) and
returns its input or, where autograd needs a new tensor, an empty one. The time of calling it directly is subtracted.
The remaining time is that of checking the contract (and why_not: once for all calls with the same metadata if it is
marked `by_metadata`, otherwise at every call), forwarding the arguments and, in the last case, autograd's node. Every
tensor costs 0.15 us, mostly for reading its shape and dtype, so there are calls with one and with three tensors.

The peer checks and forwards the same arguments, chooses by the device of the tensors, and creates the same node.
Budgets of 1 us through the registry and 6 us with autograd are shown beside it, without a goal, because what a
processor does in a microsecond varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hal
from hal import ops
from hal.core.signature import define, fragments

from ..harness.case import OURS, Candidate, Case, Thunk

_FLOATS = {torch.float32, torch.bfloat16}


def _kernel() -> Callable[..., None]:
    from hal.backends.cpu_ref.build import lib

    return lib().hal_norm_fwd  # type: ignore[no-any-return]


class Idle(hal.Backend):
    """A backend whose ops compute nothing, so that the time of a call is the overhead of dispatch."""

    name = "idle"

    def probe(self) -> hal.Probe:
        return hal.Probe(True, 1, "does nothing")

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> hal.Comm:
        return hal.SingleRankComm()


def _why_not(call: hal.Call) -> Sequence[str]:
    return () if call.x.dtype in _FLOATS and call.x.is_cpu else ("dtype",)


@hal.by_metadata
def _why_not_by_metadata(call: hal.Call) -> Sequence[str]:
    return _why_not(call)


def _register() -> None:
    """Registers the implementations. This does not happen at import, because it needs the compiled kernels."""
    kernel = _kernel()

    @Idle.impl(ops.swiglu, id="idle/cffi", why_not=_why_not)
    def swiglu(x, bias=None):  # type: ignore[no-untyped-def]
        x_at = x.data_ptr()
        kernel(0, 1, x_at, x_at, x_at, x_at, x_at, x_at, 0.0, 0, 8)
        return x

    @Idle.impl(ops.layer_norm, id="idle/cffi", why_not=_why_not_by_metadata)
    def layer_norm(x, weight, bias, eps=1e-5):  # type: ignore[no-untyped-def]
        x_at, w_at, b_at = x.data_ptr(), weight.data_ptr(), bias.data_ptr()
        kernel(0, 1, x_at, w_at, b_at, x_at, x_at, x_at, eps, 0, 8)
        return x

    @Idle.impl(ops.rms_norm, id="idle/cffi", why_not=_why_not_by_metadata, bwd=lambda residuals, dy: (dy, None))
    def rms_norm(x, weight, eps=1e-5):  # type: ignore[no-untyped-def]
        x_at, w_at = x.data_ptr(), weight.data_ptr()
        kernel(0, 0, x_at, w_at, 0, x_at, 0, x_at, eps, 0, 8)
        return torch.empty_like(x), ()

    # Generated, so that it has every option of the op without a wrapper, which would be measured too.
    header = fragments(ops.flash_attention.signature)
    attention = define("attention", f"def attention({header.header}):\n    return q\n", header.scope, "idle attention")
    Idle.impl(ops.flash_attention, id="idle", version=ops.flash_attention.version)(attention)


def _bound(function: Callable[..., Any], op: str) -> Thunk:
    """`function` with tensor arguments that `op` accepts."""
    x, w, q = torch.randn(4, 8), torch.randn(8), torch.randn(4, 2, 8)
    if op == "swiglu":
        return partial(function, x)
    if op == "layer_norm":
        return partial(function, x, w, w)
    if op == "rms_norm":
        return partial(function, x.requires_grad_(), w)
    return partial(function, q, q, q, layout="SBH", num_heads=2, next_tokens=0)


def _op(name: str) -> Thunk:
    if "layer_norm" not in Idle.impls:
        _register()
    hal.activate(Idle())
    return _bound(getattr(ops, name), name)


def _direct(name: str) -> Thunk:
    """The call that is subtracted: of the implementation, without HAL."""
    if "layer_norm" not in Idle.impls:
        _register()
    return _bound(Idle.impls[name][0].forward, name)


_SCHEMAS = {
    "swiglu": "(Tensor x, Tensor? bias=None) -> ()",
    "layer_norm": "(Tensor x, Tensor weight, Tensor bias, float eps=1e-5) -> ()",
    "rms_norm": "(Tensor x, Tensor weight, float eps=1e-5) -> Tensor",
    "flash_attention": (
        "(Tensor q, Tensor k, Tensor v, str layout, int? num_heads=None, int? num_kv_heads=None, "
        "int? pre_tokens=None, int? next_tokens=None, Tensor? mask=None, float? scale=None, float dropout_p=0.0, "
        "Tensor? rng=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, bool return_lse=False, "
        "float? softcap=None, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? sinks=None, bool top_left=False) "
        "-> ()"
    ),
}


def _library(name: str) -> Thunk:
    """The same call through torch.library, whose ops do not return their inputs and have no keyword-only tensors."""
    if "layer_norm" not in Idle.impls:
        _register()
    forward = Idle.impls[name][0].forward

    def kernel(*arguments: Any) -> Tensor | None:
        if name == "flash_attention":  # computes nothing
            return None
        result = forward(*arguments)
        return result[0] if name == "rms_norm" else None

    op = torch.library.custom_op(f"hal_bench::{name}", kernel, mutates_args=(), schema=_SCHEMAS[name])
    if name == "rms_norm":
        op.register_autograd(lambda ctx, dy: (dy, None, None))
    return _bound(getattr(torch.ops.hal_bench, name), name)


def cases() -> list[Case]:
    """One case per kind of call."""
    kinds = (
        ("swiglu", "swiglu, one tensor: registry, why_not and cffi", 1e-6),
        ("layer_norm", "layer_norm, three tensors: registry and cffi", 1e-6),
        ("flash_attention", "flash_attention: registry, 16 parameters", 1e-6),
        ("rms_norm", "rms_norm: registry, cffi and autograd, forward", 6e-6),
    )
    return [
        Case(
            "dispatch",
            shape,
            {
                OURS: Candidate(partial(_op, name), "hal"),
                "direct": Candidate(partial(_direct, name), "hal"),
                "torch.library": Candidate(partial(_library, name)),
            },
            minus="direct",
            budgets={f"budget of {budget * 1e6:g} us": budget},
        )
        for name, shape, budget in kinds
    ]
