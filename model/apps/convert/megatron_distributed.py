"""Reads and writes megatron-core's distributed checkpoints (`torch_dist`): one folder for any layout. The tensors of
all layers are stacked, unless --moe-layer-freq makes layers of two kinds.

The index is read by a restricted unpickler as is the pickle in common.pt.
"""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from hal import HalError
from hal.untrusted import read_json, shown

from ...checkpoint.dcp import save_alone
from ...checkpoint.reader import LATEST, RELEASE, folder_of, tracked
from ...checkpoint.safe_unpickle import SafeReader, empty_tensors, read_tensors
from ...checkpoint.torch_archive import load_state
from ...common.atomic_files import publish_folder, write_text
from ...gpt.model import OUTPUT_LAYER
from .megatron_args import args_of, options_of, saved_args, stacks_layers, tokenizer_of
from .megatron_core import extra_states, from_megatron_core, to_distributed, unstack_layers
from .weights import ConversionError, Weights, common_dtype, require

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FORMAT |= {"common_backend": "torch", "common_backend_version": 1}
_PREFIXES = ("embedding.", "decoder.", "output_layer.")


def find(root: Path) -> Path | None:
    """The folder with megatron-core's metadata.json: `root` or the one its tracker file names; None without one."""
    iteration = tracked(root)
    folder = root if iteration is None else folder_of(root, iteration)
    return folder if (folder / "metadata.json").is_file() else None


def read(root: Path, *, vocabulary: int | None = None) -> Weights:
    """The model of a checkpoint. vocabulary: number of embedding rows without padding (default: all).

    Raises ConversionError for other formats and models, UnsafeFile for files that reference code.
    """
    folder = find(root)
    if folder is None:
        raise ConversionError(f"{root} has no metadata.json of megatron-core")
    try:
        backend = read_json(folder / "metadata.json").get("sharded_backend")
    except (HalError, AttributeError):
        backend = None
    require(backend == "torch_dist", f"{folder} is in the format {shown(backend)}; only torch_dist can be read")
    common = load_state(folder / "common.pt")
    args, iteration, _ = saved_args(common, folder / "common.pt")
    options = options_of(args)
    source = SafeReader(folder)
    tensors = empty_tensors(folder, {n: info for n, info in source.tensors().items() if n.startswith(_PREFIXES)})
    read_tensors(source, tensors)
    unstacked = from_megatron_core(unstack_layers(tensors))
    if not options.get("untie_embeddings_and_output_weights"):
        unstacked.pop(OUTPUT_LAYER, None)
    weights = Weights(options, common_dtype(unstacked), tokenizer_of(args), iteration)
    weights.check()
    weights.cut(weights.vocabulary if vocabulary is None else vocabulary)
    return weights


def write(weights: Weights, root: Path, *, divisible_by: int = 128) -> Path:
    """Writes a release to `root`, with the vocabulary padded to a multiple of divisible_by. megatron-core loads it with
    any layout whose tensor-parallel size divides the padded vocabulary."""
    weights.check()
    config = weights.config(make_vocab_size_divisible_by=divisible_by)
    padded = config.padded_vocab_size
    args = args_of(weights, config, padded=padded)
    content: dict[str, Any] = to_distributed(weights.padded(padded), stacked=stacks_layers(config))
    # Empty states of Transformer Engine's layers: loading requires the entries.
    states = [*extra_states(content), "output_layer._extra_state/shard_0_1"]
    content |= {key: _empty_state() for key in states}
    common = {"args": args, "checkpoint_version": 3.0, "iteration": weights.iteration}
    with publish_folder(folder_of(root, RELEASE)) as new:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_alone(content, FileSystemWriter(new, single_file_per_rank=False), _Planner())
        torch.save(common, new / "common.pt")
        write_text(new / "metadata.json", json.dumps(_FORMAT))
    write_text(root / LATEST, f"{RELEASE}\n")
    return folder_of(root, RELEASE)


class _Planner(DefaultSavePlanner):
    """Writes BytesIO objects unchanged: megatron-core pickles its objects itself."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


def _empty_state() -> io.BytesIO:
    """A list that contains None, which is how megatron-core stores an empty state."""
    content = io.BytesIO()
    torch.save([None], content)
    return content
