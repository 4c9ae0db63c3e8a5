"""Reads options from the command line, files and the environment into a Config, in this order of precedence.

A file may contain HAL's own options or the configuration of MindSpeed-Core-MS, the MindFormers tutorial or DeepSpeed
(config/formats). The source of every value is recorded (`Config.origins`).

YAML keys and environment variables are named like the flags (`num-layers` or `num_layers`; `HAL_NUM_LAYERS`). An
unknown name is an error that suggests the closest valid one.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from hal.untrusted import shown

from .formats import deepspeed, mindformers, mindformers_trainer, mindspeed
from .formats.megatron_options import table, translate_options
from .formats.rules import MICROBATCHES, Reading, flag, translate
from .formats.strict_yaml import load
from .parallel_layout import zero_stage
from .schema import Config, ConfigError, GivenOptions, collecting, ready_configuration, report, resolve
from .tokenizer_options import OPTIONS, readers
from .validation import check, idle, world_size

GROUPS = {
    "backend": "execution",
    "num_layers": "the model",
    "num_experts": "mixture of experts",
    "data_path": "data",
    "micro_batch_size": "training",
    "tensor_model_parallel_size": "parallelism",
    "save": "checkpoints, evaluation, logging",
}
"""Titles of the groups in --help, by the first option of each group."""

ONE_MICROBATCH = "one microbatch per replica (Megatron's default)"
"""The origin of a global batch size that was not given."""

_TYPES = typing.get_type_hints(Config)
_OPTIONS = {f.name: f for f in fields(Config) if f.init}
_SPELLINGS = {
    spelling: name
    for name, option in _OPTIONS.items()
    for spelling in (name.replace("_", "-"), *option.metadata["aliases"], option.metadata["no"])
    if spelling
}
"""Field names by every spelling of their flags, without leading dashes."""


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The checked Config of a command line. Raises ConfigError; exits for --help."""
    return build(read(argv, environ))


def read(argv: Sequence[str], environ: Mapping[str, str] | None = None, *, showing: bool = False) -> GivenOptions:
    """Option values by field name, from all sources. Exits for --help.

    What is wrong with some of them is in the result's `problems`, which `build` reports together with what validation
    finds. Raises ConfigError for files that cannot be read. Options of parallelism become notes if there is one rank;
    showing: unless the number of processes was not given, so that a run may have more.
    """
    line = _CommandLine(argv)
    values, problems = GivenOptions(), line.problems
    variables: dict[str, Any] = {}
    with collecting(problems):
        variables = _environment(os.environ if environ is None else environ)
    values.take(variables, {name: f"HAL_{name.upper()}" for name in variables})
    microbatches = []  # requirements on their number
    if line.config is not None:
        reading = read_config(line.config, line.values)
        problems += reading.problems
        microbatches += _microbatches(reading)
        values.take(reading.values, {name: f"{reading.file}: {key}" for name, key in reading.origins.items()})
        values.notes += reading.notes
        values.noted |= reading.noted
    given = line.values
    if values.get("tokenizer_type") != given.get("tokenizer_type", values.get("tokenizer_type")):
        # A tokenizer given on the command line replaces the file's tokenizer and all its options.
        for name in OPTIONS:
            another_file = name == "tokenizer_model" and given["tokenizer_type"] == "NullTokenizer"  # a folder to it
            if another_file or given["tokenizer_type"] not in readers(name):
                values.pop(name, None)
    _replace(values, given)
    values.take(given, dict.fromkeys(given, "command line"))
    reading = Reading("command line", convert, base=dict(values))
    translate_options(reading, line.foreign)
    problems += reading.problems
    microbatches += _microbatches(reading)
    for name in reading.superseded & set(values):
        values.pop(name)
    with collecting(problems):
        _agree(reading, values, among=given)
    values.noted |= reading.noted
    if line.deepspeed is not None:
        reading = _read_deepspeed(line.deepspeed, values)
        _drop_zero(reading, values, showing)
        problems += reading.problems
        microbatches += _microbatches(reading)
        with collecting(problems):
            _agree(reading, values)
        values.notes += reading.notes
        values.noted.update(reading.noted)
    for count, where in microbatches:
        with collecting(problems):
            _require_microbatches(values, count, where)
    _adopt_megatron_defaults(values)
    _drop_idle_parallelism(values, not showing or "WORLD_SIZE" in os.environ or "nproc_per_node" in values)
    values.problems = problems
    return values


