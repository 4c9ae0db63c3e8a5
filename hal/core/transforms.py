"""Routes calls of ops that are not plain eager code: to the op's torch op, or to an error.

Eager calls make only two checks in `Op.__call__` (see `source` in op_call.py): that no dispatch mode, functorch
transform or forward-mode level is active, and that the first tensor is a plain one. Everything else is decided here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _TorchDispatchModeKey as _Mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from . import dispatch
from .gradients import has_tangent, refuse_tangents, tensors
from .lower import Lowered, lower
from .op import Op, install_router

_RECORDING = (_Mode.FAKE, _Mode.PROXY, _Mode.FUNCTIONAL)
"""The modes of tracers. Under other dispatch modes, which observe or replace torch's ops, ops run as in eager code."""


class _Router:
    """Implements `hal.core.op.Router`."""

    def transformed(self, op: Op[Any, Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        if torch._C._are_functorch_transforms_active():
            return op.reference if dispatch.runs_reference(op) else lower(op)
        if any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDING):
            return lower(op)
        if forward_ad._current_level >= 0:
            values = (*args, *kwargs.values())
            if dispatch.runs_reference(op) and any(map(has_tangent, tensors(values))):
                return op.reference
            refuse_tangents(op, values)
        return None

    def unreal(self, op: Op[Any, Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        if torch._C._get_tracing_state() is not None:
            return lower(op)
        # Only the first tensor of a list is examined, because a list may be long.
        firsts = [v[0] if isinstance(v, (list, tuple)) and v else v for v in (*args, *kwargs.values())]
        given = [t for t in firsts if isinstance(t, Tensor)]
        for t in given:
            if isinstance(t, FakeTensor):  # its mode has ended, or it would have been found there
                return functools.partial(_in_mode, t.fake_mode, lower(op))
            if isinstance(t, FunctionalTensor):
                return lower(op)
        # A real tensor among those that only describe one is on the wrong device. Tensors of a subclass that is built
        # on a meta tensor do have values.
        described = given and all(t.is_meta and type(t) in (Tensor, torch.nn.Parameter) for t in given)
        return lower(op) if described else None

    def lowered(self, op: Op[Any, Any]) -> Lowered:
        return lower(op)


def _in_mode(mode: FakeTensorMode, lowered: Lowered, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a lowered op on fake tensors. Inside of their mode, the tensors that it makes itself are fake, too."""
    with mode:
        return lowered(*args, **kwargs)


install_router(_Router())
