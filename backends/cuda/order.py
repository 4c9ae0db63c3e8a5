"""In which order attention's implementations are tried, by device.

An entry is a measurement (`make gpu` writes the report that it comes from); a device that nobody has measured gets the
default, which is an estimate, with cuDNN before it for training where torch prefers cuDNN, which is torch's judgement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

import hal

DEFAULT = ("cuda/flash", "cuda/cudnn", "cuda/sdpa", "cuda/flex", "cuda/unfused")
"""Not measured yet, on any device: windows and GQA without a bias first, float32 and masks next, everything last."""

MEASURED: dict[str, tuple[str, ...]] = {}
"""Device name as torch reports it -> ids, fastest first."""

TRAINING = "cuda/cudnn-training"
"""cuda/cudnn, for calls with gradients enabled. Without them lengths vary, as prompts' do, and cuDNN makes a plan for
each that is new, which takes it tens of milliseconds."""


def torch_prefers_cudnn(capability: tuple[int, int], version: int | None) -> bool:
    """As torch does for scaled_dot_product_attention (check_prefer_cudnn_attention in sdp_utils.cpp).

    version: cuDNN's, 9.15.1 as 91501; None: there is none.
    """
    return capability in ((9, 0), (10, 0)) and version is not None and version > 91500


def for_training(impl: hal.Impl) -> hal.Impl:
    """cuda/cudnn as TRAINING."""

    def why_not(*args: object, **kwargs: object) -> Sequence[str]:
        if not torch.is_grad_enabled():
            return ["gradients are disabled, as for generation (cudnn makes a plan for every length)"]
        return impl.why_not(*args, **kwargs)

    return dataclasses.replace(impl, id=TRAINING, why_not=why_not)


def ordered(impls: Sequence[hal.Impl], device_name: str, prefers_cudnn: bool = False) -> list[hal.Impl]:
    """Attention's implementations in the order for this device. prefers_cudnn: see torch_prefers_cudnn."""
    order = order_for(device_name)
    found = sorted(impls, key=lambda i: order.index(i.id))
    if device_name in MEASURED or not prefers_cudnn:
        return found
    return [*(for_training(i) for i in found if i.id == "cuda/cudnn"), *found]


def order_for(device_name: str) -> tuple[str, ...]:
    """The ids in the order for this device."""
    return MEASURED.get(device_name, DEFAULT)


def source_for(device_name: str, prefers_cudnn: bool = False) -> str:
    """Where the order for this device comes from, for `hal why`."""
    if device_name in MEASURED:
        return f"measured on {device_name}"
    if prefers_cudnn:
        return f"torch's preference of cudnn, then an estimate; {device_name} was not measured (`make gpu` does)"
    return f"an estimate; {device_name} was not measured (`make gpu` does)"
