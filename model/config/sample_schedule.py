"""Schedules counted in sequences: the growth of the batch, the iterations of a run, and the learning rate's warm-up.

A run is given in iterations or in sequences (--train-samples). The formulas are Megatron's
(num_microbatches_calculator.py, training.py: update_train_iters, get_optimizer_param_scheduler), which counts the
learning-rate schedule in sequences in both cases, so that it does not depend on the growth of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import Config


def batch_size(c: Config, consumed: int) -> int:
    """The global batch size of the step that follows `consumed` sequences."""
    return _batch_size(c.rampup_batch_size, c.global_batch_size, consumed)


def _batch_size(ramp: tuple[str, ...], size: int, consumed: int) -> int:
    if not ramp:
        return size
    start, increment, samples = (int(n) for n in ramp)
    count = (size - start) // increment
    if consumed > samples or not count or not samples:
        return size
    return min(size, start + int(consumed / (samples / count)) * increment)


def batch_sizes(c: Config) -> list[int]:
    """All sizes that the global batch takes, ascending."""
    if not c.rampup_batch_size:
        return [c.global_batch_size]
    start, increment = (int(n) for n in c.rampup_batch_size[:2])
    return [*range(start, c.global_batch_size, increment), c.global_batch_size]


def iterations(c: Config, samples: int) -> int:
    """The number of steps of a run over `samples` sequences; a last partial batch is left out."""
    size = c.global_batch_size or c.micro_batch_size  # the former is None before its default is filled in
    if size < 1:
        return 0
    if not c.rampup_batch_size or not valid_ramp(c.rampup_batch_size, size):
        return samples // size
    steps = consumed = 0
    while consumed <= int(c.rampup_batch_size[2]) and consumed <= samples:
        consumed += _batch_size(c.rampup_batch_size, size, consumed)
        steps += 1
    return steps + max(0, samples - consumed) // size


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