_DATA = ("data_path", "text_file", "train_data_path", "valid_data_path", "test_data_path", "mock_data")
_ITERATIONS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
_WARMUP = ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
_ACTIVATIONS = ("swiglu", "geglu", "squared_relu")
_REPLACED = {
    **dict.fromkeys(("data_path", "text_file", "train_data_path", "mock_data"), _DATA),
    "train_iters": (*_SAMPLES, "num_train_epochs"),
    "train_samples": (*_ITERATIONS, "num_train_epochs"),
    "num_train_epochs": ("train_iters", "train_samples"),
    **dict.fromkeys(_WARMUP, _WARMUP),
    **dict.fromkeys(("fp16", "bf16"), ("fp16", "bf16")),
    **dict.fromkeys(_ACTIVATIONS, _ACTIVATIONS),
}
"""What a choice on the command line replaces of a file or of the environment: other data, other units of length,
another dtype, another activation."""


def _replace(values: GivenOptions, given: Mapping[str, Any]) -> None:
    for chosen in _REPLACED:
        if not given.get(chosen):
            continue
        for name in _REPLACED[chosen]:
            if values.get(name) and name not in given:
                where = values.origins.pop(name)
                values.notes.append(f"{where}: {flag(name)} {values.pop(name)!r} is replaced by {flag(chosen)}")


def _drop_zero(reading: Reading, values: GivenOptions, showing: bool) -> None:
    """A ZeRO stage over one replica has no effect, whatever a script sets beside its JSON file."""
    probe = _probe(values)
    replica = probe.tensor_model_parallel_size * probe.pipeline_model_parallel_size
    known = not showing or "WORLD_SIZE" in os.environ or "nproc_per_node" in values
    if known and world_size(probe) <= replica and reading.values.get("zero_stage"):
        reading.note(reading.origins.pop("zero_stage"), "no effect: there is one replica")
        reading.values.pop("zero_stage")


def _adopt_megatron_defaults(values: GivenOptions) -> None:
    """Megatron's defaults that depend on other options: GPT2BPETokenizer for a vocabulary and merges, and a batch of
    one microbatch per replica."""
    if "tokenizer_type" not in values and {"vocab_file", "merge_file"} <= set(values):
        why = f"{values.origins['vocab_file']} (Megatron's default for a vocabulary and merges)"
        values.take({"tokenizer_type": "GPT2BPETokenizer"}, {"tokenizer_type": why})
    probe = _probe(values)
    replicas = _replicas(probe)
    if "global_batch_size" not in values and replicas > 1 and probe.micro_batch_size > 0:
        size = probe.micro_batch_size * replicas
        values.take({"global_batch_size": size}, {"global_batch_size": ONE_MICROBATCH})


