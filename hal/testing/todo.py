"""The ops that a training step calls, in order of first use, and the share of its time that each one takes.

Measured by training small GPTs on the references, which need no compiler and include the ops that the backend under
construction does not have yet. The shares are those of the references on this machine; the order is every backend's.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hal.core.autograd import make_call
from hal.core.backend import Backend, Impl
from hal.core.dispatch import activated
from hal.core.op import OPS, Op

from .calls import Outcome, backward, bind, run
from .golden import SHAPES, config
from .reference import Reference
from .spy import Spy

SIZES = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "train_iters": 4}
_VOCABULARY, _WARM_UP = 2048, 1


@dataclass(frozen=True)
class Need:
    """One op: calls per step and share of its time (0 to 1, forward and backward) by model shape that uses it."""

    op: str
    calls: dict[str, int]
    shares: dict[str, float]


@dataclass(frozen=True)
class Needs:
    """The ops that training needs, in order of first use; `measured_on` is the backend of the times."""

    measured_on: str
    needs: tuple[Need, ...]


class Stopwatch(Spy):
    """A spy that also adds up seconds by op, forward and backward."""

    def __init__(self, inner: Backend) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        super().__init__(inner)

    def _recorded(self, impl: Impl) -> Impl:
        op, call = impl.op, super()._recorded(impl).call
        if op.grads:
            timed = _TimedGraph(op, call, functools.partial(self._timed, op.name))
            return dataclasses.replace(impl, call=make_call(op, timed.forward, timed.bwd, impl.id))
        return dataclasses.replace(impl, call=lambda *a, **k: self._timed(op.name, call, *a, **k))

    def _timed(self, name: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`work(*args, **kwargs)`, with its time added to the op `name`; the device is idle before and after."""
        self.inner.synchronize()
        began = time.perf_counter()
        result = work(*args, **kwargs)
        self.inner.synchronize()
        self.seconds[name] += time.perf_counter() - began
        return result


@dataclass(frozen=True)
class _TimedGraph:
    """A timed forward and backward made of an implementation's call, for `make_call`.

    Each call records a separate autograd graph, which its backward then runs. In this way the backward of every
    implementation can be timed, including those that torch differentiates.
    """

    op: Op[Any, Any]
    call: Callable[..., Any]
    timed: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Outcome, Tensor]]:
        given = bind(self.op, args, kwargs)
        with_grad = any(isinstance(given[n], Tensor) and given[n].requires_grad for n in self.op.grads)
        # Activation checkpointing drops the tensors that autograd saves and computes the forward again when they are
        # needed. The hooks exclude this call's own graph from that. The tensor returned in addition to the outcome is
        # saved for checkpointing to drop, so that it still sees one saved tensor per call and recomputes.
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            outcome = self.timed(run, self.op, self.call, given, with_grad)
        residuals = outcome, given[self.op.grads[0]].detach()
        # detach() would share its version counter with this call's graph, whose backward would then raise where a
        # model writes over the result.
        if isinstance(outcome.result, tuple):
            return tuple(y.data for y in outcome.result), residuals
        return outcome.result.data, residuals

    def bwd(self, residuals: tuple[Outcome, Tensor], *dys: Tensor) -> tuple[Tensor | None, ...]:
        grads = self.timed(backward, residuals[0], dys)
        return tuple(grads.get(name) for name in self.op.grads)


class _Data:
    """Random tokens."""

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(first)
        tokens = torch.randint(_VOCABULARY, (count, SIZES["seq_length"] + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure_needs() -> Needs:
    """Trains each of the golden model shapes for a few steps. Takes a few seconds."""
    backend = Reference()
    profiles = {shape: _profile(backend, shape) for shape in SHAPES}
    needs = []
    for op in dict.fromkeys(op for profile in profiles.values() for op in profile.calls):
        users = {shape: profile for shape, profile in profiles.items() if op in profile.calls}
        calls = {shape: profile.calls[op] for shape, profile in users.items()}
        shares = {shape: profile.seconds[op] / profile.step_seconds for shape, profile in users.items()}
        needs.append(Need(op, calls, shares))
    return Needs(backend.name, tuple(needs))


@dataclass(frozen=True)
class _Profile:
    """One training step: its seconds, calls by op in the order of first use, and seconds by op."""

    step_seconds: float
    calls: Mapping[str, int]
    seconds: Mapping[str, float]


def _profile(backend: Backend, shape: str) -> _Profile:
    from hal.model.training.trainer import make_trainer

    watch = Stopwatch(backend)
    with activated(watch):
        model_config = config(shape, torch.float32, vocabulary=_VOCABULARY, **SIZES)
        data: Any = {"train": _Data()}
        trainer = make_trainer(model_config, data, world=1)
        for _ in range(_WARM_UP):
            trainer.step()
        watch.clear()
        watch.seconds.clear()
        steps = SIZES["train_iters"] - _WARM_UP
        began = time.perf_counter()
        for _ in range(steps):
            trainer.step()
        total = time.perf_counter() - began
    calls = {name: count // steps for name, count in watch.counts().items()}
    return _Profile(total / steps, calls, {name: s / steps for name, s in watch.seconds.items()})


def todo(name: str, impls: Sequence[str], needs: Needs) -> str:
    """The ops that the backend `name`, which has the ops `impls`, does not have yet, as text."""
    missing = [n for n in needs.needs if n.op not in impls]
    unused = [op for op in OPS.values() if op.name not in impls and op.name not in {n.op for n in needs.needs}]
    others = [op.name for op in unused if op.decompose is None]
    composed = [op.name for op in unused if op.decompose is not None]
    lines = [f"{name} has {len(needs.needs) - len(missing)} of the {len(needs.needs)} ops that training needs."]
    if missing:
        columns = "".join(f"{shape:>10}" for shape in SHAPES)
        lines += [
            "Missing, in the order in which a training step first uses them, with the share of a step's time that "
            "each would cover",
            f"(forward and backward, measured on {needs.measured_on} on this machine, float32, for three model shapes; "
            "- = not used):",
            f"  {'op':<20}{columns}   calls a step",
        ]
        for need in missing:
            shares = "".join(f"{need.shares[s]:>10.1%}" if s in need.shares else f"{'-':>10}" for s in SHAPES)
            calls = ", ".join(str(need.calls.get(s, "-")) for s in SHAPES)
            lines.append(f"  {need.op:<20}{shares}   {calls}")
        sums = "".join(f"{sum(n.shares.get(s, 0.0) for n in missing):>10.1%}" for s in SHAPES)
        lines.append(f"  {'together':<20}{sums}   the rest is covered, or outside of ops")
        lines.append(f"Until then: hal train --backend {name} --fallback reference ... runs them on their references.")
    if others:
        lines.append(f"Missing and not used by these models: {', '.join(others)}.")
    if not missing and not others:
        lines.append("Nothing is missing.")
    if composed:
        lines.append(f"Composed of other ops, so that an implementation can only be faster: {', '.join(composed)}.")
    return "\n".join(lines)
