"""Schedules counted in sequences: the growth of the batch, the iterations of a run, and the learning rate's warm-up.

A run is given in iterations or in sequences (--train-samples). The formulas are Megatron's
(num_microbatches_calculator.py, training.py: update_train_iters, get_optimizer_param_scheduler), which counts the
learning-rate schedule in sequences in both cases, so that it does not depend on the growth of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import Config


_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def batch_parts(c: Config) -> list[tuple[int, int]]:
    """(first sequence, global batch size) of the parts of --step-batch-size-schedule, in order; none without it.

    Raises ValueError if it is not THRESHOLD:SIZE ..., with ascending thresholds in tokens that begin at 0.
    """
    parts = []
    for entry in " ".join(c.step_batch_size_schedule).replace(",", " ").split():
        threshold, size = map(_number, entry.split(":"))
        parts.append((threshold // c.seq_length, size))
    starts = [start for start, _ in parts]
    if parts and (starts[0] != 0 or starts != sorted(set(starts)) or min(size for _, size in parts) < 1):
        raise ValueError("parts must begin at 0 and ascend")
    return parts


def _number(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper())
    return int(float(text[:-1]) * unit if unit else float(text))


def full_batch_size(c: Config) -> int:
    """The default of --global-batch-size: the last of --step-batch-size-schedule, or a microbatch."""
    try:
        return batch_parts(c)[-1][1]
    except (ValueError, IndexError, ZeroDivisionError, OverflowError):
        return c.micro_batch_size


def batch_size(c: Config, consumed: int) -> int:
    """The global batch size of the step that follows `consumed` sequences."""
    if c.step_batch_size_schedule:
        return next(size for start, size in reversed(batch_parts(c)) if consumed >= start)
    return _ramped(c.rampup_batch_size, c.global_batch_size, consumed)


def _ramped(ramp: tuple[str, ...], size: int, consumed: int) -> int:
    if not ramp:
        return size
    start, increment, samples = (int(n) for n in ramp)
    count = (size - start) // increment
    if consumed > samples or not count or not samples:
        return size
    return min(size, start + int(consumed / (samples / count)) * increment)


def batch_sizes(c: Config) -> list[int]:
    """All sizes that the global batch takes, ascending."""
    if c.step_batch_size_schedule:
        return sorted({size for _, size in batch_parts(c)})
    if not c.rampup_batch_size:
        return [c.global_batch_size]
    start, increment = (int(n) for n in c.rampup_batch_size[:2])
    return [*range(start, c.global_batch_size, increment), c.global_batch_size]


def iterations(c: Config, samples: int) -> int:
    """The number of steps of a run over `samples` sequences; a last partial batch is left out, but with
    --step-batch-size-schedule filled up, as in Megatron."""
    if c.step_batch_size_schedule:
        return _steps_of_parts(c, samples)
    size = c.global_batch_size or c.micro_batch_size  # the former is None before its default is filled in
    if size < 1:
        return 0
    if not c.rampup_batch_size or not valid_ramp(c.rampup_batch_size, size):
        return samples // size
    steps = consumed = 0
    while consumed <= int(c.rampup_batch_size[2]) and consumed <= samples:
        consumed += _ramped(c.rampup_batch_size, size, consumed)
        steps += 1
    return steps + max(0, samples - consumed) // size


def _steps_of_parts(c: Config, samples: int) -> int:
    try:
        parts = batch_parts(c)
    except (ValueError, ZeroDivisionError, OverflowError):
        return 0  # validation.py reports it
    steps = consumed = 0
    for (_, size), end in zip(parts, [*(start for start, _ in parts[1:]), samples]):
        count = max(0, -(-(min(end, samples) - consumed) // size))
        steps, consumed = steps + count, consumed + count * size
    return steps


def valid_batches(c: Config) -> bool:
    """Whether the options that let the batch grow are valid."""
    try:
        batch_parts(c)
    except (ValueError, ZeroDivisionError, OverflowError):
        return False
    return not c.rampup_batch_size or valid_ramp(c.rampup_batch_size, c.global_batch_size)


def valid_ramp(words: tuple[str, ...], size: int) -> bool:
    """Whether --rampup-batch-size is START INCREMENT SAMPLES, and increments lead from START to the batch `size`."""
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return False
    start, increment, _ = (int(word) for word in words)
    return 0 < start <= size and increment > 0 and (size - start) % increment == 0


def learning_rate_samples(c: Config) -> tuple[float, int, int]:
    """(warm-up, decay, final decay of WSD) of the learning rate, in sequences; a fraction of them may be a fraction."""
    if c.train_samples is None:
        size = c.global_batch_size
        decay, wsd = c.lr_decay_iters * size, (c.lr_wsd_decay_iters or 0) * size
        warmup: float = c.lr_warmup_iters * size
    else:
        decay, wsd = c.lr_decay_samples or c.train_samples, c.lr_wsd_decay_samples or 0
        warmup = c.lr_warmup_samples
    if c.lr_warmup_fraction is not None:
        warmup = c.lr_warmup_fraction * decay
    return warmup, decay, wsd


def total_samples(c: Config) -> int:
    """The sequences of the run at the full batch size, over which the weight decay changes."""
    return c.train_iters * c.global_batch_size if c.train_samples is None else c.train_samples
