"""Loads a checkpoint for inference; shared by all commands that run a trained model.

The checkpoint defines the model and its tokenizer; the command line defines the backend and the parallel layout, which
may differ from those of training. Options that contradict the checkpoint are refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hal
from hal import HalError
from hal.launch.agent import Job, run
from hal.mesh import Mesh

from ..checkpoint import reader
from ..checkpoint.safe_unpickle import stored_tensors
from ..checkpoint.saved_config import (
    SOURCES,
    TOKENIZER,
    backend_of,
    data_options,
    execution_of,
    model_options,
    require_consistent,
    saved_options,
    saved_vocabulary,
    written,
)
from ..config.command_line import add_options
from ..config.parallel_layout import make_parallel_layout
from ..config.schema import Config, ConfigError, resolve
from ..config.validation import check_model, world_size
from ..data.tokenizers.build import build_tokenizer
from ..data.tokenizers.tokenizer import Tokenizer
from .engine import Engine

WHERE = ("backend", "simulate", "fallback", "pin", "nproc_per_node", "load")
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layer_list",
    "context_parallel_size",
    "context_parallel_algo",
    "ulysses_degree_in_cp",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_token_dispatcher_type",
    "distributed_timeout_minutes",
)
RUNNING = ("use_flash_attn", "shape_order")
DTYPES = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}

Prepare = Callable[[Config, Tokenizer, Mapping[str, Any]], Any]


@dataclass
class Pretrained:
    """A loaded checkpoint. iteration: training steps. saved: options of its run. prepared: see open_pretrained."""

    config: Config
    engine: Engine
    tokenizer: Tokenizer
    iteration: int
    saved: Mapping[str, Any]
    prepared: Any = None


def add_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    """Adds the options of `open_pretrained` to a command, and `more` options of a Config."""
    group = parser.add_argument_group("model and execution", argument_default=argparse.SUPPRESS)
    add_options(group, [*WHERE, *LAYOUT, *RUNNING, *TOKENIZER, *more])
    group.add_argument("--dtype", choices=DTYPES, help="precision to compute in (default: the checkpoint's)")


def run_command(
    name: str,
    argv: Sequence[str],
    arguments: argparse.Namespace,
    body: Callable[[Pretrained], int],
    *more: str,
    prepare: Prepare | None = None,
) -> int:
    """Loads the checkpoint of `arguments` and runs `body` on it in --nproc-per-node processes. Returns an exit code."""
    names = {*WHERE, *LAYOUT, *RUNNING, *TOKENIZER, *more}
    given: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in vars(arguments).items() if n in names
    }
    given.setdefault("backend", os.environ.get("HAL_BACKEND"))
    if "load" not in given:
        raise ConfigError("no model was chosen; give --load, a folder of checkpoints")
    chosen_by: Path | None = None
    execution: dict[str, Any] = {}
    if given["backend"] is None:
        chosen_by, execution = execution_of(Path(given["load"]))
        if chosen_by is None:
            raise ConfigError(
                f"no backend was chosen, and --load {given['load']} has no checkpoint of a run that had one; give "
                f"--backend, one of {', '.join(hal.backend_names())}"
            )
        given |= {n: v for n, v in execution.items() if n not in given or n == "backend"}
    if given.pop("nproc_per_node", 1) > 1 and "WORLD_SIZE" not in os.environ:
        return run(Job([name, *argv], nproc=arguments.nproc_per_node))
    if chosen_by is not None and os.environ.get("RANK", "0") == "0":
        options = ", ".join(written(n, given[n]) for n in execution)
        print(f"hal {name}: from the checkpoint {chosen_by}: {options}", file=sys.stderr)
    try:
        return body(open_pretrained(given, getattr(arguments, "dtype", None), prepare, chosen_by=chosen_by))
    except (HalError, OSError) as error:
        print(f"hal {name}: {error}", file=sys.stderr)
        return 2


def open_pretrained(
    given: Mapping[str, Any],
    dtype: str | None = None,
    prepare: Prepare | None = None,
    *,
    chosen_by: Path | None = None,
) -> Pretrained:
    """The latest checkpoint of given["load"], on the backend and layout of `given` (option values by name).

    prepare: called with the config, the tokenizer and the saved options; its result becomes `prepared`. It is called
    before the ranks join the world, because afterwards megatron-core would build index maps on one rank only.
    chosen_by: the checkpoint that the backend comes from, for errors; None if the user gave it.
    Raises ConfigError for options that contradict the checkpoint, HalError if the checkpoint is damaged.
    """
    pins = dict(pin.split("=", 1) for pin in given.get("pin", ()))
    simulate = {"simulate": True} if given.get("simulate") or os.environ.get("HAL_SIMULATE") == "1" else {}
    with backend_of(None if chosen_by is None else f"the checkpoint {chosen_by}"):
        hal.use(given["backend"], fallback=given.get("fallback", "error"), pin=pins, **simulate)
    folder, state = reader.read_state(Path(given["load"]))
    config = config_of(state, given, dtype, folder, data=prepare is not None)
    tokenizer = build_tokenizer(config)
    _set_vocabulary(config, tokenizer, state, folder)
    prepared = None if prepare is None else prepare(config, tokenizer, state["config"])
    layout = make_parallel_layout(config, world_size(config))
    mesh = Mesh(layout.layout, hal.backend(), timeout=60.0 * config.distributed_timeout_minutes)
    engine = Engine.build(config, config.vocabulary, mesh, layout)
    engine.load(folder)
    return Pretrained(config, engine, tokenizer, state["iteration"], state["config"], prepared)


def config_of(
    state: Mapping[str, Any], given: Mapping[str, Any], dtype: str | None, folder: Path, *, data: bool
) -> Config:
    """The config of a checkpoint's model with the layout and tokenizer of `given`. data: also the data options."""
    names = {*model_options(), *TOKENIZER, "seed"}
    if data:
        names |= set(data_options()) - (SOURCES if SOURCES & set(given) else set())
    saved = saved_options(state, folder)
    require_consistent(saved, state, folder, stored_tensors(folder))
    saved = {n: v for n, v in saved.items() if n in names}
    if "tokenizer_type" in given:
        saved = {n: v for n, v in saved.items() if n not in TOKENIZER}
    if dtype is not None:
        saved = {n: v for n, v in saved.items() if n not in ("bf16", "fp16")} | DTYPES[dtype]
    micro = int(given.get("micro_batch_size", 4))
    values = {**saved, **given, "micro_batch_size": micro, "global_batch_size": micro * int(world_size_of(given))}
    config = resolve(values)
    check_model(config)
    return config


def world_size_of(given: Mapping[str, Any]) -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", given.get("nproc_per_node", 1)))


def _set_vocabulary(config: Config, tokenizer: Tokenizer, state: Mapping[str, Any], folder: Path) -> None:
    config.set_vocabulary(tokenizer.vocab_size)
    # A model from elsewhere may have more ids than its tokenizer, and gives them a probability.
    config.vocabulary = max(config.vocabulary, saved_vocabulary(state, folder) or 0)
    padded = state["config"].get("padded_vocab_size")
    if padded is not None and config.padded_vocab_size != padded:
        # The checkpoint's table may have additional padding rows, which never get any probability.
        if tokenizer.vocab_size > padded:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model {padded}: this is not the tokenizer that "
                "the model was trained with; see --tokenizer-type"
            )
        config.padded_vocab_size = padded
