"""The options stored in a checkpoint, and which of them a run or a command that loads it takes over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hal import HalError, backend_names
from hal.untrusted import one_line, shown

from ..config import tokenizer_options
from ..config.command_line import ONE_MICROBATCH, convert
from ..config.schema import WARMUP, Config, ConfigError, GivenOptions, resolve
from ..config.validation import check_model
from ..gpt.model import WORD_EMBEDDING, shapes
from .reader import RELEASE, candidates, folder_of, read_manifest
from .safe_unpickle import stored_tensors

TOKENIZER = ("tokenizer_type", *tokenizer_options.OPTIONS)

EXECUTION = ("backend", "simulate", "fallback", "pin", "deterministic_mode", "rng")
"""Options that say how a run is executed by its backend; those of a checkpoint go together."""

SOURCES = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "text_file", "mock_data"}
"""Options that name data."""

_THIS_RUNS = {"exit_interval", "exit_duration_in_mins", "use_checkpoint_opt_param_scheduler", "data_cache_path"}
"""Options of data and training that a resumed run does not take over: when it stops, and what --load means."""

_SHAPES = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")

_MOST_ROWS = 1 << 31

_ONCE_WITHOUT_VALUE = ("fp8_recipe",)
"""Options whose default was None in earlier versions: None in a checkpoint stands for their present default."""


def data_options() -> list[str]:
    """Names of the options that define the data of a run."""
    names = [f.name for f in fields(Config)]
    return names[names.index("data_path") : names.index("tokenizer_type")]


def model_options() -> list[str]:
    """Names of the options that define a model."""
    names = [f.name for f in fields(Config)]
    return [*names[names.index("num_layers") : names.index("data_path")], "bf16", "fp16", "noop_layers"]


def saved_options(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options stored in a checkpoint, without those at their defaults. Raises HalError for unknown options."""
    known = {f.name: f for f in fields(Config)}
    stored = state.get("config")
    if not isinstance(stored, dict):
        raise HalError(f"the checkpoint {folder} does not contain the options of its model")
    unknown = sorted(set(stored) - set(known))
    if unknown:
        raise HalError(f"the checkpoint {folder} was written by another version of HAL, with the options {unknown}")
    padded = stored.get("padded_vocab_size")
    if padded is not None and (type(padded) is not int or not 1 <= padded < _MOST_ROWS):
        raise HalError(f"the checkpoint {folder}: padded_vocab_size should be a count of rows; found {shown(padded)}")
    where = f"the checkpoint {folder}: --"
    without = {n for n in _ONCE_WITHOUT_VALUE if stored.get(n, "") is None}
    values = {n: v for n, v in stored.items() if known[n].init and n not in without and v != known[n].default}
    values = {n: convert(n, v, where + n.replace("_", "-")) for n, v in values.items()}
    return {n: v for n, v in values.items() if v != known[n].default}


def saved_vocabulary(state: Mapping[str, Any], folder: Path) -> int | None:
    """The rows of a checkpoint's embedding without padding; None if it does not say. Raises HalError for another
    value."""
    stored = state.get("config")
    count = stored.get("vocabulary") if isinstance(stored, dict) else None
    if count is not None and (type(count) is not int or not 1 <= count < _MOST_ROWS):
        raise HalError(f"the checkpoint {folder}: vocabulary should be a count of rows; found {shown(count)}")
    return count


def require_consistent(
    saved: Mapping[str, Any], state: Mapping[str, Any], folder: Path, stored: Mapping[str, TensorStorageMetadata]
) -> None:
    """Raises HalError, before allocating memory, unless the tensors of a checkpoint are those of the model that its
    options describe. saved: its `saved_options`; stored: its `stored_tensors`."""
    try:
        config = resolve({n: v for n, v in saved.items() if n in model_options()})
        embedding = stored.get(WORD_EMBEDDING)
        rows = 1 if embedding is None else embedding.size[0]
        config.padded_vocab_size = state["config"].get("padded_vocab_size") or rows  # early versions did not store it
        check_model(config)
    except (TypeError, ValueError, ConfigError) as error:
        reason = error.text if isinstance(error, ConfigError) else one_line(error)
        raise HalError(f"the options of the checkpoint {folder} are invalid: {reason}") from None
    if config.num_layers > len(stored):  # checked first, since `shapes` builds all layers
        raise HalError(
            f"the options of the checkpoint {folder} give {config.num_layers} layers; it holds {len(stored)} tensors"
        )
    for name, shape in shapes(config).items():
        info = stored.get(name)
        if info is None or tuple(info.size) != shape:
            stored_as = "no tensor" if info is None else f"shape {tuple(info.size)}"
            raise HalError(f"the checkpoint {folder} has {stored_as} for {name}; the model of its options has {shape}")


