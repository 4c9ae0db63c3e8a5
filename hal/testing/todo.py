"""Which ops a training step asks for, in which order, and how much of its time each one takes.

Measured by training small GPTs on a backend that has every op (cpu_ref, or the references where it cannot be built), so
that it can be said of ops that the backend under construction does not have yet. Times hold for that backend and this
machine; the order holds everywhere.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hal.autograd import make_call
from hal.backend import Backend, Impl
from hal.dispatch import activated
from hal.errors import HalError
from hal.op import OPS
from hal.registry import make, probed

from .calls import Outcome, backward, bind, run
from .golden import SHAPES, config
from .reference import Reference
from .spy import Spy

SIZES = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "train_iters": 4}
_VOCABULARY, _WARM_UP = 2048, 1


@dataclass(frozen=True)
class Need:
    """One op: calls and share of a step's time (0 to 1, forward and backward) by model shape that asks for it."""

    op: str
    calls: dict[str, int]
    shares: dict[str, float]


@dataclass(frozen=True)
class Needs:
    """What training asks for, in the order of first use; `measured_on` is the backend the times are from."""

    measured_on: str
    needs: tuple[Need, ...]


class Stopwatch(Spy):
    """A spy that also adds up seconds by op, forward and backward."""

    def __init__(self, inner: Backend) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        super().__init__(inner)

    def _recorded(self, impl: Impl) -> Impl:
        op, call = impl.op, super()._recorded(impl).call

        def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Outcome, Tensor]]:
            given = bind(op, args, kwargs)
            wanted = any(isinstance(given[n], Tensor) and given[n].requires_grad for n in op.grads)
            # A graph of its own per call: that way the backward of every implementation can be timed, also torch's.
            # Only the one tensor saved beside it is activation checkpointing's to drop and compute again.
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                outcome = self._timed(op.name, lambda: run(op, call, given, wanted))
            result, kept = outcome.result, (outcome, given[op.grads[0]].detach())
            if isinstance(result, tuple):
                return tuple(r.data for r in result), kept
            return result.data, kept  # not detach(): who writes over a result must not count as writing to the graph

        def bwd(residuals: tuple[Outcome, Tensor], *dys: Tensor) -> tuple[Tensor | None, ...]:
            grads = self._timed(op.name, lambda: backward(residuals[0], dys))
            return tuple(grads.get(n) for n in op.grads)

        if op.grads:
            return dataclasses.replace(impl, call=make_call(op, forward, bwd, impl.id))
        return dataclasses.replace(impl, call=lambda *a, **k: self._timed(op.name, lambda: call(*a, **k)))

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        self.inner.synchronize()
        began = time.perf_counter()
        result = work()
        self.inner.synchronize()
        self.seconds[name] += time.perf_counter() - began
        return result


class _Data:
    """Random tokens."""

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(first)
        tokens = torch.randint(_VOCABULARY, (count, SIZES["seq_length"] + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure_needs() -> Needs:
    """Trains each of the golden model shapes for a few steps. Takes a few seconds."""
    backend = _complete_backend()
    found = {shape: _profile(backend, shape) for shape in SHAPES}
    order = dict.fromkeys(op for _, calls, _ in found.values() for op in calls)
    needs = []
    for op in order:
        asking = [shape for shape, (_, calls, _) in found.items() if op in calls]
        calls = {s: found[s][1][op] for s in asking}
        shares = {s: found[s][2][op] / found[s][0] for s in asking}
        needs.append(Need(op, calls, shares))
    return Needs(backend.name, tuple(needs))


def _complete_backend() -> Backend:
    try:
        backend = make("cpu_ref")
        if probed(backend).ok:
            backend.build()
            return backend
    except (
        HalError
    ):  # no compiler, say: the references are slower, but they are always there, and the report names them
        pass
    return Reference()


def _profile(backend: Backend, shape: str) -> tuple[float, Counter[str], Mapping[str, float]]:
    """(seconds of a step, calls by op in order of first use, seconds by op), each per step."""
    import hal
    from hal.model.gpt import GPT
    from hal.model.trainer import Trainer

    watch = Stopwatch(backend)
    with activated(watch):
        made = config(shape, torch.float32, vocabulary=_VOCABULARY, **SIZES)
        data: Any = {"train": _Data()}
        trainer = Trainer(made, GPT(made, hal.device()), data)
        for _ in range(_WARM_UP):
            trainer.step()
        watch.clear()
        watch.seconds.clear()
        steps = SIZES["train_iters"] - _WARM_UP
        began = time.perf_counter()
        for _ in range(steps):
            trainer.step()
        total = time.perf_counter() - began
    calls = Counter({name: count // steps for name, count in watch.counts().items()})
    return total / steps, calls, {n: s / steps for n, s in watch.seconds.items()}


def todo(name: str, impls: Sequence[str], needs: Needs) -> str:
    """What the backend `name`, which has the ops `impls`, still lacks, as text."""
    missing = [n for n in needs.needs if n.op not in impls]
    others = [op for op in OPS if op not in impls and op not in {n.op for n in needs.needs}]
    lines = [f"{name} has {len(needs.needs) - len(missing)} of the {len(needs.needs)} ops that training asks for."]
    if missing:
        columns = "".join(f"{shape:>10}" for shape in SHAPES)
        lines += [
            "Missing, in the order in which a training step first asks for them, with the share of a step's time that "
            "each would cover",
            f"(forward and backward, measured on {needs.measured_on} on this machine, float32, for three model shapes; "
            "- = not asked for):",
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
        lines.append(f"Missing and not asked for by these models: {', '.join(others)}.")
    if not missing and not others:
        lines.append("Nothing is missing.")
    return "\n".join(lines)
