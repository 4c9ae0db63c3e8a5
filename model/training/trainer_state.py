"""The content of a training run's checkpoints, and the checks that decide whether a run can continue from one.

Tensors have Megatron's names and the coordinates of the full model; everything else is JSON. The content of a
checkpoint does not depend on the layout of the ranks that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal import Comm, HalError
from hal.mesh import Mesh

from ..checkpoint import reader
from ..checkpoint.reader import FP32
from ..checkpoint.sharded_tensor import LocalShard, shard_of_rank
from ..config import linear_attention
from ..config.experts import layer_pattern
from ..config.schema import Config, ConfigError
from ..gpt.model import GPT, OUTPUT_LAYER, WORD_EMBEDDING
from .loss_scaler import LossScaler
from .optimizer import Optimizer, local

MOMENTS = "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."
"""Prefixes of the names of AdamW's moments."""


class ModelState:
    """The weights and the optimizer's state of this rank's stages `models`, by the names that checkpoints use."""

    def __init__(self, config: Config, models: Sequence[GPT], optimizer: Optimizer, mesh: Mesh) -> None:
        self.config, self.models, self.optimizer, self.world = config, models, optimizer, mesh.world
        self._parallel, self._replica = models[0].parallel, mesh.comm("dp", "cp").rank
        self._expert_replica = mesh.at["edp"]
        # The biases of experts, which are not trained; every rank of a pipeline stage has the same.
        self._buffers = {name: buffer for model in models for name, buffer in model.named_buffers()}
        self._owns_buffers = not (mesh.at["tp"] or mesh.at["cp"] or mesh.at["dp"])
        self._shards = {name: shard for model in models for name, shard in model.shards.items()}

    def tensors(self, *, replicas: bool = False) -> dict[str, LocalShard]:
        """This rank's part of every tensor of a checkpoint, sharing memory with the run where dtypes agree.

        Each element is returned by exactly one rank; with `replicas`, each rank returns everything that it holds. The
        last stage's copy of a tied weight has the name of the weight, which the first stage writes.
        """
        optimizer, dtype = self.optimizer, self.config.params_dtype
        # Parameters that fully_shard holds in float32 are stored in the dtype in which the model computes.
        values: dict[str, Mapping[str, Tensor]] = {"": {n: local(p).to(dtype) for n, p in optimizer.model.items()}}
        values.update(zip(MOMENTS, (optimizer.exp_avg, optimizer.exp_avg_sq)))
        if dtype != torch.float32:
            values[FP32] = optimizer.main
        names: dict[str, str] = {}
        for name in optimizer.model:
            stored = self.models[0].stored_name(name)
            # One rank may hold both ends of the pipeline; `load` then fills the second copy from the first.
            second_copy = stored != name and stored in optimizer.model
            if (replicas or name in optimizer.owned) and not second_copy:
                names[stored] = name
        shards = {
            prefix + stored: self._local_shard(name, tensors[name])
            for prefix, tensors in values.items()
            for stored, name in names.items()
        }
        if replicas or self._owns_buffers:
            shards |= {n: shard_of_rank(b, b, None, self._parallel, 0) for n, b in self._buffers.items()}
        return shards

    def _local_shard(self, name: str, values: Tensor) -> LocalShard:
        shard, replicas = self._shards.get(name), (self._replica, self._expert_replica)
        return shard_of_rank(self.optimizer.model[name], values, shard, self._parallel, *replicas)

    def load(self, folder: Path, *, moments: bool) -> None:
        """Fills the weights and, with `moments`, the optimizer from a checkpoint's folder."""
        optimizer, tensors = self.optimizer, self.tensors(replicas=True)
        reader.load_tensors(folder, reader.sources(tensors, folder, moments=moments))
        if self.models[0].tied and {WORD_EMBEDDING, OUTPUT_LAYER} <= optimizer.model.keys():
            for values in (optimizer.main, optimizer.exp_avg, optimizer.exp_avg_sq):
                values[OUTPUT_LAYER].copy_(values[WORD_EMBEDDING])
        for name, parameter in optimizer.model.items():
            local(parameter).copy_(optimizer.main[name])

    @torch.no_grad()
    def gather(self, layers: Sequence[int], device: torch.device) -> GPT:
        """A model of these `layers` with the weights of all ranks, on every rank; on one rank, the run's own model."""
        if self.world.size == 1:
            return self.models[0]
        model, shards = GPT(self.config, device, layers=layers), self.tensors()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            part = torch.zeros_like(tensor, dtype=torch.float32)
            if name in shards:
                shards[name].copy_to(part)
            tensor.copy_(self.world.all_reduce(part))
        return model