def adopt(values: GivenOptions) -> None:
    """Adds to the options what the checkpoint in --load says: its backend, model and tokenizer, as Megatron's
    --use-checkpoint-args, and for a run that resumes (not --finetune, not a release) its data and training options.

    Options that the user gave stay. Notes name what was taken over and, of the model, what differs. Does nothing if
    there is no checkpoint. Raises ConfigError for sizes that contradict it (other contradictions are refused when it is
    loaded), HalError for unknown options in it.
    """
    found = None if "load" not in values else _newest(Path(values["load"]))
    if found is None:
        return
    folder, state, stored = found
    saved = saved_options(state, folder)
    require_consistent(saved, state, folder, stored)
    if "tokenizer_type" in values:
        saved = {n: v for n, v in saved.items() if n not in TOKENIZER}
    if {"bf16", "fp16"} & set(values):
        saved = {n: v for n, v in saved.items() if n not in ("bf16", "fp16")}
    described = {*model_options(), *TOKENIZER}
    execution = set(() if values.get("backend", saved.get("backend")) != saved.get("backend") else EXECUTION)
    resumes = not values.get("finetune") and folder.name != RELEASE
    experiment = _experiment(values, saved, state["config"]) if resumes else set()
    saved = {n: v for n, v in saved.items() if n in {*described, *execution, *experiment}}
    if "make_vocab_size_divisible_by" not in values and state["config"].get("padded_vocab_size"):
        # The embedding's rows are the checkpoint's, also if its tokenizer has fewer ids than those of another one.
        saved["pad_vocab_size_to"] = state["config"]["padded_vocab_size"]
        saved.pop("make_vocab_size_divisible_by", None)
    for name in _SHAPES:
        value = state["config"].get(name)
        if name in values and values[name] != value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} {values[name]} contradicts the checkpoint {folder}, whose model has {value}; remove {option}"
            )
    taken = []
    for name, value in saved.items():
        if name not in values:
            values.take({name: value}, {name: f"the checkpoint {folder}"})
            values.adopted.add(name)
            taken += [] if name in described else [written(name, value)]
        elif values[name] != value and name in described:
            values.notes.append(
                f"{written(name, values[name])} is given; the checkpoint {folder} was made with {value}"
            )
    values.notes.append(f"from the checkpoint {folder}: {', '.join(['model and tokenizer', *taken])}")


def _experiment(values: GivenOptions, saved: Mapping[str, Any], complete: Mapping[str, Any]) -> set[str]:
    """The options of data and training that a resumed run takes over from those `saved`, beside the given `values`.

    complete: all options of the checkpoint, also those at their defaults.
    """
    names = [f.name for f in fields(Config)]
    training = names[names.index("micro_batch_size") : names.index("tensor_model_parallel_size")]
    result = {*data_options(), *training, "eval_interval", "eval_iters"} - _THIS_RUNS
    if SOURCES & set(values):  # data are given as a whole
        result -= SOURCES
    if values.origins.get("global_batch_size") == ONE_MICROBATCH:
        values.pop("global_batch_size")
    if values.get("no_load_rng"):
        result.discard("seed")
    # Both units of the length, and all ways to give the warm-up, exclude each other.
    in_samples = "train_samples" in values or ("train_samples" in saved and "train_iters" not in values)
    result -= {n for n in training if n.endswith("_iters" if in_samples else "_samples")}
    # So do steps or sequences and epochs, of which a checkpoint names those that its length followed from.
    if {"train_iters", "train_samples"} & set(values):
        result.discard("num_train_epochs")
    elif "num_train_epochs" in {*values, *saved}:
        result -= {"train_iters", "train_samples"}
    if complete.get("lr_decay_iters") == complete.get("train_iters"):
        result.discard("lr_decay_iters")  # it followed from the length of the run
    if WARMUP & set(values):
        result -= WARMUP
    elif "lr_warmup_fraction" in saved:
        result.discard("lr_warmup_iters")
    return result


def written(name: str, value: Any) -> str:
    """An option as on a command line."""
    if value is True:
        return f"--{name.replace('_', '-')}"
    return f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def execution_of(root: Path) -> tuple[Path | None, dict[str, Any]]:
    """(folder, the options of EXECUTION) of the checkpoint in `root`; None and no options if none names a backend."""
    folder, state, _ = _newest(root) or (None, {}, {})
    if folder is None or state["config"].get("backend") is None:
        return None, {}
    return folder, {n: v for n, v in saved_options(state, folder).items() if n in EXECUTION}


@contextlib.contextmanager
def backend_of(checkpoint: str | None) -> Iterator[None]:
    """Adds to an error about the backend that the checkpoint chose it, unless that is None (the user chose it)."""
    try:
        yield
    except HalError as error:
        if checkpoint is None:
            raise
        names = ", ".join(backend_names())
        raise HalError(
            f"{error} It is the backend of {checkpoint}; --backend gives another one ({names}), which continues from "
            "the same weights"
        ) from error


def _newest(root: Path) -> tuple[Path, dict[str, Any], dict[str, TensorStorageMetadata]] | None:
    """(folder, state, stored tensors) of the checkpoint that would be tried first and has a readable manifest and
    index; None without any."""
    for iteration in candidates(root):
        folder = folder_of(root, iteration)
        with contextlib.suppress(HalError, OSError):
            return folder, read_manifest(folder)["state"], stored_tensors(folder)
    return None
