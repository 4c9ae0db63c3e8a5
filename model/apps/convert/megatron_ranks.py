"""Reads and writes Megatron-LM's checkpoints of one file per rank, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`.

TT, PPP and EEE are the tensor-, pipeline- and expert-parallel ranks. The files of different expert-parallel ranks have
different experts; each of them has all other parameters of its tensor and pipeline ranks.

Reads any layout, the parameter names before and since megatron-core, and all historical orders of the QKV rows. Writes
the current names and order. Files are read by torch's weights_only unpickler, which executes no code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.reader import LATEST, RELEASE, folder_of, tracked
from ...checkpoint.torch_archive import load_state
from ...common.atomic_files import publish_folder, write_text
from ...config.schema import Config
from ...gpt.model import OUTPUT_LAYER, WORD_EMBEDDING
from ...parallel.tensor_sharding import Shard
from .megatron_args import args_of, options_of, saved_args, tokenizer_of
from .megatron_core import from_megatron_core, parameters, to_megatron_core
from .qkv_layout import reorder_legacy_qkv
from .weights import ConversionError, Weights, common_dtype, require

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_FILE = "model_optim_rng.pt"
_LAYER = re.compile(r"(?:encoder|transformer)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OF_EXPERTS = ".mlp.experts."
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


@dataclass(frozen=True)
class _Checkpoint:
    """The files of a checkpoint by (tensor, pipeline, expert) rank, and the sizes of these dimensions.

    etp: the ranks that share each expert; rank t of the tensor dimension has part t % etp of it.
    """

    folder: Path
    files: Mapping[tuple[int, int, int], Mapping[str, Any]]
    args: Mapping[str, Any]
    tp: int
    pp: int
    ep: int
    etp: int
    iteration: int
    version: float


def read(root: Path, *, vocabulary: int | None = None) -> Weights:
    """The model of a checkpoint. vocabulary: number of embedding rows without padding (default: all).

    Raises ConversionError for incomplete checkpoints and other models, UnsafeFile for files that reference code.
    """
    folder = find(root)
    if folder is None:
        raise ConversionError(f"{root} has no mp_rank_* folders")
    checkpoint = _open(folder)
    options = options_of(checkpoint.args)
    tensors: dict[str, Tensor] = {}
    for stage in range(checkpoint.pp):
        try:
            tensors = {**_stage(checkpoint, stage, options), **tensors}
        except (RuntimeError, IndexError) as error:
            raise ConversionError(f"{folder}: a tensor does not have the shape that args require: {error}") from None
    if options.get("geglu"):  # megatron_npu's gate is the second half, HAL's the first
        for name in [n for n in tensors if "linear_fc1." in n]:
            tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])
    if not options.get("untie_embeddings_and_output_weights"):
        tensors.pop(OUTPUT_LAYER, None)  # the last stage's copy of the tied weight
    weights = Weights(options, common_dtype(tensors), tokenizer_of(checkpoint.args), checkpoint.iteration)
    weights.check()
    weights.cut(weights.vocabulary if vocabulary is None else vocabulary)
    return weights


def write(
    weights: Weights,
    root: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    divisible_by: int = 128,
    transformer_engine: bool = False,
    grouped: bool = False,
) -> Path:
    """Writes a release to `root` for tp x pp x ep ranks, with the vocabulary padded by Megatron's rule to a multiple of
    divisible_by x tp. Each expert is divided over the tp ranks, which is Megatron's default.

    transformer_engine, grouped: as for `to_megatron_core`. Raises ConversionError if the sizes of the model are not
    divisible by those of the layout.
    """
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=divisible_by)
    _require_divisible(config, tp, pp, ep, transformer_engine)
    rows = divisible_by * tp
    padded = -(-weights.vocabulary // rows) * rows
    tensors, per_stage = weights.padded(padded), config.num_layers // pp
    impl = "transformer_engine" if transformer_engine else "local"
    args = args_of(weights, config, padded=padded, tp=tp, pp=pp, ep=ep, transformer_impl=impl, grouped=grouped)
    with publish_folder(folder_of(root, RELEASE)) as new:
        for stage in range(pp):
            stage_tensors = _of_stage(tensors, stage, pp, per_stage, tied=OUTPUT_LAYER not in tensors)
            for rank in range(tp):
                shards = {
                    n: _share(t, shard_of(n, config.swiglu, whole_down=transformer_engine), rank, tp)
                    for n, t in stage_tensors.items()
                }
                for expert in range(ep):
                    own = {n: t.chunk(ep)[expert].clone() if _OF_EXPERTS in n else t for n, t in shards.items()}
                    model = to_megatron_core(
                        own, first_layer=stage * per_stage, transformer_engine=transformer_engine, grouped=grouped
                    )
                    state = {"args": args, "checkpoint_version": 3.0, "iteration": weights.iteration, "model": model}
                    suffixes = [f"_{n:03d}" for n, size in ((stage, pp), (expert, ep)) if size > 1]
                    folder = new / f"mp_rank_{rank:02d}{''.join(suffixes)}"
                    folder.mkdir()
                    torch.save(state, folder / _FILE)
    write_text(root / LATEST, f"{RELEASE}\n")
    return folder_of(root, RELEASE)


def _require_divisible(config: Config, tp: int, pp: int, ep: int, transformer_engine: bool) -> None:
    sizes = [
        ("query groups", config.num_query_groups, tp),
        ("MLP channels", config.ffn_hidden_size, tp),
        ("layers", config.num_layers, pp),
    ]
    if config.num_experts is None:
        require(ep == 1, f"the model has no experts that {ep} expert-parallel ranks could divide")
    else:
        sizes += [("experts", config.num_experts, ep), ("channels of an expert", config.moe_ffn_hidden_size, tp)]
        sizes.append(("channels of the shared expert", config.moe_shared_expert_intermediate_size or 0, tp))
    if config.multi_latent_attention and not transformer_engine:
        latents = {"queries": config.q_lora_rank or 0, "keys": config.kv_lora_rank + config.qk_pos_emb_head_dim}
        sizes += [(f"rows of the down-projection of {name}", rows, tp) for name, rows in latents.items()]
    for what, size, ranks in sizes:
        require(size % ranks == 0, f"{size} {what} are not divisible by {ranks} ranks")


def shard_of(name: str, gated: bool, *, whole_down: bool = False) -> Shard | None:
    """The sharding of a parameter over tensor-parallel ranks; None if it is replicated.

    whole_down: every rank has all of the down-projections of latent attention, as with Transformer Engine's layers.
    """
    experts = int(_OF_EXPERTS in name)  # the first dimension of these counts the experts
    if name.endswith("_down_proj.weight"):
        return None if whole_down else Shard(0)
    if name in (WORD_EMBEDDING, OUTPUT_LAYER) or name.endswith(("linear_q_proj.weight", "_up_proj.weight")):
        return Shard(0)
    if "linear_qkv." in name:
        return Shard(0)
    if "linear_fc1." in name:
        return Shard(experts, 2 if gated else 1)
    return Shard(1 + experts) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def _open(folder: Path) -> _Checkpoint:
    """Reads the files and determines their layout. Raises ConversionError if files are missing."""
    found: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match is None:
            raise ConversionError(f"{path} is not the folder of a rank, mp_rank_TT[_PPP][_EEE]")
        require((path / _FILE).is_file(), f"{folder} lacks the files of rank {path.name}: it has no {_FILE}")
        state = load_state(path / _FILE)
        model = isinstance(state, dict) and state.get("model", state.get("model0"))
        require(isinstance(model, Mapping), f"{path / _FILE} contains no model")
        found[tuple(int(number) for number in match.groups() if number is not None)] = state
    args, iteration, version = saved_args(next(iter(found.values())), folder / "mp_rank_00*" / _FILE)
    names = "tensor", "pipeline", "expert"
    stored = [args.get(f"{name}_model_parallel_size") for name in names]
    if stored[0] is None:
        stored[0] = args.get("model_parallel_size")
    # Megatron-LM leaves out the number of a dimension of one rank, except that of the tensor dimension.
    only_experts = stored[1] in (None, 1) and stored[2] not in (None, 1)
    files = {}
    for numbers, state in found.items():
        t, p, e = (*numbers, 0, 0)[:3] if len(numbers) != 2 or not only_experts else (numbers[0], 0, numbers[1])
        files[t, p, e] = state
    tp, pp, ep = (1 + max(ranks[n] for ranks in files) for n in range(3))
    for name, size, value in zip(names, (tp, pp, ep), stored):
        require(
            value in (None, size),
            f"{folder} has the files of {size} ranks, but its args have {name}_model_parallel_size = {value}",
        )
    etp = args.get("expert_tensor_parallel_size") or tp
    require(
        isinstance(etp, int) and tp % etp == 0,
        f"{folder}: tensor_model_parallel_size {tp} is not divisible by expert_tensor_parallel_size {etp}, so that the "
        "ranks with different parts of an expert wrote to one file",
    )
    dense, expert = {r[:2] for r in files}, {(r[0] % etp, *r[1:]) for r in files}
    missing: list[tuple[int, ...]] = [(t, p) for t in range(tp) for p in range(pp) if (t, p) not in dense]
    require(not missing, f"{folder} lacks the files of (tensor, pipeline) ranks {missing[:4]}")
    missing = [(t, p, e) for t in range(etp) for p in range(pp) for e in range(ep) if (t, p, e) not in expert]
    require(not missing, f"{folder} lacks the files of (expert-tensor, pipeline, expert) ranks {missing[:4]}")
    return _Checkpoint(folder, files, args, tp, pp, ep, etp, iteration, version)


def _stage(c: _Checkpoint, stage: int, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of one pipeline stage, in full, under HAL's names."""
    files = {(t, e): _tensors(c, state, stage, options) for (t, p, e), state in c.files.items() if p == stage}
    names = [set(tensors) for tensors in files.values()]
    require(all(n == names[0] for n in names), f"{c.folder}: the ranks of stage {stage} have different tensors")
    of_tensor_rank = [next(files[t, e] for e in range(c.ep) if (t, e) in files) for t in range(c.tp)]
    gated = bool(options.get("swiglu") or options.get("geglu"))
    whole = {}
    for name in of_tensor_rank[0]:
        if _OF_EXPERTS in name:
            parts = []
            for e in range(c.ep):
                holders = [next(t for t in range(r, c.tp, c.etp) if (t, e) in files) for r in range(c.etp)]
                parts.append(_whole([files[t, e][name] for t in holders], shard_of(name, gated)))
            whole[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        else:
            shards = [tensors[name] for tensors in of_tensor_rank]
            whole_down = shards[0].shape[0] == _down_rows(name, options)
            whole[name] = _whole(shards, shard_of(name, gated, whole_down=whole_down))
    return whole


def _down_rows(name: str, options: Mapping[str, Any]) -> int | None:
    """The rows of a down-projection of latent attention."""
    if name.endswith("linear_q_down_proj.weight"):
        rows: int | None = options.get("q_lora_rank")
        return rows
    sizes = [options.get(n, getattr(Config, n)) for n in ("kv_lora_rank", "qk_pos_emb_head_dim")]
    return sum(sizes) if name.endswith("linear_kv_down_proj.weight") else None


def _tensors(c: _Checkpoint, state: Mapping[str, Any], stage: int, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of one rank's file under HAL's names. A file has one model, or one per virtual pipeline stage."""
    chunks = [state["model"]] if "model" in state else [state[f"model{n}"] for n in range(_count(state))]
    layers = options["num_layers"] // (c.pp * len(chunks))
    experts = (options.get("num_experts") or 0) // c.ep
    tensors: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        flat = _flat(chunk)
        if any(name.startswith("language_model.") for name in flat):
            flat = _renamed(flat, options, c.tp, c.version)
        flat = parameters(flat)
        for name, tensor in flat.items():
            valid = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
            # An expanded view can claim any size with a small storage.
            valid = valid and tensor.nbytes <= tensor.untyped_storage().nbytes()
            require(valid, f"{name} is not a dense tensor with all its elements stored")
        tensors |= from_megatron_core(flat, first_layer=(number * c.pp + stage) * layers, experts=experts)
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
