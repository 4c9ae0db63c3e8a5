"""Opens a checkpoint for use: what every command that runs a trained model has in common.

The checkpoint says what the model and its tokenizer are; the command line says where it runs and over how many ranks,
which need not be those it was trained on. What contradicts the checkpoint is refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import hal
from hal import HalError
from hal.launch.agent import Job, run
from hal.mesh import Mesh

from . import checkpoint, tokenizer
from .arguments import add_options, convert
from .checks import check_model, world_size
from .config import Config, ConfigError
from .gpt import shapes
from .inference import Engine
from .parallel.plan import make_plan
from .tokenizer import Tokenizer, build_tokenizer
from .train import local_device
from .unpickle import stored_tensors

WHERE = ("backend", "simulate", "fallback", "pin", "nproc_per_node", "load")
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layer_list",
    "context_parallel_size",
    "context_parallel_algo",
    "distributed_timeout_minutes",
)
RUNNING = ("use_flash_attn", "shape_order")
TOKENIZER = ("tokenizer_type", *tokenizer.OPTIONS)
DTYPES = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}


_SOURCES = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "text_file"}
Prepare = Callable[[Config, Tokenizer, Mapping[str, Any]], Any]


@dataclass
class Pretrained:
    """An open checkpoint. iteration: that of its training. saved: the options of its run. prepared: see
    open_pretrained."""

    config: Config
    engine: Engine
    tokenizer: Tokenizer
    iteration: int
    saved: Mapping[str, Any]
    prepared: Any = None


def add_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    """Adds the options of `open_pretrained`, and `more` of a Config's, to a command."""
    group = parser.add_argument_group("the model, and where it runs", argument_default=argparse.SUPPRESS)
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
    """Opens what `arguments` ask for and runs `body` on it, on --nproc-per-node processes. Returns the exit code."""
    names = {*WHERE, *LAYOUT, *RUNNING, *TOKENIZER, *more}
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in vars(arguments).items() if n in names}
    given.setdefault("backend", os.environ.get("HAL_BACKEND"))
    if given["backend"] is None:
        raise ConfigError(f"no backend was chosen; give --backend, one of {', '.join(hal.names())}")
    if "load" not in given:
        raise ConfigError("no model was chosen; give --load, a folder of checkpoints")
    if given.pop("nproc_per_node", 1) > 1 and "WORLD_SIZE" not in os.environ:
        return run(Job([name, *argv], nproc=arguments.nproc_per_node))
    try:
        return body(open_pretrained(given, getattr(arguments, "dtype", None), prepare))
    except (HalError, OSError) as error:
        print(f"hal {name}: {error}", file=sys.stderr)
        return 2


def open_pretrained(given: Mapping[str, Any], dtype: str | None = None, prepare: Prepare | None = None) -> Pretrained:
    """The latest checkpoint of given["load"], on the backend and layout of `given` (option values by name).

    prepare: called with the config, the tokenizer and the saved options before the ranks meet (for data, whose maps
    megatron-core builds on one rank only once there is a world); what it returns is `prepared`.
    Raises ConfigError for what contradicts the checkpoint, HalError for one that is damaged.
    """
    pins = dict(pin.split("=", 1) for pin in given.get("pin", ()))
    simulate = {"simulate": True} if given.get("simulate") or os.environ.get("HAL_SIMULATE") == "1" else {}
    hal.use(given["backend"], fallback=given.get("fallback", "error"), pin=pins, **simulate)
    folder, state = checkpoint.read_state(Path(given["load"]))
    config = config_of(state, given, dtype, folder, data=prepare is not None)
    made = build_tokenizer(config)
    _fit(config, made, state)
    _require_stored(config, folder)
    prepared = None if prepare is None else prepare(config, made, state["config"])
    plan = make_plan(config, world_size(config))
    mesh = None
    if plan.layout.world > 1:
        mesh = Mesh(plan.layout, hal.backend(), timeout=60.0 * config.distributed_timeout_minutes)
    device = local_device() if mesh is not None else hal.device()
    engine = Engine.build(config, made.vocab_size, device, mesh, plan)
    engine.load(folder)
    return Pretrained(config, engine, made, state["iteration"], state["config"], prepared)