def _replicas(probe: Config) -> int:
    """The data-parallel replicas, by the number of processes; at least 1."""
    replica = probe.tensor_model_parallel_size * probe.pipeline_model_parallel_size * probe.context_parallel_size
    return max(1, world_size(probe) // max(1, replica))


def _drop_idle_parallelism(values: GivenOptions, processes_known: bool) -> None:
    """Turns options that need several ranks into notes if there is only one, as in other trainers.

    They change no result. Command lines and files contain them for every layout. processes_known: whether the number of
    replicas is.
    """
    probe = _probe(values)
    replica = probe.tensor_model_parallel_size * probe.pipeline_model_parallel_size
    alone, zero = world_size(probe) <= replica, zero_stage(probe)
    idle = {}
    if not processes_known:
        pass
    elif alone:
        why = "one replica has nothing to share or to reduce"
        idle = dict.fromkeys(("ddp_bucket_size", "overlap_grad_reduce", "use_distributed_optimizer", "zero_stage"), why)
    elif zero:
        why = f"with ZeRO stage {zero} every layer is one bucket, whose reduction overlaps with the backward pass"
        idle = dict.fromkeys(("ddp_bucket_size", "overlap_grad_reduce"), why)
        if probe.zero_stage:
            idle["use_distributed_optimizer"] = f"it is ZeRO stage 1, and --zero-stage {zero} includes it"
    if probe.tensor_model_parallel_size == 1:
        idle["sequence_parallel"] = "it shards what tensor parallelism replicates"
        idle["tp_comm_overlap"] = "tensor parallelism over one rank does not communicate"
    elif not probe.sequence_parallel:
        idle["tp_comm_overlap"] = "it overlaps the gathers and reduce-scatters of --sequence-parallel"
    elif probe.fp8_format is not None:
        idle["tp_comm_overlap"] = "no backend has products of float8 with their communication"
    for name, why in idle.items():
        if values.get(name):
            values.notes.append(f"{values.origins.pop(name)}: {flag(name)} {values.pop(name)!r} has no effect: {why}")


def _probe(values: GivenOptions) -> Config:
    """A Config of the parallel sizes and batch sizes only, which exists even if other values are wrong."""
    unread = ("rampup_batch_size", "step_batch_size_schedule", "pad_vocab_size_to", "train_samples")
    names = [name for name in values if name in _OPTIONS and name not in unread]
    return Config(**{name: values[name] for name in names})


def _microbatches(reading: Reading) -> list[tuple[int, str]]:
    """(microbatches per step and replica, the key that requires it), if the file has one."""
    count, key = reading.values.pop(MICROBATCHES, None), reading.origins.pop(MICROBATCHES, "")
    return [] if count is None else [(count, f"{reading.file}: {key}")]


def _agree(reading: Reading, values: GivenOptions, among: Mapping[str, Any] | None = None) -> None:
    """Adds a file's values to those given elsewhere. Values must agree; environment variables are overridden, and with
    `among` all values but these."""
    problems = []
    for name, value in reading.values.items():
        origin = values.origins.get(name, "")
        fixed = name in values and not origin.startswith("HAL_") and (among is None or name in among)
        if fixed and values[name] != value:
            problems.append(
                ConfigError(
                    f"{reading.file}: {reading.origins[name]} and {origin} contradict each other about {flag(name)}: "
                    f"{value!r} and {values[name]!r}; remove one of them"
                )
            )
        if not fixed:
            values.take({name: value}, {name: f"{reading.file}: {reading.origins[name]}"})
    if problems:
        raise report(problems)


def _require_microbatches(values: GivenOptions, count: int, where: str) -> None:
    """Sets the global batch size to `count` microbatches per replica, or the microbatch to its share of a given one.
    Raises ConfigError if both were given otherwise."""
    probe = _probe(values)
    replicas = _replicas(probe)
    share, rest = divmod(probe.global_batch_size, count * replicas)
    if "global_batch_size" in values and "micro_batch_size" not in values and share and not rest:
        values.take({"micro_batch_size": share}, {"micro_batch_size": f"{where}, of the global batch"})
        return
    size = count * probe.micro_batch_size * replicas
    if values.get("global_batch_size", size) != size:
        raise ConfigError(
            f"{where} requires {count} microbatches of {probe.micro_batch_size} on each of {replicas} replicas, a "
            f"global batch of {size}, but --global-batch-size is {values['global_batch_size']}; remove one of them"
        )
    if "global_batch_size" not in values:
        values.take({"global_batch_size": size}, {"global_batch_size": where})


def build(values: Mapping[str, Any], check: Callable[[Config], None] = check) -> Config:
    """A validated Config from option values by field name. All values count as given by the user.

    Raises ConfigError with all problems: those found while reading the values, and those that `check` finds.
    """
    problems = list(values.problems) if isinstance(values, GivenOptions) else []
    for name in values:
        if name not in _OPTIONS:
            problems.append(ConfigError(f"there is no option '{name}'.{_nearest(name)}", "unknown"))
    if not any(p.kind != "refused" for p in problems):
        # Without unknown names and wrong values, what follows from the values is worth checking.
        with collecting(problems):
            config = resolve({name: value for name, value in values.items() if name in _OPTIONS})
            check(config)
    if problems:
        raise report(problems)
    config = resolve(values)
    config.notes += tuple(idle(config))
    return config


def read_config(path: str, given: Mapping[str, Any] | None = None) -> Reading:
    """Reads a --config file: options by name, or the sections of MindSpeed-Core-MS, MindFormers or its tutorial.

    Unknown keys and values that HAL cannot follow are in the result's `problems`. Raises ConfigError for any other
    content. given: options of the command line, on which some keys depend.
    """
    named = Path(path).name == path and not path.endswith((".yaml", ".yml", ".json"))
    file = ready_configuration(path) if named else Path(path)
    content = load(file, f"--config {path}")
    if content is None:
        raise ConfigError(f"--config {path} is empty; it must hold `option: value` lines")
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `option: value` lines; it holds {type(content).__name__}")
    reading = Reading(f"--config {path}", convert, base=given or {})
    if any(section in content for section in mindformers.SECTIONS[:2]):
        front: Any = mindformers
    elif any(section in content for section in mindformers_trainer.SECTIONS):
        front = mindformers_trainer
        front.require_gpt(reading, content)
    elif any(section in content for section in mindspeed.SECTIONS):
        model = content.get("model_config")
        front = mindformers if isinstance(model, dict) and "llm" in model else mindspeed
    else:
        _read_flat(reading, content)
        return reading
    # HAL's options may be mixed with the sections, because those systems set some options on their command lines.
    theirs = front.rules()
    ours = {k: v for k, v in content.items() if str(k).replace("_", "-") in _SPELLINGS and k not in theirs}
    translate(reading, {key: value for key, value in content.items() if key not in ours}, theirs)
    with collecting(reading.problems):
        front.finish(reading)
    reading.drop_deferred()
    _read_flat(reading, ours)
    return reading


def _read_flat(reading: Reading, content: Mapping[Any, Any]) -> None:
    """Reads options by name: HAL's, and those of other trainers."""
    spelled_as: dict[str, Any] = {}
    foreign: dict[str, tuple[str, list[str]]] = {}

    def take_one(key: Any, value: Any) -> None:
        spelled = str(key).replace("_", "-")
        name = _SPELLINGS.get(spelled)
        if name is None and spelled in table():
            if value not in (None, False):
                foreign[spelled] = str(key), [] if value is True else [str(v) for v in _listed(value)]
            return
        if name is None:
            raise ConfigError(f"{reading.file}: there is no option '{key}'.{_nearest(spelled)}", "unknown")
        if name in spelled_as:
            raise ConfigError(f"{reading.file} sets '{name}' twice, as {spelled_as[name]} and as {key}")
        spelled_as[name] = key
        if f"{spelled} {value}" in table():
            foreign[f"{spelled} {value}"] = str(key), [str(value)]
            return
        if isinstance(value, str) and spelled in table():
            value = table()[spelled].values.get(value, value)
        if value is not None:
            value = convert(name, value, f"{reading.file}: {key}")
            reading.set(name, not value if spelled == _OPTIONS[name].metadata["no"] else value, str(key))

    for key, value in content.items():
        with collecting(reading.problems):
            take_one(key, value)
    translate_options(reading, foreign)
    for name in reading.superseded:
        reading.values.pop(name, None)
        reading.origins.pop(name, None)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_deepspeed(path: str, given: Mapping[str, Any]) -> Reading:
    reading = Reading(f"--deepspeed-config {path}", convert, base=given)
    content = deepspeed.without_auto(load(Path(path), reading.file))
    if not isinstance(content, dict):
        raise ConfigError(f"{reading.file} must be a JSON object; it is {type(content).__name__}")
    translate(reading, content, deepspeed.rules())
    with collecting(reading.problems):
        deepspeed.finish(reading)
    reading.drop_deferred()
    return reading


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    texts = {name: environ.get(f"HAL_{name.upper()}") for name in _OPTIONS}
    return {name: convert(name, text, f"HAL_{name.upper()}") for name, text in texts.items() if text}


def _kind(name: str) -> type:
    hint = _TYPES[name]
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not types.NoneType)
    return tuple if typing.get_origin(hint) is tuple else hint


