"""Megatron-LM's checkpoints of one file per rank: `mp_rank_TT[_PPP]/model_optim_rng.pt`, of any layout, both ways.

Read with today's names or those of before megatron-core, and with every order the QKV rows ever had; written with
today's. Files are read by torch's weights_only unpickler: what else they hold is not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import LATEST, RELEASE, folder_of, tracked
from ..files import publish_folder, write_text
from ..layers import Shard
from ..unpickle import load_state
from .layout import reorder_legacy_qkv
from .megatron_args import args_of, options_of, saved_args, tokenizer_of
from .megatron_core import from_megatron_core, to_megatron_core
from .weights import OUTPUT, WORD, ConversionError, Weights, common_dtype, require

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_FILE = "model_optim_rng.pt"
_LAYER = re.compile(r"(?:encoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OLD = {
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
    at = tracked(root)
    folder = root if at is None else folder_of(root, at)
    return folder if any(_RANK.fullmatch(p.name) for p in folder.glob("mp_rank_*")) else None


def read(root: Path, *, vocabulary: int | None = None) -> Weights:
    """The model of a checkpoint. vocabulary: how many rows of the embedding are no padding (default: all).

    Raises ConversionError for incomplete checkpoints and other models, UnsafeFile for files that hold more than data.
    """
    folder = find(root)
    require(folder is not None, f"{root} has no mp_rank_* folders")
    assert folder is not None
    states = _states(folder)
    args, iteration, version = saved_args(states[0, 0], folder / "mp_rank_00*" / _FILE)
    tp, pp = 1 + max(t for t, _ in states), 1 + max(p for _, p in states)
    for name, size in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        said = args.get(name, args.get("model_parallel_size") if name.startswith("tensor") else 1)
        require(said in (None, size), f"{folder} has the files of {size} ranks; its args say {name} = {said}")
    options = options_of(args)
    gated = bool(options.get("swiglu"))
    tensors: dict[str, Tensor] = {}
    for stage in range(pp):
        try:
            parts = [_stage(states[rank, stage], options, tp, stage, pp, version) for rank in range(tp)]
            names = [set(part) for part in parts]
            require(all(n == names[0] for n in names), f"{folder}: the ranks of stage {stage} hold different tensors")
            for name in parts[0]:
                tensors.setdefault(name, _whole([part[name] for part in parts], shard_of(name, gated)))
        except (RuntimeError, IndexError) as error:
            raise ConversionError(f"{folder}: a tensor does not have the shape that args ask for: {error}") from None
    if not options.get("untie_embeddings_and_output_weights"):
        tensors.pop(OUTPUT, None)  # the last stage's copy of the tied weight
    weights = Weights(options, common_dtype(tensors), tokenizer_of(args), iteration)
    weights.check()
    weights.cut(weights.vocabulary if vocabulary is None else vocabulary)
    return weights


def write(weights: Weights, root: Path, *, tp: int = 1, pp: int = 1, divisible_by: int = 128) -> Path:
    """A release in `root` for tp x pp ranks, with the vocabulary padded as Megatron pads it: to a multiple of
    divisible_by x tp. Raises ConversionError for a layout that does not divide the model."""
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=divisible_by)
    assert config.num_query_groups and config.ffn_hidden_size
    for what, size, ranks in (
        ("query groups", config.num_query_groups, tp),
        ("MLP channels", config.ffn_hidden_size, tp),
        ("layers", config.num_layers, pp),
    ):
        require(size % ranks == 0, f"{ranks} ranks cannot share {size} {what}")
    rows = divisible_by * tp
    padded = -(-weights.vocabulary // rows) * rows
    whole, per = weights.padded(padded), config.num_layers // pp
    args = args_of(weights, config, tp=tp, pp=pp, padded=padded)
    with publish_folder(folder_of(root, RELEASE)) as new:
        for stage in range(pp):
            held = _of_stage(whole, stage, pp, per, tied=OUTPUT not in whole)
            for rank in range(tp):
                mine = {n: _share(t, shard_of(n, config.swiglu), rank, tp) for n, t in held.items()}
                folder = new / (f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
                folder.mkdir()
                named = to_megatron_core(mine, first_layer=stage * per)
                state = {"args": args, "checkpoint_version": 3.0, "iteration": weights.iteration, "model": named}
                torch.save(state, folder / _FILE)
    write_text(root / LATEST, f"{RELEASE}\n")
    return folder_of(root, RELEASE)


def shard_of(name: str, gated: bool) -> Shard | None:
    """How tensor-parallel ranks split a parameter; None: each has it whole."""
    if name in (WORD, OUTPUT) or "linear_qkv." in name:
        return Shard(0)
    if "linear_fc1." in name:
        return Shard(0, 2 if gated else 1)
    return Shard(1) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def _states(folder: Path) -> dict[tuple[int, int], Mapping[str, Any]]:
    """The files' contents by (tensor rank, pipeline rank)."""
    places = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        require(match is not None, f"{path} belongs to a layout with experts, which HAL's model has not")
        assert match is not None
        places[int(match[1]), int(match[2] or 0)] = path / _FILE
    tp, pp = 1 + max(t for t, _ in places), 1 + max(p for _, p in places)
    missing = [(t, p) for t in range(tp) for p in range(pp) if (t, p) not in places or not places[t, p].is_file()]
    require(not missing, f"{folder} lacks the files of (tensor, pipeline) ranks {missing[:4]}")
    found = {at: load_state(path) for at, path in places.items()}
    for at, state in found.items():
        model = isinstance(state, dict) and state.get("model", state.get("model0"))
        require(isinstance(model, Mapping), f"{places[at]} holds no model")
    return found


