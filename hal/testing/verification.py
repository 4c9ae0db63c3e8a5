"""Recomputes a share of the calls of a running program with the float64 reference (ADR 0033).

Silent data corruption and wrong kernels are found where they do harm: in a training run, on its device, at its sizes.
Of a chosen call a few parts (`production/live_blocks.py`) are compared by the kit's tolerance rule, its outputs at once
and its gradients in the backward pass. A difference beyond the tolerance is a `Violation`, whose tensors are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.comm.contract import Comm
from hal.core import dispatch
from hal.core.backend import Impl
from hal.core.op import OPS, Op
from hal.errors import HalError
from hal.rng import Rng
from hal.untrusted import one_line

from .calls import Outcome, bind, invoke, map_tensors, outcome_of, tensors
from .checks import one_thread
from .production.block_comparison import Judge, Wrong
from .production.blocks import Block, Part
from .production.live_blocks import blocks_of

BLOCKS = 3
"""The parts of a call that are compared."""
PARTS = 4
"""The most calls of the reference for one block; one that needs more (all rows of a large tensor) is left out."""
KEPT = 3
"""The most violations of a process whose tensors are written to a file."""
KEPT_ELEMENTS = 1 << 26
"""The most elements of a call's arguments that are copied before the call, because it writes over them."""

_SUMS = {"linear_wgrad": ("dy", "main_grad", "main_bias_grad"), "grouped_linear_wgrad": ("dy", "main_grad")}
"""Ops that add gradients in place -> the arguments in which they are linear."""


@dataclass(frozen=True)
class Violation:
    """A result that is outside its tolerance. file: where the call's tensors are, None if they were not kept."""

    op: str
    implementation: str
    rank: int
    text: str
    file: Path | None

    def __str__(self) -> str:
        kept = "" if self.file is None else f"; its tensors are in {self.file} (`hal parity --replay FILE` repeats it)"
        return f"{self.op} ({self.implementation}) on rank {self.rank}: {self.text}{kept}"


