"""`hal eval`: evaluates a trained model: LAMBADA's cloze accuracy, WikiText's perplexity, the validation loss, or tasks
of lm-evaluation-harness, with standard errors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import Parser, require_writable

if TYPE_CHECKING:
    from hal.model.config.schema import Config
    from hal.model.data.tokenizers.tokenizer import Tokenizer
    from hal.model.inference.load import Pretrained

_TASKS = ("LAMBADA", "WIKITEXT103", "valid", "test", "lm-eval")
_FOR = {
    "valid_data": ("LAMBADA", "WIKITEXT103"),
    "strict_lambada": ("LAMBADA",),
    "overlapping_eval": ("WIKITEXT103",),
    "eval_samples": ("valid", "test"),
    "lm_eval_tasks": ("lm-eval",),
    "lm_eval_path": ("lm-eval",),
    "limit": ("lm-eval",),
}
"""The tasks that read an option."""


def parser() -> Parser:
    """The options of `hal eval`."""
    from hal.model.checkpoint.saved_config import data_options
    from hal.model.inference import load

    command = Parser("eval", description=__doc__)
    add = command.add_argument
    add("--task", required=True, choices=_TASKS, help="task; valid and test are the splits of the training data")
    add("--valid-data", type=Path, metavar="FILE", help='LAMBADA: JSON lines with "text"; WIKITEXT103: the text')
    add("--strict-lambada", action="store_true", help="predict the last word instead of the last token (LAMBADA)")
    add("--overlapping-eval", type=int, metavar="N", help="stride of the windows in tokens (WIKITEXT103, default 32)")
    add("--eval-samples", type=int, metavar="N", help="samples (valid, test; default: as in training)")
    add("--lm-eval-tasks", nargs="+", metavar="NAME", help="tasks of lm-evaluation-harness (lm-eval)")
    add("--lm-eval-path", metavar="DIR", help="a folder with additional tasks (lm-eval)")
    add("--limit", type=int, metavar="N", help="maximum documents per task (lm-eval)")
    add("--output-file", type=Path, metavar="FILE.json", help="write the results to this file")
    load.add_arguments(command, "seed", "micro_batch_size", *data_options())
    return command


def main(argv: Sequence[str]) -> int:
    """Runs `hal eval` with these arguments."""
    from hal.model.apps.convert.pretrained_folder import converted
    from hal.model.checkpoint.saved_config import data_options
    from hal.model.inference import load

    command = parser()
    data = data_options()
    arguments = command.parse_args(argv)
    for name, tasks in _FOR.items():
        if getattr(arguments, name) not in (None, False) and arguments.task not in tasks:
            command.error(f"--{name.replace('_', '-')} would be ignored: it is for --task {' or '.join(tasks)}")
    for name in ("seed", *data):
        if hasattr(arguments, name) and arguments.task not in ("valid", "test"):
            command.error(f"--{name.replace('_', '-')} would be ignored: it is for --task valid or test")
    needed = {"LAMBADA": "valid_data", "WIKITEXT103": "valid_data", "lm-eval": "lm_eval_tasks"}.get(arguments.task)
    if needed and getattr(arguments, needed) is None:
        command.error(f"--task {arguments.task} needs --{needed.replace('_', '-')}")
    if arguments.eval_samples is not None and arguments.eval_samples < 1:
        command.error("--eval-samples must be at least 1")
    require_writable("--output-file", arguments.output_file)
    more = ("seed", "micro_batch_size", *data)
    prepare = _open_split(arguments) if arguments.task in ("valid", "test") else None
    body = _harness if arguments.task == "lm-eval" else _measure
    if hasattr(arguments, "load"):
        ranks = getattr(arguments, "tensor_model_parallel_size", 1)
        arguments.load = str(converted(Path(arguments.load), ranks) or arguments.load)
    return load.run_command("eval", argv, arguments, lambda m: body(arguments, m), *more, prepare=prepare)


def _open_split(arguments: argparse.Namespace) -> Callable[[Config, Tokenizer, Mapping[str, Any]], Any]:
    from hal.model.data.splits import open_splits

    def prepare(config: Config, tokenizer: Tokenizer, saved: Mapping[str, Any]) -> Any:
        samples = arguments.eval_samples or saved.get("eval_iters", 10) * (saved.get("global_batch_size") or 1)
        return open_splits(config, tokenizer, {arguments.task: samples})[arguments.task], samples

    return prepare


def _measure(arguments: argparse.Namespace, model: Pretrained) -> int:
    from hal.model.apps.evaluation import tasks
    from hal.model.apps.evaluation.scoring import score
    from hal.model.apps.evaluation.validation_loss import validation
    from hal.model.common.progress_bar import ProgressBar

    engine, batch, length = model.engine, model.config.micro_batch_size, model.config.seq_length
    if arguments.task in ("valid", "test"):
        split, samples = model.prepared
        return _report(arguments, model, validation(engine, split, samples, batch=batch))
    if arguments.task == "LAMBADA":
        task = tasks.lambada(arguments.valid_data, model.tokenizer, length, strict=arguments.strict_lambada)
    else:
        overlap = arguments.overlapping_eval
        task = tasks.wikitext(arguments.valid_data, model.tokenizer, length, overlapping_eval=overlap)
    with ProgressBar(len(task.examples), stream=sys.stderr if engine.lead else None) as progress:
        progress.update(0)
        scores = score(engine, task.examples, batch=batch, on_batch=progress.update)
    return _report(arguments, model, task.results(scores))


def _report(arguments: argparse.Namespace, model: Pretrained, results: Mapping[str, Any]) -> int:
    """Prints Megatron's line, each number with its standard error, and writes the results to --output-file."""
    from hal.model.common.atomic_files import write_text

    if not model.engine.lead:
        return 0
    cells = []
    for name, value in results.items():
        if name.endswith("_stderr"):
            continue
        error = results.get(f"{name}_stderr")
        number = f"{value:.4E}" if isinstance(value, float) else str(value)
        cells.append(f"{name}: {number}" + (f" (+- {error:.1E})" if error is not None else ""))
    print(f" validation results on {arguments.task} | " + " | ".join(cells) + " |")
    if arguments.output_file is not None:
        record = {"task": arguments.task, "iteration": model.iteration, "load": model.config.load, **results}
        write_text(arguments.output_file, json.dumps(record, indent=1) + "\n")
    return 0


def _harness(arguments: argparse.Namespace, model: Pretrained) -> int:
    from hal.model.apps.evaluation.harness import run_tasks
    from hal.model.common.atomic_files import write_text

    table, results = run_tasks(model, arguments.lm_eval_tasks, path=arguments.lm_eval_path, limit=arguments.limit)
    if model.engine.lead:
        print(table)
        if arguments.output_file is not None:
            write_text(arguments.output_file, json.dumps(results, indent=1, default=str) + "\n")
    return 0
