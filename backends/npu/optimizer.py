"""adamw (HAL's kernel over all tensors, else npu_apply_adam_w for each) and unscale_and_check.

npu_apply_adam_w multiplies the given powers of beta by beta once more, so it gets beta ** (step - 1); megatron_npu
passed beta ** step until 2023-12-15, which makes the first steps smaller (the first one by a quarter). In saturation
mode (older chips; INF_NAN_MODE_ENABLE=0 with INF_NAN_MODE_FORCE_DISABLE=1 on others) an overflow gives the largest
finite number instead of inf. unscale_and_check then reports the device's overflow flag and clears it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hal import Call, ops
from hal.backend_tools import (
    AdamWMember,
    AdamWScalars,
    adamw_members,
    adamw_scalars,
    adamw_written,
    in_place_reasons,
    with_signature_of,
)

from . import kernels
from .device import Npu
from .random import no_kernel
from .tensors import reasons, refuses

Tensors = Sequence[Tensor]


# The kernel reads clip_factor, so that the host does not wait for the norm from which it is computed.
_members = partial(adamw_members, read=False)
_scalars = partial(adamw_scalars, read=False)


def _why_not_kernel(call: Call) -> Sequence[str]:
    copies = call.model_params or ()
    return [*in_place_reasons(adamw_written(call)), *reasons(*call.params, *call.grads, *copies), *no_kernel()]


@Npu.impl(ops.adamw, id="npu/adamw", why_not=_why_not_kernel)
@with_signature_of(ops.adamw, members=_members, scalars=_scalars)
def adamw_kernel(members: Sequence[AdamWMember], scalars: AdamWScalars, clip_factor: Tensor | None) -> None:
    kernels.adamw(members, scalars, clip_factor)


def beta_powers(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """The powers of beta to pass to npu_apply_adam_w in the step with this number (from 1)."""
    return beta1 ** (step - 1), beta2 ** (step - 1)


def _why_not_adamw(call: Call) -> Sequence[str]:
    if not all(t.is_contiguous() for t in (*call.params, *call.exp_avgs, *call.exp_avg_sqs)):
        return ["a parameter or moment that is not contiguous (npu_apply_adam_w updates it in place)"]
    return reasons(*call.params, *call.grads, *(call.model_params or ()))


_FLOAT32_SCALARS = "npu_apply_adam_w takes its scalars in float32, where 1 - beta2 is off by 1e-5 for beta2 = 0.999"


@Npu.impl(ops.adamw, id="npu/apply_adam_w", why_not=_why_not_adamw, waivers={torch.float32: (7.0, _FLOAT32_SCALARS)})
@with_signature_of(ops.adamw, members=adamw_members, scalars=adamw_scalars)
def adamw(members: Sequence[AdamWMember], scalars: AdamWScalars) -> None:
    s = scalars
    powers = beta_powers(s.beta1, s.beta2, s.step)
    numbers = (s.lr, s.weight_decay, s.beta1, s.beta2, s.eps)
    # The operator takes one parameter at a time and gradients of the parameter's dtype.
    for p, g, m, v, copy in members:
        if p.numel():
            g = g.contiguous().to(p.dtype)
            g = g if s.grad_scale == 1.0 else g * s.grad_scale
            torch.ops.npu.npu_apply_adam_w.out(*powers, *numbers, g, None, False, False, out=[p, m, v])
        if copy is not None:
            copy.copy_(p)


@Npu.impl(ops.unscale_and_check, id="npu/torch", why_not=refuses(ops.unscale_and_check, "grads"))
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    bad = ops.unscale_and_check.reference(grads, inv_scale)
    return bad if torch.npu.utils.is_support_inf_nan() else torch.maximum(bad, _take_overflow_flag(bad))


def _take_overflow_flag(like: Tensor) -> Tensor:
    """1.0 if an operator of this device has overflowed since the last call, else 0.0; clears the flag."""
    status = torch.ops.npu.npu_get_float_status(like.new_zeros(8))
    flag = (status[0] != 0).to(torch.float32)
    torch.ops.npu.npu_clear_float_status(like.new_zeros(8))
    return flag