class Verifier:
    """Compares calls that are chosen at random, one in 1 / rate on average.

    rate: in (0, 1]. seed, rank: determine which calls are chosen. folder: for the tensors of violations.

    >>> verifier = Verifier(1e-3, seed=1)           # doctest: +SKIP
    >>> with verifier.watching(): step()            # doctest: +SKIP
    >>> verifier.violations                         # doctest: +SKIP
    """

    def __init__(self, rate: float, *, seed: int, rank: int = 0, folder: Path | None = None) -> None:
        if not 0.0 < rate <= 1.0:
            raise HalError(f"the rate of calls to verify must be in (0, 1], got {rate}")
        self.rate, self.rank, self.folder = rate, rank, folder
        self.violations: list[Violation] = []
        self.worst: dict[str, float] = {}
        """The largest error of an op's verified calls, in tolerances."""
        self.calls: Counter[str] = Counter()
        """The number of verified calls of each op."""
        self.left_out: Counter[str] = Counter()
        """The number of chosen calls that were not compared, by op and reason."""
        self.seconds = 0.0
        self._random = random.Random(f"{seed} {rank}")
        self._left = 0
        self._choose()

    def watching(self) -> AbstractContextManager[None]:
        """Verifies the calls on the active backend within a `with` block."""
        return dispatch.wrapped_calls(self._around)

    def __str__(self) -> str:
        if not self.calls:
            return "verified 0 calls"
        op = max(self.worst, key=lambda name: self.worst[name])
        count = sum(self.calls.values())
        return f"verified {count} calls of {len(self.calls)} ops: at most {self.worst[op]:.3g} tolerances ({op})"

    def report(self) -> dict[str, Any]:
        """The results so far, as JSON values."""
        return {
            "rate": self.rate,
            "calls": dict(self.calls),
            "worst_error_in_tolerances": {op: e if math.isfinite(e) else None for op, e in self.worst.items()},
            "left_out": dict(self.left_out),
            "violations": [str(v) for v in self.violations],
            "seconds": self.seconds,
        }

    def _choose(self) -> None:
        """Sets the number of calls until the next chosen one, which has a geometric distribution."""
        u = 1.0 - self._random.random()
        self._left = 1 if self.rate == 1.0 else 1 + int(math.log(u) / math.log1p(-self.rate))

    def _around(self, impl: Impl, call: Callable[..., Any]) -> Callable[..., Any]:
        if impl.id == "reference":
            return call

        def verified(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            return call(*args, **kwargs) if self._left else self._verify(impl, call, args, kwargs)

        return verified

    def _verify(self, impl: Impl, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._choose()
        op, arguments = impl.op, bind(impl.op, args, kwargs)
        dtype = _dtype(arguments)
        reason = _reason(op, arguments, dtype)
        if reason:
            self.left_out[f"{op.name}: {reason}"] += 1
            return call(*args, **kwargs)
        judge = Judge(op, dtype, op.tol[dtype], impl.waivers.get(dtype, (1.0, ""))[0])
        checked = _Call(self, impl, judge, arguments)
        if op.mutates:
            with _comparing(self):
                checked.before()
        result = call(*args, **kwargs)
        with _comparing(self):
            checked.after(result)
        return result

    def add(self, impl: Impl, judge: Judge, wrong: str, call: _Call) -> None:
        """Records the result of a comparison; wrong: the violation in words, or ""."""
        name = impl.op.name
        self.worst[name] = max(self.worst.get(name, 0.0), judge.worst)
        if not wrong:
            return
        file = None
        if self.folder is not None and len(self.violations) < KEPT and call.kept is not None:
            file = self.folder / f"rank-{self.rank}-{len(self.violations)}-{name}.pt"
            try:
                call.save(file, wrong)
            except (OSError, RuntimeError) as error:  # a full disk must not hide the violation; torch.save raises both
                wrong, file = f"{wrong} (its tensors could not be kept: {one_line(error)})", None
        self.violations.append(Violation(name, impl.id, self.rank, wrong, file))


@contextlib.contextmanager
def _comparing(verifier: Verifier) -> Iterator[None]:
    """Adds the duration of a `with` block to a verifier's seconds, and runs torch there on one thread."""
    began = time.perf_counter()
    with one_thread(), torch.no_grad():
        yield
    verifier.seconds += time.perf_counter() - began


class _Call:
    """A chosen call: the parts that are compared, and copies of what their reference needs."""

    def __init__(self, verifier: Verifier, impl: Impl, judge: Judge, arguments: dict[str, Any]) -> None:
        self.verifier, self.impl, self.op, self.judge = verifier, impl, impl.op, judge
        self.arguments = arguments
        self.blocks: list[Block] = []
        self._factor = 1.0
        self.kept = None if self.op.mutates else arguments
        """The arguments as they were before the call, if they can be saved."""
        self._upstream: list[Tensor] = []

    def _choose_blocks(self, arguments: Mapping[str, Any], outputs: int) -> None:
        draw = self.verifier._random
        blocks = blocks_of(self.op, arguments, outputs)
        chosen = list(blocks(arguments, draw)) if blocks is not None else []
        if not chosen:
            self.verifier.left_out[f"{self.op.name}: too large to be computed whole"] += 1
        for block in draw.sample(chosen, min(BLOCKS, len(chosen))):
            parts = list(_first(block.parts(), PARTS + 1))
            if len(parts) <= PARTS:
                # Copied now: a backward pass may write over an argument (inplace_backward).
                self.blocks.append(dataclasses.replace(block, parts=_again(parts)))

    def before(self) -> None:
        """Chooses the parts of a call that writes in place, and computes what they will be."""
        small = sum(x.numel() for _, _, x in tensors(self.arguments)) <= KEPT_ELEMENTS
        if small and self.verifier.folder is not None:
            self.kept = map_tensors(self.arguments, lambda x: x.detach().clone())
        if self.op.name in _SUMS:
            self._factor = _scale(self.arguments["dy"])
        self._choose_blocks(self._scaled(self.arguments), 0)
        self._expected = [self.judge.expected(block, [], False) for block in self.blocks]

    def _scaled(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments, those of an op that adds gradients times a factor: tolerances are for values of about 1."""
        names = _SUMS.get(self.op.name, ())
        scaled = {n: arguments[n].detach() * self._factor for n in names if arguments[n] is not None}
        return {**arguments, **scaled}

    def after(self, result: Any) -> None:
        """Compares the outputs, and has the gradients compared in the backward pass."""
        op, arguments = self.op, self.arguments
        outcome = outcome_of(op, self._scaled(arguments) if op.mutates else arguments, {}, result)
        if not op.mutates:
            outputs = len(outcome.outputs)
            self._choose_blocks(arguments, outputs)
        if not self.blocks:
            return
        self.verifier.calls[op.name] += 1
        wrong = ""
        try:
            for number, block in enumerate(self.blocks):
                if op.mutates:
                    exact, native = self._expected[number]
                elif block.outputs:
                    exact, native = self.judge.expected(block, [], False, self.judge.prescribed(block, outcome.outputs))
                else:
                    continue
                self.judge.compare(block, outcome, exact, native)
        except Wrong as error:
            wrong = str(error)
        self.verifier.add(self.impl, self.judge, wrong, self)
        node = next((y.grad_fn for y in outcome.differentiable if y.grad_fn is not None), None)
        if not wrong and node is not None and node.name() == f"{op.name}[{self.impl.id}]Backward":
            self._choices = [self.judge.prescribed(block, outcome.outputs) for block in self.blocks]
            self._shapes = [y.detach() for y in outcome.differentiable]
            node.register_hook(self._on_backward)

    def _on_backward(self, grads: Sequence[Tensor | None], upstream: Sequence[Tensor | None]) -> None:
        """The hook of the call's node in autograd's graph; grads: of the arguments that are tensors, in their order."""
        with _comparing(self.verifier):
            self._compare_gradients(grads, upstream)

    def _compare_gradients(self, grads: Sequence[Tensor | None], upstream: Sequence[Tensor | None]) -> None:
        op = self.op
        by_name = dict(zip([n for n in op.signature.parameters if isinstance(self.arguments[n], Tensor)], grads))
        given = [dy for i, dy in enumerate(upstream) if i not in op.nondiff_outputs or len(upstream) == 1]
        dys = [torch.zeros_like(y) if dy is None else dy for y, dy in zip(self._shapes, given)]
        # Tolerances are for upstream gradients of about 1; a backward pass is linear in them.
        factor = min(map(_scale, dys))
        dys = [dy * factor for dy in dys]
        got = {name: by_name[name] for name in op.grads if by_name.get(name) is not None}
        outcome = Outcome({}, {n: g * factor for n, g in got.items() if g is not None}, None, {}, [])
        outcome.leaves = {name: self.arguments[name] for name in got}
        wrong = ""
        try:
            for block, choice in zip(self.blocks, self._choices):
                if any(name in got for name in block.gradients):
                    with torch.enable_grad():
                        exact, native = self.judge.expected(block, dys, True, choice)
                    self.judge.compare(block, outcome, exact, native)
        except Wrong as error:
            wrong = str(error)
        self._upstream = dys
        self.verifier.add(self.impl, self.judge, wrong, self)

    def save(self, path: Path, wrong: str) -> None:
        """Writes the call to a file, of plain values and tensors."""
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = self.kept
        assert arguments is not None
        torch.save(
            {
                "op": self.op.name,
                "implementation": self.impl.id,
                "backend": dispatch.backend().name,
                "wrong": wrong,
                "arguments": {name: _plain(value) for name, value in arguments.items()},
                "requires_grad": [n for n, v in arguments.items() if isinstance(v, Tensor) and v.requires_grad],
                "upstream": [dy.detach().cpu() for dy in self._upstream],
            },
            path,
        )


def replay(path: Path) -> str:
    """Repeats a saved call on the active backend, on the implementation that it ran on, and compares all of it.

    Returns the violation in words, or "" if everything is within tolerance. Raises HalError for a file that is not a
    saved call.
    """
    op, implementation, arguments, upstream = read_call(path)
    device = dispatch.device()
    arguments = map_tensors(arguments, lambda x: x.to(device).detach().requires_grad_(x.requires_grad))
    verifier = Verifier(1.0, seed=0)
    with dispatch.policy(pin={op.name: implementation}), verifier.watching():
        for _ in range(10):  # other parts each time
            result = invoke(op, op, map_tensors(arguments, _copy))
            outcome = outcome_of(op, arguments, {}, result)
            pairs = [(y, dy.to(device)) for y, dy in zip(outcome.differentiable, upstream) if y.requires_grad]
            if any(y.shape != dy.shape for y, dy in pairs):
                raise HalError(f"{path} has gradients of other shapes than the outputs of {op.name}")
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])
    return str(verifier.violations[0]) if verifier.violations else ""


def read_call(path: Path) -> tuple[Op[Any, Any], str, dict[str, Any], list[Tensor]]:
    """(op, implementation, arguments, upstream gradients) of a saved call. Raises HalError for another file."""
    from hal.model.checkpoint.torch_archive import load_state

    try:
        return _parts_of_call(load_state(path))
    except (OSError, LookupError, TypeError, AttributeError, RuntimeError, ValueError, HalError) as error:
        raise HalError(
            f"{path} is not a saved call: {one_line(error)}; give a file that --verify-ops has written"
        ) from None


def _parts_of_call(saved: Any) -> tuple[Op[Any, Any], str, dict[str, Any], list[Tensor]]:
    op = OPS[saved["op"]]
    values = {name: _value(value) for name, value in saved["arguments"].items()}
    if values.keys() != op.signature.parameters.keys():
        raise ValueError(f"{op.name} has the parameters {', '.join(op.signature.parameters)}")
    for name in saved["requires_grad"]:
        values[name].requires_grad_()
    upstream = list(saved["upstream"])
    if not all(isinstance(dy, Tensor) and dy.is_floating_point() for dy in upstream):
        raise TypeError("its upstream gradients are no tensors")
    return op, str(saved["implementation"]), values, upstream


def _copy(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.clone()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Rng):
        return {"rng": [value.seed, value.offset, value.full_shape, value.start]}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, Comm):  # of size 1, see _reason
        return None
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return Rng(*value["rng"]) if "rng" in value else None
    return [_value(v) for v in value] if isinstance(value, list) else value


def _dtype(arguments: Mapping[str, Any]) -> torch.dtype:
    """The dtype under test: one that is given, or that of the first floating-point argument; float32 without any."""
    given = next((v for v in arguments.values() if isinstance(v, torch.dtype)), None)
    if given is not None:
        return given
    floating = (x.dtype for _, _, x in tensors(arguments) if x.is_floating_point())
    return next(floating, torch.float32)


def _reason(op: Op[Any, Any], arguments: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Why a call cannot be compared, or ""."""
    if any(isinstance(v, Comm) and v.size > 1 for v in arguments.values()):
        return "communicates with other ranks"
    if dtype not in op.tol:
        return f"no tolerance for {dtype}"
    return ""


def _scale(x: Tensor) -> float:
    """The power of two that brings the largest finite magnitude of x to [1, 2); 1 if there is none."""
    finite = torch.nan_to_num(x.detach().float(), nan=0.0, posinf=0.0, neginf=0.0)
    top = float(finite.abs().amax()) if x.numel() else 0.0
    return 2.0 ** -math.floor(math.log2(top)) if top > 0.0 else 1.0


def _first(parts: Iterator[Part], count: int) -> Iterator[Part]:
    for _, part in zip(range(count), parts):
        yield part


def _again(parts: Sequence[Part]) -> Callable[[], Iterator[Part]]:
    return lambda: iter(parts)
