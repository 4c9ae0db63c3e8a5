"""Maps HAL's parameter names to megatron-core's and back.

Both models have the same matrices in the same order (QKV rows per query group [queries, key, value], gated MLPs
[gate; up] in each tensor-parallel shard), so that most parameters are mapped by name alone. Three things differ:

- HAL numbers layers in the full model, a pipeline stage of megatron-core from 0.
- Transformer Engine's layers keep a norm inside the linear layer that follows it.
- HAL stacks the experts' matrices [e, out, in]. megatron-core has one matrix per expert (`local_experts.0.linear_fc1`,
  or `linear_fc1.weight0` in Transformer Engine), or one of all experts (`weight1` [in, e*out], `weight2` [e*in, out]).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from hal import HalError

from ...gpt.model import OUTPUT_LAYER, POSITION_EMBEDDING, WORD_EMBEDDING

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_INPUT_NORM, _MLP_NORM = "input_layernorm", "pre_mlp_layernorm"
_FUSED = {
    _INPUT_NORM: "self_attention.linear_qkv.layer_norm_",
    _MLP_NORM: "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj.layer_norm_",
}
_UNFUSED = {f"{fused}{kind}": f"{name}.{kind}" for name, fused in _FUSED.items() for kind in ("weight", "bias")}
_OUTSIDE = {
    WORD_EMBEDDING,
    POSITION_EMBEDDING,
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    OUTPUT_LAYER,
}
_LATENT, _ROUTER = "self_attention.linear_kv_up_proj.weight", "mlp.router.weight"
_WITH_BIAS = (
    *_FUSED,
    *(f"self_attention.{name}" for name in ("linear_qkv", "linear_proj", "k_layernorm")),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
_WITHOUT_BIAS = (
    *(f"self_attention.linear_{name}_proj" for name in ("q", "q_down", "q_up", "kv_down", "kv_up")),
    *(f"mlp.{kind}.linear_fc{n}" for kind in ("experts", "shared_experts") for n in (1, 2)),
)
_INSIDE = {
    *(f"{name}.{kind}" for name in _WITH_BIAS for kind in ("weight", "bias")),
    *(f"{name}.weight" for name in _WITHOUT_BIAS),
    *(_ROUTER, "mlp.router.expert_bias"),
}
_EXPERTS = re.compile(r"mlp\.experts\.linear_fc([12])\.weight")
_ALL_EXPERTS = re.compile(r"mlp\.experts\.experts\.linear_fc([12])\.weight")  # distributed checkpoints: [e, out, in]
_ONE_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<n>\d+)\.linear_fc(?P<fc>[12])\.weight"
    r"|linear_fc(?P<te_fc>[12])\.weight(?P<te_n>\d+))"
)
_GROUPED = re.compile(r"mlp\.experts\.weight([12])")
_LINEAR = re.compile(r"(.*\.linear_\w+)\.weight")


def to_megatron_core(
    tensors: Mapping[str, Tensor], *, first_layer: int = 0, transformer_engine: bool = False, grouped: bool = False
) -> dict[str, Tensor]:
    """A GPT's tensors under the names of megatron-core's GPTModel (views of them, except for grouped experts).

    first_layer: number of the first layer that the receiving pipeline stage holds. transformer_engine: the layers are
    Transformer Engine's instead of megatron-core's local ones. grouped: --moe-grouped-gemm.
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
        if transformer_engine and _is_fused(rest, *_kind(layer, tensors)):
            rest = _fused(rest)
        for rest_there, part in _experts_apart(rest, tensor, transformer_engine, grouped):
            renamed[f"decoder.layers.{layer - first_layer}.{rest_there}"] = part
    return renamed


def from_megatron_core(
    tensors: Mapping[str, Tensor | None], *, first_layer: int = 0, experts: int | None = None
) -> dict[str, Tensor]:
    """The tensors of a megatron-core GPTModel (local or Transformer Engine layers) under HAL's names.

    first_layer: number of the first layer that the stage holds. experts: number of the experts that the rank holds, for
    models with --moe-grouped-gemm. Entries named `_extra_state` have no parameters and are skipped. Raises HalError for
    a parameter that HAL's model does not have.
    """
    renamed: dict[str, Tensor] = {}
    apart: dict[str, dict[int, Tensor]] = {}
    for name, tensor in parameters(tensors).items():
        match = _LAYER.fullmatch(name)
        if match is None:
            _split(name)
            renamed[name] = tensor
            continue
        prefix, rest = f"decoder.layers.{int(match[1]) + first_layer}.", _UNFUSED.get(match[2], match[2])
        if one := _ONE_EXPERT.fullmatch(rest):
            number, layer = one["n"] or one["te_n"], one["fc"] or one["te_fc"]
            apart.setdefault(f"{prefix}mlp.experts.linear_fc{layer}.weight", {})[int(number)] = tensor
        elif grouped := _GROUPED.fullmatch(rest):
            renamed[f"{prefix}mlp.experts.linear_fc{grouped[1]}.weight"] = _ungrouped(name, tensor, grouped[1], experts)
        else:
            if whole := _ALL_EXPERTS.fullmatch(rest):
                rest = f"mlp.experts.linear_fc{whole[1]}.weight"
            _split(prefix + rest)
            renamed[prefix + rest] = tensor
    for name, parts in apart.items():
        missing = sorted(set(range(len(parts))) - set(parts))
        if missing:
            raise HalError(f"{name}: experts {missing} are missing; those found are numbered up to {max(parts)}")
        renamed[name] = torch.stack([parts[n] for n in range(len(parts))])
    return renamed