def convert(name: str, value: Any, where: str) -> Any:
    """`value` converted to the option's type: YAML reads 1e-3 as a string, and environment variables are strings.

    Raises ConfigError; `where` is the place that the message names.
    """
    kind = _kind(name)
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]
        if kind is tuple:
            if isinstance(value, (list, tuple)) and not any(isinstance(v, (list, dict)) for v in value):
                return tuple(_text(v) for v in value)
            if isinstance(value, (list, dict)):
                raise ValueError
            text = _text(value)
            return tuple(shlex.split(text) if _OPTIONS[name].metadata["words"] else text.split(","))
        if isinstance(value, (bool, list, dict)):
            raise ValueError
        converted = {int: _integer, str: _text}.get(kind, kind)(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ConfigError(f"{where}: expected {kind.__name__}, found {shown(value)}") from None
    choices = _OPTIONS[name].metadata["choices"]
    if choices and converted not in choices:
        raise ConfigError(f"{where}: choose one of {', '.join(choices)}; found {shown(value)}")
    return converted


def _integer(value: Any) -> int:
    """Accepts 5e8 too, which JSON and YAML do not read as an integer. Raises ValueError."""
    number = int(value) if isinstance(value, int) or str(value).lstrip("+-").isdecimal() else float(value)
    if number != int(number) or abs(number) >= 1 << 63:
        raise ValueError
    return int(number)


def _text(value: Any) -> str:
    """Raises ValueError for a text that no path and no file can contain."""
    text = str(value)
    if b"\0" in os.fsencode(text):
        raise ValueError
    return text


def _nearest(name: str) -> str:
    """A suggestion for an unknown name. Names must be very similar, since a wrong suggestion is worse than none."""
    known = [*_SPELLINGS, *table()]
    close = difflib.get_close_matches(name.lstrip("-").replace("_", "-"), known, n=1, cutoff=0.75)
    return f" Did you mean --{close[0]}?" if close else " --help lists the options."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The command line of `hal train`, built from the fields of Config."""
    command = _Parser(
        prog="hal train", description="Trains a GPT.", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    command.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="options by name, or the name of a ready configuration (llama-70b); the command line overrides them. "
        "The sections of MindSpeed-Core-MS and of the MindFormers tutorial are understood too",
    )
    command.add_argument(
        "--deepspeed-config",
        "--deepspeed_config",
        metavar="FILE.json",
        help="DeepSpeed's batch sizes, precision, ZeRO, optimizer and schedule; options given elsewhere must agree",
    )
    group: Any = command
    for option in _OPTIONS.values():
        if option.name in GROUPS:
            group = command.add_argument_group(GROUPS[option.name])
        _add(group, option.name)
    return command


def add_options(group: Any, names: Sequence[str]) -> None:
    """Adds the flags of these options to another command's parser."""
    for name in names:
        _add(group, name)


def _add(group: Any, name: str) -> None:
    option, kind = _OPTIONS[name], _kind(name)
    meta = option.metadata
    flags = [f"--{name.replace('_', '-')}", *(f"--{a}" for a in meta["aliases"])]
    default = "" if option.default in (None, False, ()) else f" (default {option.default})"
    keywords: dict[str, Any] = {"dest": name, "help": (meta["help"] + default).replace("%", "%%")}
    if kind is bool:
        group.add_argument(*flags, action="store_true", **keywords)
        if meta["no"]:
            group.add_argument(
                f"--{meta['no']}", action="store_false", dest=name, help=f"the opposite of --{name.replace('_', '-')}"
            )
    elif kind is tuple:
        split: dict[str, Any] = {"nargs": "+"} if meta["words"] else {"type": lambda text: text.split(",")}
        group.add_argument(*flags, action="extend", **split, metavar="X", **keywords)
    else:
        choices = meta["choices"] or None
        group.add_argument(
            *flags, type=kind, choices=choices, metavar=None if choices else kind.__name__.upper(), **keywords
        )


class _CommandLine:
    """The options of a command line, HAL's (`values`) and other trainers' (`foreign`), with the problems found.

    Options can be written with underscores. The last of repeated options counts; --pin and lists of files add up.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.values: dict[str, Any] = {}
        self.foreign: dict[str, tuple[str, list[str]]] = {}
        self.problems: list[ConfigError] = []
        self.config: str | None = None
        self.deepspeed: str | None = None
        words = list(argv)
        self.flags: set[str] = set()
        while words:
            word = words.pop(0)
            if word in ("-h", "--help"):
                parser().parse_args(["--help"])
            if not _is_flag(word):
                self._wrong(f"{word!r} is not an option; options begin with --", "unknown")
                continue
            name, equals, value = word[2:].partition("=")
            self.flags.add(name.replace("_", "-"))
            with collecting(self.problems):
                self._take(word, name.replace("_", "-"), value if equals else None, words)
        if {"use-flash-attn", "no-flash-attn"} <= self.flags:
            self._wrong("--use-flash-attn and --no-flash-attn contradict each other; give one", "wrong")

    def _wrong(self, text: str, kind: str) -> None:
        self.problems.append(ConfigError(text, kind))

    def _take(self, word: str, name: str, value: str | None, words: list[str]) -> None:
        """Takes one option, with its values from the beginning of `words` unless it is --name=value."""
        typed = word.partition("=")[0]
        if name in ("config", "deepspeed-config"):
            (path,) = self._values(typed, "1", value, words)
            setattr(self, name.partition("-")[0], path)
        elif name in _SPELLINGS:
            option = _SPELLINGS[name]
            meta, kind = _OPTIONS[option].metadata, _kind(option)
            if kind is bool:
                self._values(typed, "", value, words)
                self.values[option] = name != meta["no"]
                return
            row = table().get(name)
            takes = "+" if kind is tuple and meta["words"] else "1"
            given = self._values(typed, "+" if row and row.takes == "+" else takes, value, words)
            if takes == "1" and len(set(given)) > 1:
                raise ConfigError(f"{typed} {' '.join(given)}: all layers have the same; give one value", "refused")
            if f"{name} {given[0]}" in table():
                self.foreign[f"{name} {given[0]}"] = typed, given
                return
            if row:
                given = [row.values.get(word, word) for word in given]
            converted = convert(option, given if takes == "+" else given[0], typed)
            self.values[option] = (*self.values.get(option, ()), *converted) if kind is tuple else converted
        elif name in table():
            self.foreign[name] = typed, self._values(typed, table()[name].takes, value, words)
        else:
            while words and not _is_flag(words[0]):
                words.pop(0)
            raise ConfigError(f"there is no option {typed!r}.{_nearest(name)}", "unknown")

    def _values(self, typed: str, takes: str, value: str | None, words: list[str]) -> list[str]:
        """An option's values: none for "", so many for a number, one or more for "+"."""
        if value is not None:
            if takes == "":
                raise ConfigError(f"{typed} takes no value; found {value!r}")
            return shlex.split(value) if takes == "+" else [value]
        most = {"": 0, "+": len(words), "?": 1}.get(takes)
        least = {"": 0, "+": 1, "?": 0}.get(takes)
        most, least = int(takes) if most is None else most, int(takes) if least is None else least
        values: list[str] = []
        while words and len(values) < most and not _is_flag(words[0]):
            values.append(words.pop(0))
        if len(values) < least:
            raise ConfigError(f"{typed} needs {'a value' if least == 1 else f'{least} values'}")
        return values


def _is_flag(word: str) -> bool:
    return word.startswith("--") and word[2:3].isalpha()
