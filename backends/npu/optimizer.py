"""adamw (npu_apply_adam_w), l2norm and unscale_and_check.

npu_apply_adam_w multiplies the powers of beta it is given by beta once more, so it is given beta ** (step - 1);
megatron_npu passed beta ** step until 2023-12-15, which shrinks the first steps (the first one by a quarter).
In saturation mode (older chips; INF_NAN_MODE_ENABLE=0 with INF_NAN_MODE_FORCE_DISABLE=1 on others) an overflow leaves
the largest number instead of inf, and the device's overflow flag is what unscale_and_check reports and lowers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ops

from .device import Npu
from .tensors import reasons


def beta_powers(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """The powers of beta that npu_apply_adam_w wants in the step of this number (from 1)."""
    return beta1 ** (step - 1), beta2 ** (step - 1)


def _why_not_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    model_params: Sequence[Tensor] | None = None,
) -> Sequence[str]:
    if not all(t.is_contiguous() for t in (*params, *exp_avgs, *exp_avg_sqs)):
        return ["a parameter or moment that is not contiguous (npu_apply_adam_w updates it in place)"]
    return reasons(*params, *grads, *(model_params or ()))


_FLOAT32_SCALARS = "npu_apply_adam_w takes its scalars in float32, where 1 - beta2 is off by 1e-5 for beta2 = 0.999"


@Npu.impl(ops.adamw, id="npu/apply_adam_w", why_not=_why_not_adamw, waivers={torch.float32: (7.0, _FLOAT32_SCALARS)})
def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    model_params: Sequence[Tensor] | None = None,
) -> None:
    powers = beta_powers(beta1, beta2, step)
    numbers = (lr, weight_decay, beta1, beta2, eps)
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs):
        if p.numel():
            g = g.contiguous().to(p.dtype)
            g = g if grad_scale == 1.0 else g * grad_scale
            torch.ops.npu.npu_apply_adam_w.out(*powers, *numbers, g, None, False, False, out=[p, m, v])
    for p, copy in zip(params, model_params or ()):
        copy.copy_(p)


def _why_not_l2norm(tensors: Sequence[Tensor]) -> Sequence[str]:
    return reasons(*tensors)


@Npu.impl(ops.l2norm, id="npu/torch", why_not=_why_not_l2norm)
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    return ops.l2norm.reference(tensors)


def _why_not_unscale(grads: Sequence[Tensor], inv_scale: float) -> Sequence[str]:
    return reasons(*grads)


@Npu.impl(ops.unscale_and_check, id="npu/torch", why_not=_why_not_unscale)
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    found = ops.unscale_and_check.reference(grads, inv_scale)
    return found if torch.npu.utils.is_support_inf_nan() else torch.maximum(found, _overflow_since_last_asked(found))


def _overflow_since_last_asked(like: Tensor) -> Tensor:
    """1.0 if any operator of this device has overflowed; lowers the flag. For saturation mode, which leaves no inf."""
    status = torch.ops.npu.npu_get_float_status(like.new_zeros(8))
    flag = (status[0] != 0).to(torch.float32)
    torch.ops.npu.npu_clear_float_status(like.new_zeros(8))
    return flag