def options(config: Config) -> dict[str, Any]:
    """The config's options as JSON values."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name != "given"}


def read_checkpoint(root: Path, config: Config, world: Comm) -> tuple[Path, dict[str, Any], bool]:
    """(folder, state, whether to load only the weights) of the latest checkpoint of `root`, read by all ranks of
    `world` together. Raises HalError, on every rank, unless this run can continue from it."""
    folder, state = reader.read_state(root, world)
    weights_only = config.finetune or folder.name == reader.RELEASE
    if not weights_only:
        _require_progress(state, folder)
    require_same_model(state, config, folder, weights_only=weights_only)
    return folder, state, weights_only


def _require_progress(state: Mapping[str, Any], folder: Path) -> None:
    """Raises HalError unless a checkpoint's state has all values that training needs to continue."""
    scaler, rng = state.get("loss_scaler"), state.get("rng")
    numbers = {n: state.get(n) for n in ("consumed_samples", "skipped", "optimizer_steps")}
    # The reader requires an iteration; checkpoints of older versions lack the others.
    optional = ("iteration", "scheduled_samples", "bad_batches")
    numbers |= {n: state[n] for n in optional if n in state}
    wrong = [n for n, value in numbers.items() if type(value) is not int or not 0 <= value < 1 << 63]
    if not (isinstance(rng, list) and len(rng) == 2 and all(type(n) is int for n in rng)):
        wrong.append("rng")
    known = {f.name for f in fields(LossScaler)}
    if not isinstance(scaler, dict) or any(
        n not in known or not isinstance(v, (int, float)) for n, v in scaler.items()
    ):
        wrong.append("loss_scaler")
    losses = state.get("rerun_losses", [])  # absent in older checkpoints
    if not isinstance(losses, list) or not all(type(x) in (int, float) and abs(x) < math.inf for x in losses):
        wrong.append("rerun_losses")
    if wrong:
        raise HalError(f"the checkpoint {folder}: its state has no {', '.join(wrong)}, or not as training writes it")


def architecture(config: Config) -> dict[str, Any]:
    """What determines the weights of a model and their function, by names of options; None for those without effect."""
    o = options(config)
    return {**_structure(o), **_function(o)}


def require_same_model(state: Mapping[str, Any], config: Config, folder: Path, *, weights_only: bool) -> None:
    """Raises ConfigError if the checkpoint's model differs from this run's in a way that names and shapes of this run's
    weights do not reveal: it has additional weights, or computes a different function of the same weights.

    weights_only: the function may differ.
    """
    saved_options, run_options = state.get("config"), options(config)
    if not isinstance(saved_options, dict):
        return

    def compared(o: Mapping[str, Any]) -> dict[str, Any]:
        return {**_structure(o), **({} if weights_only else _function(o))}

    saved = compared({**run_options, **saved_options})  # a checkpoint may be older than some of the options
    for name, value in compared(run_options).items():
        if saved[name] != value:
            otherwise = ", or --finetune to begin with its weights alone" if name in _function(run_options) else ""
            raise ConfigError(
                f"the checkpoint {folder} was made with {name.replace('_', '-')} {saved[name]}, this run has {value}; "
                f"give the model options it was saved with{otherwise}"
            )


