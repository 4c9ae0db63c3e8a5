"""`hal train`: parses the options, builds the trainer, trains, and writes the report.

Exit codes: 0 done (also after Ctrl-C or SIGTERM, with a checkpoint saved), 1 failed, 2 wrong usage or input.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hal
from hal import CollectiveFailed, HalError
from hal.launch.agent import Job, run
from hal.launch.worker import RESUME, expect_stop

from ..checkpoint import reader
from ..checkpoint.lineage import foreign
from ..checkpoint.saved_config import adopt, backend_of
from ..checkpoint.writer import SaveFailed
from ..common.atomic_files import FILE_MODE, make_folder, private, require_writable
from ..common.stop_request import StopRequest
from ..config.command_line import build as build_config
from ..config.command_line import read
from ..config.flops import idle_parameters
from ..config.sample_schedule import total_samples
from ..config.schema import Config, ConfigError, GivenOptions
from ..config.validation import check, evaluates
from ..data.finetuning.example_split import ExampleSplit
from ..data.splits import open_splits
from ..data.text_size import text_size
from ..data.tokenizers.build import build_tokenizer
from ..data.tokenizers.tokenizer import Tokenizer
from ..inference.decoding import generate
from .observed import Observed
from .run_log import NullRunLog, RunLog
from .step_result import StepResult, TrainingFailed
from .trainer import Trainer, make_trainer, peak_memory_bytes


def main(argv: Sequence[str] | None = None, prepare: Callable[[GivenOptions], None] = lambda values: None) -> int:
    """Runs `hal train` with these arguments and returns its exit code.

    prepare: called with the options before those of a checkpoint are added.
    """
    try:
        values = read(sys.argv[1:] if argv is None else argv)
        with private():
            prepare(values)
        adopt(values)
        config = build_config(values)
        if config.backend is None:
            raise ConfigError(f"no backend was chosen; give --backend, one of {', '.join(hal.backend_names())}")
        if config.nproc_per_node > 1 and "WORLD_SIZE" not in os.environ:
            return _launch(config, sys.argv[1:] if argv is None else argv)
        pins = dict(pin.split("=", 1) for pin in config.pin)
        options: dict[str, Any] = {"simulate": True} if config.simulate else {}
        # Backends without random numbers of a vendor do not have the option, and say so if it is given.
        options |= {"rng": config.rng} if config.rng != "hal" else {}
        mode = config.deterministic_mode
        with backend_of(values.origins["backend"] if "backend" in values.adopted else None):
            hal.use(config.backend, fallback=config.fallback, pin=pins, deterministic=mode, **options)
        with private():
            train(config)
    except (TrainingFailed, SaveFailed, CollectiveFailed) as error:
        print(f"hal train: {error}", file=sys.stderr)
        return 1
    except (HalError, OSError) as error:
        print(f"hal train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hal train: interrupted", file=sys.stderr)
        return 130
    return 0


def _launch(config: Config, argv: Sequence[str]) -> int:
    """Runs this command on --nproc-per-node processes of this machine."""
    logs = None if config.run_dir is None else _writable(Path(config.run_dir), "--run-dir") / "logs"
    with private():
        return run(Job(["train", *argv], nproc=config.nproc_per_node, log_dir=logs))


def train(config: Config) -> Trainer:
    """Trains on the active backend and writes the run's folder. Returns the trainer after the run."""
    save = _save_folder(config)
    with StopRequest() as stop, _alone(save):
        _continue_after_restart(config)
        trainer, tokenizer = build(config)
        if config.load and (
            config.exit_on_missing_checkpoint
            or config.load != config.save
            or reader.newest(Path(config.load)) is not None
        ):
            trainer.load(Path(config.load))
        _require_free(config, trainer)
        started = datetime.datetime.fromtimestamp(trainer.all_reduce_max(int(time.time())))
        folder = Path(config.run_dir or f"runs/{started:%Y%m%d-%H%M%S}")
        folder = _writable(folder, "--run-dir") if trainer.lead else folder
        log = RunLog(config, folder, trainer.iteration, trainer.verified) if trainer.lead else NullRunLog()
        with log as report:
            _announce(report, trainer)
            if isinstance(report, RunLog):
                report.tokenizer = text_size(config, tokenizer, trainer.data["train"])
            trainer.write_line = report.write_line
            observed = Observed(config, trainer, folder, report)
            times = _StopTime(report, observed)
            try:
                with trainer.verified.watching(folder / "wrong-calls"):
                    trainer.run(
                        stop=lambda: stop.asked is not None,
                        on_step=times.step,
                        on_evaluation=report.evaluation,
                        on_save=times.saved,
                        before_save=times.saving,
                        around_step=observed.step,
                    )
                observed.finish()
                stopped = trainer.all_reduce_max(stop.asked is not None)
                if stopped or save is not None:
                    report.record()
                    trainer.save(save or folder / "checkpoints")
                trainer.saver.wait()
            except TrainingFailed:
                trainer.saver.wait()  # all ranks reach this line, because a failed save raises on all of them
                raise
            for path in trainer.saver.finished():
                report.write_line(f" saved {path}")
            if stopped:
                report.write_line(
                    f" stopped by {stop.asked or 'a signal to another process'} after iteration {trainer.iteration}"
                )
            prompt, text = _sample(config, trainer, tokenizer, 0 if stopped else config.sample_tokens)
            report.finish(prompt, text)
            if text:
                report.write_line(f" a sample:\n{prompt}{text}")
            memory = f"{peak_memory_bytes() / 2**20:,.0f} MiB at the peak"
            report.write_line(f" {report.tokens_per_second():.0f} tokens/s; {memory}; results are in {folder}")
    return trainer


