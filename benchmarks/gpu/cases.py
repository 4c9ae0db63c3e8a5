"""The comparisons of `make gpu`, and those of attention: against each of torch's kernels, and flash-attn.

Ours and the peers get the same tensors. Bytes are those that must move at least once: inputs read, outputs written.
A rehearsal divides the sizes by `Gpu.shrink`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hal
from hal import Rng, ops

from ..harness.case import OURS, Thunk
from ..harness.thunks import forward_backward
from . import libraries, values
from .rehearsal import Gpu
from .values import Function

SIZE, WINDOW = 128, 1024
"""Of the attention cases: channels of a head, keys in the window."""
DROPOUT, RNG = 0.1, Rng(1)


@dataclass(frozen=True)
class GpuCase:
    """One comparison.

    calls: by name, including "ours". bytes: the minimum memory traffic of one call; 0 if it is not bound by memory.
    flops: floating-point operations of one call, 0 if they do not bound it. check: the largest error of ours at this
    size, in tolerances; it is called once, before anything is timed.
    """

    name: str
    shape: str
    calls: dict[str, Thunk]
    check: Callable[[], float]
    bytes: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class Work:
    """What the forward pass, and forward and backward together, must do: bytes moved, floating-point operations."""

    bytes: tuple[int, int] = (0, 0)
    flops: tuple[float, float] = (0.0, 0.0)


class Check(Protocol):
    """A check of values.py."""

    @property
    def gradients(self) -> int:
        """The number of inputs that get a gradient, from the first one on."""

    def worst(self, function: Function, inputs: Sequence[Tensor]) -> float:
        """The largest error in tolerances."""


def both(
    gpu: Gpu,
    name: str,
    shape: str,
    functions: dict[str, Function],
    inputs: Sequence[Tensor],
    check: Check,
    work: Work = Work(),
    modules: Mapping[str, Callable[[], Any]] | None = None,
) -> Iterator[GpuCase]:
    """A case for the forward pass and one for forward and backward.

    modules: peers that have parameters of their own in the place of the inputs after the first: functions that make
    them.
    """
    sets, values = _sets(gpu, inputs), cache(partial(check.worst, functions[OURS], inputs))
    for kind, i, call in (("fwd", 0, _forward), ("fwd+bwd", 1, partial(_forward_backward, wanted=check.gradients))):
        calls = {n: call(f, sets) for n, f in functions.items()}
        calls |= {n: _module(make, sets, backward=bool(i)) for n, make in (modules or {}).items()}
        yield GpuCase(f"{name} {kind}", shape, calls, values, work.bytes[i], work.flops[i])


def _sets(gpu: Gpu, inputs: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The inputs and copies of them, enough to evict a set from the L2 cache before it is used again."""
    size, cache = sum(x.numel() * x.element_size() for x in inputs), gpu.cache_bytes()
    sets = [inputs]
    for _ in range(0 if size > 2 * cache else -(-cache // size)):  # a larger set evicts itself
        copies = {id(x): x.clone() for x in inputs}  # a tensor that is passed twice is copied once
        sets.append([copies[id(x)] for x in inputs])
    return sets


def _forward(function: Function, sets: Sequence[Sequence[Tensor]]) -> Thunk:
    """Each call uses the next set."""
    cycle = itertools.cycle(sets)

    def run() -> object:
        with torch.no_grad():
            return function(*next(cycle))

    return run


def _forward_backward(function: Function, sets: Sequence[Sequence[Tensor]], wanted: int) -> Thunk:
    """Each call uses the next set. The function runs for the first time in the first call, so that a peer that cannot
    run fails there, where `parts.measure` expects it."""
    cycle: Iterator[Thunk] | None = None

    def run() -> object:
        nonlocal cycle
        if cycle is None:
            # Detached, so that every function has separate leaves, and a tensor that is passed twice has two gradients.
            leaves = [[x.detach() for x in inputs] for inputs in sets]
            cycle = itertools.cycle([forward_backward(function, inputs, wanted) for inputs in leaves])
        return next(cycle)()

    return run


def _module(make: Callable[[], Any], sets: Sequence[Sequence[Tensor]], backward: bool) -> Thunk:
    """The module's forward pass on the first tensor of the next set, or both passes, with its parameters' gradients."""
    call: Thunk | None = None

    def run() -> object:
        nonlocal call
        if call is None:
            call = _gradients_of_module(make(), sets) if backward else _forward(_first(make()), sets)
        return call()

    return run


def _first(module: Callable[[Tensor], Any]) -> Function:
    return lambda x, *others: module(x)


def _gradients_of_module(module: Any, sets: Sequence[Sequence[Tensor]]) -> Thunk:
    """Both passes of a module, with the gradients of its input and of its parameters."""
    cycle = itertools.cycle([[inputs[0].detach().requires_grad_(), *module.parameters()] for inputs in sets])
    dy = torch.randn_like(module(sets[0][0]).detach())

    def run() -> object:
        leaves = next(cycle)
        return torch.autograd.grad(module(leaves[0]), leaves, dy)

    return run


def _sdpa(backend: SDPBackend, dropout_p: float = 0.0) -> Function:
    """torch's causal attention, computed by one of its kernels; dropout with torch's bits."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, None, dropout_p, True, enable_gqa=True)

    return run


def _pinned(impl: hal.Impl) -> Function:
    """One implementation, called as by the dispatcher. hal's pins would rebuild the dispatcher, at a cost per call."""

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        reasons = impl.refusals(impl.op.Call(q, k, v, **options))
        if reasons:
            raise hal.UnsupportedOp("; ".join(reasons))
        return impl.call(q, k, v, **options)

    return run


def _attention_work(b: int, heads: int, length: int, window: int | None) -> Work:
    """Two products of 2 d operations per head and visible pair forward; five more backward, which recomputes one."""
    near = length if window is None else min(length, window + 1)
    pairs = near * (near + 1) // 2 + (length - near) * near
    forward = 4.0 * SIZE * b * heads * pairs
    return Work(flops=(forward, 3.5 * forward))


def attention(gpu: Gpu) -> Iterator[GpuCase]:
    """Causal attention, with a window, and with dropout; bfloat16, grouped-query heads; all functions take
    [b, n, s, d].

    flex_attention, torch's peer for windows, appears as cuda/flex: the same kernel, compiled once for both.
    """
    heads, kv_heads = gpu.heads
    for length in gpu.lengths:
        b = max(1, gpu.lengths[-1] // length)
        q, k, v = (
            torch.randn(b, n, length, SIZE, dtype=torch.bfloat16, device=hal.device())
            for n in (heads, kv_heads, kv_heads)
        )
        shape = f"b{b} n{heads}/{kv_heads} s{length} d{SIZE} bf16"
        for window in (None, WINDOW):
            options: dict[str, Any] = {"layout": "BNSD", "pre_tokens": window, "next_tokens": 0}
            functions: dict[str, Function] = {OURS: partial(ops.flash_attention, **options)}
            for impl in hal.backend().impls["flash_attention"]:
                if impl.id != "cuda/unfused":  # it would need s x s memory
                    functions[impl.id] = partial(_pinned(impl), **options)
            if window is None:
                functions["SDPA flash"] = _sdpa(SDPBackend.FLASH_ATTENTION)
                functions["SDPA cuDNN"] = _sdpa(SDPBackend.CUDNN_ATTENTION)
                functions["SDPA efficient"] = _sdpa(SDPBackend.EFFICIENT_ATTENTION)
            functions |= libraries.attention(window)
            name = "attention causal" if window is None else f"attention window {window}"
            check, work = values.Attention(ops.flash_attention, window), _attention_work(b, heads, length, window)
            yield from both(gpu, name, shape, functions, (q, k, v), check, work)
        dropout = partial(ops.flash_attention, layout="BNSD", next_tokens=0, dropout_p=DROPOUT, rng=RNG)
        functions = {OURS: dropout, "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION, DROPOUT)}
        check, work = (
            values.Attention(ops.flash_attention, None, DROPOUT, RNG),
            _attention_work(b, heads, length, None),
        )
        yield from both(gpu, "attention with dropout", shape, functions, (q, k, v), check, work)
