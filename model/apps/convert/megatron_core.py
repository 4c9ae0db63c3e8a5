"""Maps HAL's parameter names to megatron-core's and back.

Both models have the same matrices in the same order (QKV rows per query group [queries, key, value], gated MLPs
[gate; up] in each tensor-parallel shard), so that full and sharded state dicts are mapped by name alone. megatron-core
numbers a pipeline stage's layers from 0, and with Transformer Engine it keeps a norm inside the linear layer that
follows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hal import HalError

from ...gpt.model import OUTPUT_LAYER, POSITION_EMBEDDING, WORD_EMBEDDING

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}
_UNFUSED = {fused: name for name, fused in _FUSED.items()}
_OUTSIDE = {
    WORD_EMBEDDING,
    POSITION_EMBEDDING,
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    OUTPUT_LAYER,
}
_INSIDE = {
    *_FUSED,
    *(f"self_attention.{layer}.{kind}" for layer in ("linear_qkv", "linear_proj") for kind in ("weight", "bias")),
    *(f"mlp.{layer}.{kind}" for layer in ("linear_fc1", "linear_fc2") for kind in ("weight", "bias")),
}


def to_megatron_core(
    tensors: Mapping[str, Tensor], *, first_layer: int = 0, fused_norms: bool = False
) -> dict[str, Tensor]:
    """A GPT's tensors under the names of megatron-core's GPTModel (the tensors themselves, not copies).

    first_layer: number of the first layer that the receiving pipeline stage holds. fused_norms: names of the
    Transformer Engine layers, and of every distributed checkpoint, instead of the local ones.
    Raises HalError for a parameter that megatron-core's model does not have.
    """
    renamed = {}
    for name, tensor in tensors.items():
        layer, rest = _split(name)
        if layer is None:
            renamed[name] = tensor
            continue
        if layer < first_layer:
            raise HalError(f"{name} is before the stage's first layer, {first_layer}")
        renamed[f"decoder.layers.{layer - first_layer}.{_FUSED.get(rest, rest) if fused_norms else rest}"] = tensor
    return renamed


def from_megatron_core(tensors: Mapping[str, Tensor | None], *, first_layer: int = 0) -> dict[str, Tensor]:
    """The tensors of a megatron-core GPTModel (local or Transformer Engine layers) under HAL's names.

    first_layer: number of the first layer that the stage holds. Entries named `_extra_state` have no parameters and are
    skipped. Raises HalError for a parameter that HAL's model does not have (experts, multi-latent attention, ...).
    """
    renamed = {}
    for name, tensor in tensors.items():
        if "_extra_state" in name.rsplit(".", 1)[-1] or tensor is None:
            continue
        match = _LAYER.fullmatch(name)
        if match:
            rest = _UNFUSED.get(match[2], match[2])
            name = f"decoder.layers.{int(match[1]) + first_layer}.{rest}"
        _split(name)
        renamed[name] = tensor
    return renamed


def stack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A full model in the form of megatron-core's distributed checkpoints: the tensors of all layers are stacked along
    a new first dimension as `decoder.layers.<rest>`, with `fused_norms` names. Raises HalError for missing layers."""
    stacked: dict[str, Tensor] = {}
    layers: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(match[2], {})[int(match[1])] = tensor
        else:
            stacked[name] = tensor
    count = 1 + max((max(numbers) for numbers in layers.values()), default=-1)
    for rest, numbers in layers.items():
        missing = sorted(set(range(count)) - set(numbers))
        if missing:
            raise HalError(f"{rest} is missing in layers {missing}; megatron-core stacks those of all {count} layers")
        stacked[f"decoder.layers.{rest}"] = torch.stack([numbers[n] for n in range(count)])
    return stacked


def unstack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of stack_layers; layers that are not stacked are kept as they are."""
    unstacked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers.") and not _LAYER.fullmatch(name):
            rest = name.removeprefix("decoder.layers.")
            if tensor.dim() < 2:
                raise HalError(
                    f"{name} has shape {tuple(tensor.shape)}, which is not a stack of the tensors of all layers"
                )
            unstacked.update({f"decoder.layers.{n}.{rest}": part for n, part in enumerate(tensor)})
        else:
            unstacked[name] = tensor
    return unstacked


def _split(name: str) -> tuple[int | None, str]:
    """(layer or None, the rest of the name). Raises HalError for a parameter that is not in both models."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _INSIDE:
        return int(match[1]), match[2]
    if name in _OUTSIDE:
        return None, name
    raise HalError(
        f"{name}: only the parameters that a dense GPT has in both HAL and megatron-core can be converted (no experts, "
        "no sandwich norm, no query/key norm, no multi-latent attention)"
    )