def _structure(o: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a config that determine which weights exist, and their layout."""
    # Names contain layer numbers. A model without its last layers equals one with fewer layers, but gaps affect names.
    absent = sorted({int(n) for n in o["noop_layers"]} & set(range(o["num_layers"])))
    layers = [n for n in range(o["num_layers"]) if n not in absent]
    gapless = layers == list(range(len(layers)))
    names = [
        "num_attention_heads",
        "num_query_groups",
        "position_embedding_type",
        "normalization",
        "swiglu",
        "geglu",
        "multi_latent_attention",
    ]
    names += ["qk_layernorm", "untie_embeddings_and_output_weights", "use_sandwich_norm"]
    names += ["apply_layernorm_1p", "attention_output_gate"]
    biases = {n: o[n] or not o["disable_bias_linear"] for n in ("add_qkv_bias", "add_dense_bias", "add_mlp_bias")}
    return {
        "num_layers": str(len(layers)) if gapless else f"{o['num_layers']} without {', '.join(map(str, absent))}",
        **{name: o[name] for name in names},
        "disable_bias_linear": not all(biases.values()),
        **biases,
        **_experts(
            o, ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_enable_expert_bias")
        ),
        **{name: o[name] if o["experimental_attention_variant"] else None for name in _LINEAR},
        "num_experts": o["num_experts"],
        "moe_layer_freq": o["num_experts"] and _pattern(o),
    }


_LINEAR = ("experimental_attention_variant", *linear_attention.OPTIONS.split())


def _pattern(o: Mapping[str, Any]) -> str:
    """The layers with experts, in one form for all that --moe-layer-freq accepts."""
    return "".join(str(int(experts)) for experts in layer_pattern(o["moe_layer_freq"], o["num_layers"]))


def _windows(frequency: str, layers: int) -> str | None:
    """The layers with a window, in one form for all that --window-attn-skip-freq accepts; None for all of them."""
    pattern = [entry != frequency.strip().isdigit() for entry in layer_pattern(frequency, layers, last=True)]
    return None if all(pattern) else str([*map(int, pattern)]).replace(" ", "")


def _without(frequency: str, layers: int) -> str | None:
    """The layers without rotary positions, as above; None for none of them."""
    pattern = layer_pattern(frequency, layers, last=True)
    return str([*map(int, pattern)]).replace(" ", "") if any(pattern) else None


def _experts(o: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The values of options that only a model with experts has."""
    return {name: o[name] if o["num_experts"] else None for name in names}


def _function(o: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a config that determine the function of the weights; None for options without effect."""
    rope = o["position_embedding_type"] == "rope" or o["multi_latent_attention"]  # as Config.rotates
    pre, n = o["pre_tokens"], o["num_layers"]
    pre, next_ = None if pre is None or pre >= o["seq_length"] else pre, min(0, o["next_tokens"] or 0)
    skips, windowed = o["window_attn_skip_freq"], (pre, next_) != (None, 0)
    return {
        "norm_epsilon": o["norm_epsilon"],
        **{name: o[name] if rope else None for name in _ROPE},
        "rope_scaling": o["rope_scaling_factor"] if rope and o["use_rope_scaling"] else None,
        "rope_type": o["rope_type"] if rope else None,
        **{name: o[name] if o["rope_type"] == "yarn" else None for name in _YARN},
        **{name: list(map(float, o[name])) if o["rope_type"] == "longrope" else None for name in _LONGROPE},
        **{name: o[name] if o["rope_type"] in ("yarn", "longrope") else None for name in _EXTENDED},
        "squared_relu": o["squared_relu"],
        "use_parallel_residual": o["use_parallel_residual"],
        "gelu_approximate": None if o["swiglu"] or o["squared_relu"] else o["gelu_approximate"],
        "pre_tokens": pre,
        "next_tokens": next_,
        "window_attn_skip_freq": _windows(skips, n) if skips and windowed else None,
        "no_rope_freq": _without(o["no_rope_freq"], n) if rope and o["no_rope_freq"] else None,
        **{name: o[name] for name in _SCALES},
        **_experts(o, _ROUTING),
        "moe_router_topk_scaling_factor": o["num_experts"] and (o["moe_router_topk_scaling_factor"] or 1.0),
    }


_ROPE = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor")
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LONGROPE = ("short_factor", "long_factor")
_EXTENDED = ("rotary_scaling_factor", "original_max_position_embeddings")
_SCALES = (
    "softmax_scale",
    "attn_logit_softcapping",
    "embedding_multiplier_scale",
    "residual_multiplier",
    "output_multiplier_scale",
    "output_logit_softcapping",
)
_ROUTING = (
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)
