"""Reads and writes Megatron-LM's checkpoints of one file per rank, `mp_rank_TT[_PPP]/model_optim_rng.pt`.

Reads any layout, the parameter names before and since megatron-core, and all historical orders of the QKV rows. Writes
the current names and order. Files are read by torch's weights_only unpickler, which executes no code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.reader import LATEST, RELEASE, folder_of, tracked
from ...checkpoint.torch_archive import load_state
from ...common.atomic_files import publish_folder, write_text
from ...gpt.model import OUTPUT_LAYER, WORD_EMBEDDING
from ...parallel.tensor_sharding import Shard
from .megatron_args import args_of, options_of, saved_args, tokenizer_of
from .megatron_core import from_megatron_core, to_megatron_core
from .qkv_layout import reorder_legacy_qkv
from .weights import ConversionError, Weights, common_dtype, require

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_FILE = "model_optim_rng.pt"
_LAYER = re.compile(r"(?:encoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_LEGACY_NAMES = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "self_attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def find(root: Path) -> Path | None:
    """The folder with the `mp_rank_*` folders: `root` itself, or what its tracker file names. None if there is none."""
    iteration = tracked(root)
    folder = root if iteration is None else folder_of(root, iteration)
    return folder if any(_RANK.fullmatch(p.name) for p in folder.glob("mp_rank_*")) else None


def read(root: Path, *, vocabulary: int | None = None) -> Weights:
    """The model of a checkpoint. vocabulary: number of embedding rows without padding (default: all).

    Raises ConversionError for incomplete checkpoints and other models, UnsafeFile for files that reference code.
    """
    folder = find(root)
    if folder is None:
        raise ConversionError(f"{root} has no mp_rank_* folders")
    states = _states(folder)
    args, iteration, version = saved_args(states[0, 0], folder / "mp_rank_00*" / _FILE)
    tp, pp = 1 + max(t for t, _ in states), 1 + max(p for _, p in states)
    for name, size in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        stored = args.get(name, args.get("model_parallel_size") if name.startswith("tensor") else 1)
        require(stored in (None, size), f"{folder} has the files of {size} ranks, but its args have {name} = {stored}")
    options = options_of(args)
    gated = bool(options.get("swiglu") or options.get("geglu"))
    tensors: dict[str, Tensor] = {}
    for stage in range(pp):
        try:
            parts = [_stage(states[rank, stage], options, tp, stage, pp, version) for rank in range(tp)]
            names = [set(part) for part in parts]
            require(all(n == names[0] for n in names), f"{folder}: the ranks of stage {stage} have different tensors")
            for name in parts[0]:
                tensors.setdefault(name, _whole([part[name] for part in parts], shard_of(name, gated)))
        except (RuntimeError, IndexError) as error:
            raise ConversionError(f"{folder}: a tensor does not have the shape that args require: {error}") from None
    if options.get("geglu"):  # megatron_npu's gate is the second half, HAL's the first
        for name in [n for n in tensors if "linear_fc1." in n]:
            tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])
    if not options.get("untie_embeddings_and_output_weights"):
        tensors.pop(OUTPUT_LAYER, None)  # the last stage's copy of the tied weight
    weights = Weights(options, common_dtype(tensors), tokenizer_of(args), iteration)
    weights.check()
    weights.cut(weights.vocabulary if vocabulary is None else vocabulary)
    return weights


def write(weights: Weights, root: Path, *, tp: int = 1, pp: int = 1, divisible_by: int = 128) -> Path:
    """Writes a release to `root` for tp x pp ranks, with the vocabulary padded by Megatron's rule to a multiple of
    divisible_by x tp. Raises ConversionError if the sizes of the model are not divisible by those of the layout."""
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=divisible_by)
    for what, size, ranks in (
        ("query groups", config.num_query_groups, tp),
        ("MLP channels", config.ffn_hidden_size, tp),
        ("layers", config.num_layers, pp),
    ):
        require(size % ranks == 0, f"{size} {what} are not divisible by {ranks} ranks")
    rows = divisible_by * tp
    padded = -(-weights.vocabulary // rows) * rows
    tensors, per_stage = weights.padded(padded), config.num_layers // pp
    args = args_of(weights, config, tp=tp, pp=pp, padded=padded)
    with publish_folder(folder_of(root, RELEASE)) as new:
        for stage in range(pp):
            stage_tensors = _of_stage(tensors, stage, pp, per_stage, tied=OUTPUT_LAYER not in tensors)
            for rank in range(tp):
                shards = {n: _share(t, shard_of(n, config.swiglu), rank, tp) for n, t in stage_tensors.items()}
                folder = new / (f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
                folder.mkdir()
                model = to_megatron_core(shards, first_layer=stage * per_stage)
                state = {"args": args, "checkpoint_version": 3.0, "iteration": weights.iteration, "model": model}
                torch.save(state, folder / _FILE)
    write_text(root / LATEST, f"{RELEASE}\n")
    return folder_of(root, RELEASE)


def shard_of(name: str, gated: bool) -> Shard | None:
    """The sharding of a parameter over tensor-parallel ranks; None if it is replicated."""
    if name in (WORD_EMBEDDING, OUTPUT_LAYER) or "linear_qkv." in name:
        return Shard(0)
    if "linear_fc1." in name:
        return Shard(0, 2 if gated else 1)
    return Shard(1) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def _states(folder: Path) -> dict[tuple[int, int], Mapping[str, Any]]:
    """The contents of the files by (tensor rank, pipeline rank)."""
    paths = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match is None:
            raise ConversionError(
                f"{path} belongs to a layout with experts, which HAL does not convert from Megatron's checkpoints"
            )
        paths[int(match[1]), int(match[2] or 0)] = path / _FILE
    tp, pp = 1 + max(t for t, _ in paths), 1 + max(p for _, p in paths)
    missing = [(t, p) for t in range(tp) for p in range(pp) if (t, p) not in paths or not paths[t, p].is_file()]
    require(not missing, f"{folder} lacks the files of (tensor, pipeline) ranks {missing[:4]}")
    states = {ranks: load_state(path) for ranks, path in paths.items()}
    for ranks, state in states.items():
        model = isinstance(state, dict) and state.get("model", state.get("model0"))
        require(isinstance(model, Mapping), f"{paths[ranks]} contains no model")
    return states


def _stage(
    state: Mapping[str, Any], options: Mapping[str, Any], tp: int, stage: int, pp: int, version: float
) -> dict[str, Tensor]:
    """The tensors of one rank's file under HAL's names. A file has one model, or one per virtual pipeline stage."""
    chunks = [state["model"]] if "model" in state else [state[f"model{n}"] for n in range(_count(state))]
    layers = options["num_layers"] // (pp * len(chunks))
    tensors: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        flat = _flat(chunk)
        if any(name.startswith("language_model.") for name in flat):
            flat = _renamed(flat, options, tp, version)
        tensors.update(from_megatron_core(flat, first_layer=(number * pp + stage) * layers))
    for name, tensor in tensors.items():
        valid = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        # An expanded view can claim any size with a small storage.
        valid = valid and tensor.nbytes <= tensor.untyped_storage().nbytes()
        require(valid, f"{name} is not a dense tensor with all its elements stored")
    return tensors


def _count(state: Mapping[str, Any]) -> int:
    """The number of virtual pipeline stages in a file."""
    return next(n for n in range(len(state) + 1) if f"model{n}" not in state)


def _flat(tree: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    require(isinstance(tree, Mapping) and depth < 10, "the model is not a dictionary of tensors")
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}.", depth + 1))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _renamed(flat: Mapping[str, Any], options: Mapping[str, Any], tp: int, version: float) -> dict[str, Any]:
    """Renames parameters from the names before megatron-core to its own, and reorders QKV rows."""
    heads = options["num_attention_heads"] // tp
    head = options.get("kv_channels") or options["hidden_size"] // options["num_attention_heads"]
    renamed = {}
    for name, tensor in flat.items():
        short = name.removeprefix("language_model.")
        match = _LAYER.fullmatch(short)
        if match and match[2] in _LEGACY_NAMES:
            if "query_key_value" in match[2]:
                require(isinstance(tensor, Tensor), f"{name} is not a tensor")
                tensor = reorder_legacy_qkv(tensor, heads, head, version)
            renamed[f"decoder.layers.{match[1]}.{_LEGACY_NAMES[match[2]]}.{match[3]}"] = tensor
        elif match_final := re.fullmatch(r"(?:encoder|transformer)\.final_(?:layer)?norm\.(weight|bias)", short):
            renamed[f"decoder.final_layernorm.{match_final[1]}"] = tensor
        elif short.startswith("embedding.") or short == OUTPUT_LAYER:
            renamed[short] = tensor
        elif not short.startswith(("word_embeddings_for_head.", "rotary_pos_emb.")):
            raise ConversionError(f"{name}: HAL's GPT does not have this parameter")
    return renamed


def _whole(parts: list[Tensor], shard: Shard | None) -> Tensor:
    """The tensor of these shards. Each shard has `shard.parts` blocks (gate and up), which are joined separately."""
    if shard is None or len(parts) == 1:
        return parts[0]
    blocks = [part.chunk(shard.parts, shard.dim) for part in parts]
    return torch.cat([block[n] for n in range(shard.parts) for block in blocks], shard.dim)


def _share(whole: Tensor, shard: Shard | None, rank: int, size: int) -> Tensor:
    """A copy of the part of a full tensor that tensor-parallel rank `rank` of `size` has."""
    return (whole if shard is None else shard.slice(whole, rank, size)).clone()


def _of_stage(whole: Mapping[str, Tensor], stage: int, pp: int, per: int, *, tied: bool) -> dict[str, Tensor]:
    """The tensors of a pipeline stage; the last one has a copy of a tied embedding as its output layer."""
    layers = range(stage * per, stage * per + per)
    tensors = {}
    for name, tensor in whole.items():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)
        if match:
            belongs = int(match[1]) in layers
        else:
            belongs = stage == (0 if name.startswith("embedding.") else pp - 1)
        if belongs:
            tensors[name] = tensor
    if tied and pp > 1 and stage == pp - 1:
        tensors[OUTPUT_LAYER] = whole[WORD_EMBEDDING]
    return tensors