def config_of(
    state: Mapping[str, Any], given: Mapping[str, Any], dtype: str | None, folder: Path, *, data: bool
) -> Config:
    """The config of a checkpoint's model under the layout and tokenizer that were asked for; with its `data`'s."""
    wanted = {*model_options(), *TOKENIZER, "seed"}
    if data:
        wanted |= set(data_options()) - (_SOURCES if _SOURCES & set(given) else set())
    saved = {n: v for n, v in saved_options(state, folder).items() if n in wanted}
    if "tokenizer_type" in given:
        saved = {n: v for n, v in saved.items() if n not in TOKENIZER}
    if dtype is not None:
        saved = {n: v for n, v in saved.items() if n not in ("bf16", "fp16")} | DTYPES[dtype]
    micro = int(given.get("micro_batch_size", 4))
    values = {**saved, **given, "micro_batch_size": micro, "global_batch_size": micro * int(world_size_of(given))}
    config = Config(**values)
    config.given = frozenset(values)
    check_model(config)
    return config


def world_size_of(given: Mapping[str, Any]) -> int:
    """How many processes take part."""
    return int(os.environ.get("WORLD_SIZE", given.get("nproc_per_node", 1)))


def data_options() -> list[str]:
    """Names of the options that say what a run reads."""
    names = [f.name for f in fields(Config)]
    return names[names.index("data_path") : names.index("tokenizer_type")]


def model_options() -> list[str]:
    """Names of the options that make a model what it is."""
    names = [f.name for f in fields(Config)]
    return [*names[names.index("num_layers") : names.index("data_path")], "bf16", "fp16", "noop_layers"]


def saved_options(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options that a checkpoint's run had, without those at their defaults. HalError for any unknown one."""
    known = {f.name: f for f in fields(Config)}
    stored = state.get("config")
    if not isinstance(stored, dict):
        raise HalError(f"the checkpoint {folder} does not say what model it holds")
    unknown = sorted(set(stored) - set(known))
    if unknown:
        raise HalError(f"the checkpoint {folder} was made by another version of HAL, with the options {unknown}")
    padded = stored.get("padded_vocab_size")
    if padded is not None and (type(padded) is not int or padded < 1):
        raise HalError(f"the checkpoint {folder}: padded_vocab_size should be a count; found {padded!r}")
    where = f"the checkpoint {folder}: --"
    values = {n: v for n, v in stored.items() if known[n].init and v != known[n].default}
    values = {n: convert(n, v, where + n.replace("_", "-")) for n, v in values.items()}
    return {n: v for n, v in values.items() if v != known[n].default}


def _require_stored(config: Config, folder: Path) -> None:
    """Raises HalError, before anything is allocated, unless the checkpoint holds the model its options describe."""
    stored = stored_tensors(folder)
    if config.num_layers > len(stored):  # or a model of a billion layers would be built to look at
        raise HalError(
            f"the checkpoint {folder} says it has {config.num_layers} layers; it holds {len(stored)} tensors"
        )
    for name, shape in shapes(config).items():
        info = stored.get(name)
        if info is None or tuple(info.size) != shape:
            found = "nothing" if info is None else f"shape {tuple(info.size)}"
            raise HalError(f"the checkpoint {folder} has {found} for {name}; the model of its options has {shape}")


def _fit(config: Config, made: Tokenizer, state: Mapping[str, Any]) -> None:
    config.set_vocabulary(made.vocab_size)
    padded = state["config"].get("padded_vocab_size")
    if padded is not None and config.padded_vocab_size != padded:
        # A smaller vocabulary in the same table: the rest is padding that never gets any probability.
        if made.vocab_size > padded:
            raise ConfigError(
                f"the tokenizer has {made.vocab_size} ids and the model {padded}: this is not the tokenizer that the "
                "model was trained with; see --tokenizer-type"
            )
        config.padded_vocab_size = padded