class _StopTime:
    """Measures the longest step and save, and reports to the launcher how long a request to stop may take."""

    def __init__(self, report: RunLog | NullRunLog, observed: Observed) -> None:
        self._observed, self._report, self._step, self._save, self._told = observed, report, 0.0, 0.0, 0.0
        self._began = time.monotonic()

    def step(self, result: StepResult) -> None:
        """Called after each step."""
        self._report.step(result)
        self._observed.after(result)
        self._step = max(self._step, result.seconds)
        expected = 10 + 2 * (self._step + self._save)
        if isinstance(self._report, RunLog) and expected > 1.2 * self._told:
            self._told = expected
            expect_stop(expected)

    def saving(self) -> None:
        """Called before each save."""
        self._report.record()
        self._began = time.monotonic()

    def saved(self, path: Path) -> None:
        """Called when a save is complete."""
        self._report.write_line(f" saved {path}")
        self._save = max(self._save, time.monotonic() - self._began)


def _continue_after_restart(config: Config) -> None:
    """Has a run of a job with restarts continue from its own checkpoints, if it has written any.

    This does not depend on how often this process was started, since machines may join the job later. Raises
    ConfigError for --new-dataset in the run's own folder, where a restart would begin with the first sample again.
    """
    if RESUME in os.environ and config.new_dataset and config.load == config.save:
        raise ConfigError("--new-dataset in a job with restarts needs a --save that is not --load")
    if RESUME in os.environ and config.save is not None and reader.newest(Path(config.save)) is not None:
        config.load = config.save
        config.finetune = config.no_load_optim = config.new_dataset = False


def build(config: Config) -> tuple[Trainer, Tokenizer]:
    """The trainer of a config, at iteration 0 on the active backend, and the tokenizer of its data."""
    tokenizer = build_tokenizer(config)
    config.set_vocabulary(tokenizer.vocab_size)
    samples = {"train": total_samples(config)}
    if evaluates(config):
        samples["valid"] = config.eval_iters * config.eval_batch_size
    # Data is opened first, because once the world is initialised, megatron-core builds index maps on one rank only.
    data = open_splits(config, tokenizer, samples)
    for name, split in data.items():
        if isinstance(split, ExampleSplit):
            config.notes += (f"{name}: {split.dataset.summary()}",)
            if name == "train":
                config.set_epoch(split.dataset.sequences)
                check(config)  # of what depends on the number of steps
    return make_trainer(config, data), tokenizer