def to_distributed(tensors: Mapping[str, Tensor], *, stacked: bool = True) -> dict[str, Tensor]:
    """A full model in the form of megatron-core's distributed checkpoints.

    stacked: the tensors of all layers are stacked along a new first dimension as `decoder.layers.<rest>`; else each
    layer has its own, as megatron-core stores models whose layers differ. A norm for which local layers and Transformer
    Engine's look under different names is written under both.
    Raises HalError for a parameter that megatron-core's model does not have, and for missing layers.
    """
    renamed = {}
    for name, tensor in tensors.items():
        layer, rest = _split(name)
        if layer is None:
            renamed[name] = tensor
            continue
        latent, experts = _kind(layer, tensors)
        by_local = not latent and rest.rpartition(".")[0] in (_INPUT_NORM, _MLP_NORM)
        for fused in {by_local, _is_fused(rest, latent, experts)}:
            there = _fused(rest) if fused else _EXPERTS.sub(r"mlp.experts.experts.linear_fc\1.weight", rest)
            renamed[f"decoder.layers.{layer}.{there}"] = tensor
    return _stack_layers(renamed) if stacked else renamed


def unstack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layers of a distributed checkpoint, each by itself; those that are not stacked are kept as they are."""
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


def extra_states(distributed: Mapping[str, Tensor]) -> Iterator[str]:
    """The keys of the states that megatron-core expects beside the linear layers of a distributed checkpoint."""
    for name, tensor in distributed.items():
        match = _LINEAR.fullmatch(name)
        if match is None:
            continue
        split = [] if _LAYER.fullmatch(name) else [tensor.shape[0]]
        if ".experts.experts." in name:
            split.append(tensor.shape[len(split)])
        split = split or [1]
        for at in torch.cartesian_prod(*map(torch.arange, split)).reshape(-1, len(split)).tolist():
            yield f"{match[1]}._extra_state/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, split))}"


def parameters(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The entries of a state dict that are parameters or buffers, and not the state of a module of another kind."""
    return {n: t for n, t in tensors.items() if t is not None and "_extra_state" not in n.rsplit(".", 1)[-1]}


def _kind(layer: int, names: Collection[str]) -> tuple[bool, bool]:
    """Whether a layer has latent attention, and whether it has experts."""
    return f"decoder.layers.{layer}.{_LATENT}" in names, f"decoder.layers.{layer}.{_ROUTER}" in names


def _is_fused(rest: str, latent: bool, experts: bool) -> bool:
    """Whether Transformer Engine's layers keep this norm inside the next linear layer."""
    module = rest.rpartition(".")[0]
    if module in (_INPUT_NORM, _MLP_NORM):
        return not latent if module == _INPUT_NORM else not experts
    return latent and module in _FUSED


def _fused(rest: str) -> str:
    module, _, kind = rest.rpartition(".")
    return f"{_FUSED[module]}{kind}"


def _experts_apart(rest: str, tensor: Tensor, transformer_engine: bool, grouped: bool) -> Iterator[tuple[str, Tensor]]:
    """megatron-core's tensors, by the rest of their names, of one of HAL's."""
    match = _EXPERTS.fullmatch(rest)
    if match is None:
        yield rest, tensor
    elif grouped and not transformer_engine:
        transposed = tensor.transpose(1, 2)  # [e, in, out]
        yield (
            f"mlp.experts.weight{match[1]}",
            transposed.reshape((tensor.shape[2], -1) if match[1] == "1" else (-1, tensor.shape[1])),
        )
    else:
        for n, part in enumerate(tensor):
            name = f"linear_fc{match[1]}.weight{n}" if grouped else f"local_experts.{n}.linear_fc{match[1]}.weight"
            yield f"mlp.experts.{name}", part


def _ungrouped(name: str, tensor: Tensor, layer: str, experts: int | None) -> Tensor:
    """[e, out, in] of a matrix of all experts. megatron-core computes with its elements as [e, in, out]."""
    if experts is None or tensor.dim() != 2 or tensor.numel() % max(experts, 1):
        raise HalError(f"{name} of shape {tuple(tensor.shape)} is not divisible into the {experts} experts of the rank")
    h = tensor.shape[0] if layer == "1" else tensor.shape[1]
    return (tensor.reshape(experts, h, -1) if layer == "1" else tensor.reshape(experts, -1, h)).transpose(1, 2)


def _stack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def _split(name: str) -> tuple[int | None, str]:
    """(layer or None, the rest of the name). Raises HalError for a parameter that is not in both models."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _INSIDE:
        return int(match[1]), match[2]
    if name in _OUTSIDE:
        return None, name
    raise HalError(
        f"{name}: only parameters that a GPT has in both HAL and megatron-core can be converted (no sandwich norm, no "
        "biases of experts, no gate of the shared expert, no multi-token prediction)"
    )
