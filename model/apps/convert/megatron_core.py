"""HAL's parameter names and megatron-core's, both ways.

The two models hold the same matrices in the same order (QKV rows per query group [queries, key, value], gated MLPs
[gate; up] in each tensor-parallel shard), so a whole state dict and a rank's share of one are mapped alike: by name.
What differs: megatron-core counts a pipeline stage's layers from 0, and with Transformer Engine keeps a norm inside the
linear layer that follows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hal import HalError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}
_APART = {fused: name for name, fused in _FUSED.items()}
_OUTSIDE = {
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "output_layer.weight",
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
    Raises HalError for a parameter that megatron-core's model has no place for.
    """
    found = {}
    for name, tensor in tensors.items():
        layer, rest = _split(name)
        if layer is None:
            found[name] = tensor
            continue
        if layer < first_layer:
            raise HalError(f"{name} lies before the stage's first layer, {first_layer}")
        found[f"decoder.layers.{layer - first_layer}.{_FUSED.get(rest, rest) if fused_norms else rest}"] = tensor
    return found


def from_megatron_core(tensors: Mapping[str, Tensor | None], *, first_layer: int = 0) -> dict[str, Tensor]:
    """The tensors of a megatron-core GPTModel (local or Transformer Engine layers) under HAL's names.

    first_layer: number of the first layer that the stage holds. Entries named `_extra_state` hold no parameters and are
    left out. Raises HalError for a parameter that HAL's model has no place for (experts, multi-latent attention, ...).
    """
    found = {}
    for name, tensor in tensors.items():
        if "_extra_state" in name.rsplit(".", 1)[-1] or tensor is None:
            continue
        match = _LAYER.fullmatch(name)
        if match:
            rest = _APART.get(match[2], match[2])
            name = f"decoder.layers.{int(match[1]) + first_layer}.{rest}"
        _split(name)
        found[name] = tensor
    return found


def stack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole model as megatron-core's distributed checkpoints have it: the layers' tensors stacked on a new first
    dimension under `decoder.layers.<rest>`. Takes and gives `fused_norms` names. Raises HalError for missing layers."""
    found, layers = {}, {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(match[2], {})[int(match[1])] = tensor
        else:
            found[name] = tensor
    count = 1 + max((max(numbers) for numbers in layers.values()), default=-1)
    for rest, numbers in layers.items():
        missing = sorted(set(range(count)) - set(numbers))
        if missing:
            raise HalError(f"{rest}: layers {missing} have none; megatron-core stacks those of all {count} layers")
        found[f"decoder.layers.{rest}"] = torch.stack([numbers[n] for n in range(count)])
    return found


def unstack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of stack_layers; layers that are already apart stay as they are."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers.") and not _LAYER.fullmatch(name):
            rest = name.removeprefix("decoder.layers.")
            if tensor.dim() < 2:
                raise HalError(f"{name} has shape {tuple(tensor.shape)}, which is no stack of the layers' tensors")
            found.update({f"decoder.layers.{n}.{rest}": part for n, part in enumerate(tensor)})
        else:
            found[name] = tensor
    return found


def _split(name: str) -> tuple[int | None, str]:
    """(layer or None, the rest of the name). Raises HalError for a name that one of the models does not have."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _INSIDE:
        return int(match[1]), match[2]
    if name in _OUTSIDE:
        return None, name
    raise HalError(
        f"{name}: only the parameters that a dense GPT has in both HAL and megatron-core can be converted (no experts, "
        "no sandwich norm, no query/key norm, no multi-latent attention)"
    )