def _save_folder(config: Config) -> Path | None:
    """The folder for the final checkpoint, or None. Raises ConfigError before the training rather than after it."""
    return None if config.save is None else _writable(Path(config.save), "--save")


def _writable(folder: Path, option: str) -> Path:
    """Creates a folder if it does not exist. Raises ConfigError unless it is writable."""
    try:
        require_writable(make_folder(folder))
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be written ({error.strerror}); give a folder that can") from None
    return folder


@contextlib.contextmanager
def _alone(save: Path | None) -> Iterator[None]:
    """Holds a lock that keeps other runs from saving in this folder; the kernel releases it if the process dies."""
    if save is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    # A file is locked, not the folder: common/atomic_files.py locks the folder while index maps and corpora are built.
    handle = os.open(save / "lock", os.O_RDONLY | os.O_CREAT, FILE_MODE)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--save {save}: another run is saving there; wait for its end, or give another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # explicit, because a forked process may still have the file open
    finally:
        os.close(handle)


def _require_free(config: Config, trainer: Trainer) -> None:
    """Refuses to mix a new run's checkpoints with those of a longer one, or to replace another run's."""
    if config.save is None:
        return
    save, start = Path(config.save), trainer.iteration
    there = reader.newest(save)
    # A run that continues in its own folder has just chosen the checkpoint that it continues.
    if config.load != config.save and there is not None and there > start:
        raise ConfigError(
            f"--save {save} holds a checkpoint of iteration {there}, and this run starts at {start}; continue "
            f"it with --load {save}, or give another folder"
        )
    others = foreign(save, trainer.state())
    if others:
        raise ConfigError(
            f"--save {save} holds checkpoints of another run from iteration {start} on, which this run would replace "
            f"({', '.join(map(str, others[:5]))}); give another folder, or remove them"
        )


def _announce(report: RunLog | NullRunLog, trainer: Trainer) -> None:
    backend, count = hal.backend(), trainer.parameter_count()
    simulated = " (simulated)" if backend.simulated else ""
    at, end = trainer.iteration, trainer.config.train_iters
    todo = f"iterations {at + 1} to {end}" if at < end else f"at iteration {at}: --train-iters {end} leaves none to do"
    idle = idle_parameters(trainer.config)
    used = f", of which a token uses {count - idle:,}," if idle else ""
    report.write_line(
        f" {count:,} parameters ({trainer.config.params_dtype}){used} on {backend.name}{simulated}, {trainer.device}; "
        f"{todo}"
    )
    for note in (*trainer.config.notes, *trainer.notes):
        report.write_line(f" note: {note}")
    if trainer.config.noted:
        report.write_line(f" accepted, without effect here: {', '.join(trainer.config.noted)}")


def _sample(config: Config, trainer: Trainer, tokenizer: Tokenizer, count: int) -> tuple[str, str]:
    """(prompt, continuation): the prompt is the beginning of one of the run's texts."""
    split = trainer.data.get("valid") or trainer.data["train"]
    tokens, labels = split.fetch(0, 1)
    # Of an example, what comes before its answer.
    shown_tokens = 1 + int((labels[0] >= 0).int().argmax()) if config.sft else max(1, config.seq_length // 4)
    prompt = [i for i in tokens[0, :shown_tokens].tolist() if i != tokenizer.eod] or [tokenizer.eod]
    rng = trainer.rng.fork("sample", trainer.iteration)
    model = trainer.whole_model() if count else trainer.model
    if not trainer.lead:
        return "", ""
    continuation = generate(model, tokenizer, prompt, count, temperature=config.sample_temperature, rng=rng)
    # Shown as one text, because a character may begin in the prompt and end in the continuation.
    text, shown = tokenizer.display([*prompt, *continuation]), tokenizer.display(prompt)
    return (shown, text[len(shown) :]) if text.startswith(shown) else (shown, tokenizer.display(continuation))