def _stage(
    state: Mapping[str, Any], options: Mapping[str, Any], tp: int, stage: int, pp: int, version: float
) -> dict[str, Tensor]:
    """One rank's tensors under HAL's names."""
    chunks = [state["model"]] if "model" in state else [state[f"model{n}"] for n in range(_count(state))]
    layers = options["num_layers"] // (pp * len(chunks))
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        flat = _flat(chunk)
        if any(name.startswith("language_model.") for name in flat):
            flat = _renamed(flat, options, tp, version)
        found.update(from_megatron_core(flat, first_layer=(number * pp + stage) * layers))
    for name, tensor in found.items():
        good = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        # A view may repeat what is stored without end.
        good = good and tensor.nbytes <= tensor.untyped_storage().nbytes()
        require(good, f"{name} is no tensor, or none with all its numbers")
    return found


def _count(state: Mapping[str, Any]) -> int:
    return next(n for n in range(len(state) + 1) if f"model{n}" not in state)


def _flat(tree: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    require(isinstance(tree, Mapping) and depth < 10, "the model is no dictionary of tensors")
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}.", depth + 1))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _renamed(flat: Mapping[str, Any], options: Mapping[str, Any], tp: int, version: float) -> dict[str, Any]:
    """Names of before megatron-core as today's."""
    heads = options["num_attention_heads"] // tp
    head = options.get("kv_channels") or options["hidden_size"] // options["num_attention_heads"]
    found = {}
    for name, tensor in flat.items():
        short = name.removeprefix("language_model.")
        match = _LAYER.fullmatch(short)
        if match and match[2] in _OLD:
            if "query_key_value" in match[2]:
                require(isinstance(tensor, Tensor), f"{name} is no tensor")
                tensor = reorder_legacy_qkv(tensor, heads, head, version)
            found[f"decoder.layers.{match[1]}.{_OLD[match[2]]}.{match[3]}"] = tensor
        elif match_final := re.fullmatch(r"(?:encoder|transformer)\.final_(?:layer)?norm\.(weight|bias)", short):
            found[f"decoder.final_layernorm.{match_final[1]}"] = tensor
        elif short.startswith("embedding.") or short == OUTPUT:
            found[short] = tensor
        elif not short.startswith(("word_embeddings_for_head.", "rotary_pos_emb.")):
            raise ConversionError(f"{name}: HAL's GPT has no such parameter")
    return found


def _whole(parts: list[Tensor], shard: Shard | None) -> Tensor:
    if shard is None or len(parts) == 1:
        return parts[0]
    blocks = [part.chunk(shard.parts, shard.dim) for part in parts]
    return torch.cat([block[n] for n in range(shard.parts) for block in blocks], shard.dim)


def _share(whole: Tensor, shard: Shard | None, rank: int, size: int) -> Tensor:
    return (whole if shard is None else shard.slice(whole, rank, size)).clone()


def _of_stage(whole: Mapping[str, Tensor], stage: int, pp: int, per: int, *, tied: bool) -> dict[str, Tensor]:
    """The tensors of a pipeline stage; the last has a copy of a tied embedding under the output layer's name."""
    layers = range(stage * per, stage * per + per)
    found = {}
    for name, tensor in whole.items():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)
        place = int(match[1]) in layers if match else (stage == 0 if name.startswith("embedding.") else stage == pp - 1)
        if place:
            found[name] = tensor
    if tied and pp > 1 and stage == pp - 1:
        found[OUTPUT] = whole[WORD]
    return found
