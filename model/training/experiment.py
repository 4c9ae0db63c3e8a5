"""Whether a resumed run is the experiment of its checkpoint: the differences that are refused, and those it reports.

A checkpoint stores the options of its run and fingerprints of its data. Other data or another tokenizer are refused;
changed hyperparameters and a changed seed are reported, because changing them can be the purpose of resuming.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.schema import Config, ConfigError
from ..data.gpt_dataset import Split

_NOT_COMPARED = frozenset(
    [
        "backend",
        "simulate",
        "fallback",
        "deterministic_mode",
        "pin",
        "run_dir",
        "nproc_per_node",
        "data_cache_path",
        "train_iters",
        "exit_interval",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_layer_list",
        "select_recompute_layer_list",
        "checkpoint_in_cpu",
        "partition_activations",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "tp_comm_overlap",
        "pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "pipeline_schedule",
        "num_layer_list",
        "noop_layers",
        "context_parallel_size",
        "context_parallel_algo",
        "ulysses_degree_in_cp",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "moe_token_dispatcher_type",
        "moe_per_layer_logging",
        "use_distributed_optimizer",
        "zero_stage",
        "overlap_grad_reduce",
        "ddp_bucket_size",
        "distributed_timeout_minutes",
        "save",
        "save_interval",
        "async_save",
        "keep_checkpoint_max",
        "load",
        "no_load_optim",
        "no_load_rng",
        "finetune",
        "accept_changed_data",
        "new_dataset",
        "cuda_graphs",
        "rerun_mode",
        "verify_ops",
        "skip_bad_batches",
        "eval_interval",
        "eval_iters",
        "eval_global_batch_size",
        "log_interval",
        "log_format",
        "log_throughput",
        "timing_log_level",
        "timing_log_option",
        "log_timers_to_tensorboard",
        "tensorboard_dir",
        "log_straggler",
        "straggler_minmax_count",
        "log_memory_to_tensorboard",
        "log_memory_interval",
        "profile",
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "use_pytorch_profiler",
        "record_memory_history",
        "memory_snapshot_path",
        "wandb_project",
        "wandb_exp_name",
        "sample_tokens",
        "sample_temperature",
        "micro_batch_size",
        "padded_vocab_size",
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "text_file",
        "vocab_file",
        "merge_file",
        "tokenizer_model",
        "seed",
        "shape_order",
        "pad_vocab_size_to",
        "use_flash_attn",
    ]
)
"""Options that determine where and how a run is executed, not what it computes; and paths and the seed, of which
`differences` compares the content (data, tokenizer) or reports a change in words of its own (seed)."""


def data_state(data: Mapping[str, Split]) -> dict[str, Any]:
    """The fingerprints of the splits' data and tokenizer, as JSON values, for a checkpoint."""
    return {name: split.source for name, split in data.items() if split.source}


def differences(state: Mapping[str, Any], config: Config, data: Mapping[str, Split], folder: Path) -> list[str]:
    """What this run changes relative to the checkpoint in `folder`, as lines for the log.

    Raises ConfigError for other data (unless config.accept_changed_data or config.new_dataset), or a default seed that
    differs from the checkpoint's.
    """
    notes = _hyperparameters(state, config)
    changed, uncertain = _data(state, data)
    if changed and not (config.accept_changed_data or config.new_dataset):
        raise ConfigError(
            f"the checkpoint {folder} was made with other data: {'; '.join(changed)}. Give the data it was made with, "
            "or --accept-changed-data to continue with these (--finetune begins a new run with the weights)"
        )
    rng = state.get("rng")
    if isinstance(rng, list) and rng[:1] != [config.seed]:
        if not (config.no_load_rng or "seed" in config.given):
            raise ConfigError(
                f"the checkpoint {folder} was made with --seed {rng[0]}, this run has --seed {config.seed}, the "
                "default; the same seed continues it exactly, and one given with --seed replaces it"
            )
        notes.append(f"seed {rng[0]} -> {config.seed}: dropout and the order of the data change")
    return [f"changed since {folder.name}: {note}" for note in (*notes, *changed, *uncertain)]


def _hyperparameters(state: Mapping[str, Any], config: Config) -> list[str]:
    saved = state.get("config")
    if not isinstance(saved, dict):
        return []
    notes = []
    for name in sorted(set(saved) - _NOT_COMPARED):
        # A checkpoint may be of another version, with other options; JSON has lists in place of tuples.
        now = getattr(config, name, saved[name])
        if (list(now) if isinstance(now, tuple) else now) != saved[name]:
            notes.append(f"{name.replace('_', '-')} {saved[name]} -> {now}")
    return notes


def _data(state: Mapping[str, Any], data: Mapping[str, Split]) -> tuple[list[str], list[str]]:
    """(differences of content, possible differences that the fingerprints do not cover)."""
    saved_splits = state.get("data")
    if not isinstance(saved_splits, dict):
        return [], []
    changed, uncertain = [], []
    for name, split in data.items():
        saved = saved_splits.get(name)
        if not isinstance(saved, dict) or not split.source:
            continue
        if saved.get("tokenizer") != split.source["tokenizer"]:
            changed.append(f"the tokenizer of the {name} split has another fingerprint")
        before, after = saved.get("files"), split.source["files"]
        if not isinstance(before, list) or len(before) != len(after):
            changed.append(f"the {name} split has a different number of files")
            continue
        now = split.source
        if "weights" in saved and saved["weights"] != now.get("weights"):
            changed.append(f"the weights of the {name} split's files changed: {_brief(saved, 'weights', now)}")
        if saved.get("fill_in_the_middle") != now.get("fill_in_the_middle"):
            changed.append(
                f"the {name} split's texts are rearranged otherwise (--fim-data and its options): "
                f"{_brief(saved, 'fill_in_the_middle', now)}"
            )
        if "parts" in saved and saved["parts"] != now.get("parts"):
            uncertain.append(
                f"the {name} split may have other samples or another order of them: [first sequence, last sequence, "
                f"samples if more than one epoch] of each file {_brief(saved, 'parts', now)}"
            )
        for old, new in zip(before, after):
            if not isinstance(old, dict) or old.get("sha256") != new["sha256"]:
                size = old.get("bytes") if isinstance(old, dict) else None
                changed.append(
                    f"{new['prefix']} of the {name} split has other contents ({size} -> {new['bytes']} bytes)"
                )
            elif not new["complete"] and old.get("modified") != new["modified"]:
                uncertain.append(f"{new['prefix']} was modified or copied; the sampled parts of it are the same")
    return changed, uncertain


def _brief(saved: Mapping[str, Any], key: str, now: Mapping[str, Any]) -> str:
    """A changed value before and after, each cut to 80 characters."""
    return " -> ".join(json.dumps(source.get(key))[:80] for source in (saved, now))
