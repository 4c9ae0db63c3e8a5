"""Makes a failing sample call smaller, for edge cases, which hypothesis does not draw.

A size that occurs in several shapes is reduced in all of them at once, because ops relate the sizes of their arguments.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hal.core.op import Op, Sample, TensorSpec
from hal.errors import HalError

SECONDS = 10.0
"""The time after which the smallest call found so far is taken."""


def shrink(op: Op[Any, Any], sample: Sample, dtype: torch.dtype, fails: Callable[[Sample], bool]) -> Sample:
    """A call with the smallest sizes found for which `fails` is still true; `sample` itself if none is smaller.

    fails(sample): whether the call fails. It is only asked of calls that the op's check accepts.
    """
    if not _may_shrink(sample):
        return sample
    end = time.monotonic() + SECONDS
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(sample):
            if time.monotonic() > end:
                return sample
            if _is_valid(op, candidate, dtype) and fails(candidate):
                sample, progress = candidate, True
                break
    return sample


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _specs(element)


def _all_specs(sample: Sample) -> list[TensorSpec]:
    return list(_specs([*sample.args, *sample.kwargs.values()]))


def _may_shrink(sample: Sample) -> bool:
    """Whether sizes may change: explicit values have the size of their tensor, and may be sizes themselves."""
    return not any(spec.dist == "values" for spec in _all_specs(sample))


def _smaller(sample: Sample) -> Iterator[Sample]:
    """Samples in which one size is smaller, the smallest first."""
    sizes = sorted({n for spec in _all_specs(sample) for n in spec.shape if n > 1}, reverse=True)
    for size in sizes:
        for smaller in dict.fromkeys((1, 2, size // 4, size // 2, size - 1)):
            if 1 <= smaller < size:
                yield _with_size(sample, size, smaller)


def _with_size(sample: Sample, size: int, smaller: int) -> Sample:
    def change(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            shape = tuple(smaller if n == size else n for n in value.shape)
            # Integers below a size are indices into a tensor of that size.
            high = smaller if value.dist == "int" and value.high == size else value.high
            return dataclasses.replace(value, shape=shape, high=high)
        if isinstance(value, (list, tuple)):
            return type(value)(change(v) for v in value)
        return value

    def changed(name: str, value: Any) -> Any:
        # Numbers of heads are sizes given as plain values.
        return smaller if name.endswith("heads") and value == size else change(value)

    return dataclasses.replace(
        sample,
        args=tuple(change(v) for v in sample.args),
        kwargs={name: changed(name, v) for name, v in sample.kwargs.items()},
    )


def _is_valid(op: Op[Any, Any], sample: Sample, dtype: torch.dtype) -> bool:
    try:
        args, kwargs = sample.build(dtype, "meta")
        op.verify(*args, **kwargs)
    except (HalError, RuntimeError, ValueError):
        return False
    return True
