"""The fused ops against eager and compiled torch, with the allocator as it comes and told to keep what is freed.

Shares of the copy rate count ideal traffic: forward reads the inputs and writes the output; forward and backward reads
what the gradient needs once more, reads the output's gradient and writes the inputs'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import hal

from . import worker
from .case import OURS, Call, Candidate, Case

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Fused:
    """An op, how a torch user writes it, and its inputs.

    dims: the first input's shape. inputs: the tensors both take; the first `grads` of them get gradients.
    passes: (forward, forward and backward) how often memory of the first input's size is read or written at least.
    """

    name: str
    dims: tuple[int, ...]
    ours: Callable[[], Function]
    eager: Function
    inputs: Callable[[], Sequence[Tensor]]
    grads: int
    passes: tuple[float, float]


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=worker.device())


def _softmax(x: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax((x * 0.125).masked_fill(hidden, float("-inf")), -1)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[:, None, None], sin[:, None, None]
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def _norm_inputs(rows: int, width: int, tensors: int) -> list[Tensor]:
    return [_randn(rows, width), *(_randn(width) for _ in range(tensors - 1))]


def _hidden(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool, device=worker.device()).triu(1)


def _angles(s: int, half: int) -> list[Tensor]:
    turn = torch.arange(s)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return [turn.cos().to(worker.device()), turn.sin().to(worker.device())]


def _targets(rows: int, v: int) -> Tensor:
    return torch.randint(v, (rows,), device=worker.device())


def _one(name: str, *dims: int) -> Fused:
    """The op `name` with a first input of this shape."""

    def ours() -> Function:
        function: Function = getattr(hal.ops, name)
        return function

    def causal() -> Function:
        return lambda x, mask: hal.ops.scale_mask_softmax(x, None, 0.125, True)

    def residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + (x + bias)

    first, last = dims[0], dims[-1]
    known: dict[str, tuple[Callable[[], Function], Function, Callable[[], Sequence[Tensor]], int, tuple[float, float]]]
    known = {
        "scale_mask_softmax": (causal, _softmax, lambda: [_randn(*dims), _hidden(last)], 1, (2.0, 5.0)),
        "cross_entropy": (ours, _cross_entropy, lambda: [_randn(*dims), _targets(*dims)], 1, (1.0, 3.0)),
        "layer_norm": (ours, _layer_norm, lambda: _norm_inputs(first, last, 3), 3, (2.0, 5.0)),
        "rms_norm": (ours, _rms_norm, lambda: _norm_inputs(first, last, 2), 2, (2.0, 5.0)),
        "swiglu": (ours, _swiglu, lambda: [_randn(*dims)], 1, (1.5, 4.0)),
        "bias_gelu": (ours, _bias_gelu, lambda: _norm_inputs(first, last, 2), 2, (2.0, 5.0)),
        "bias_dropout_add": (ours, residual, lambda: [_randn(*dims), _randn(last), _randn(*dims)], 3, (3.0, 4.0)),
        "rotary": (ours, _rotary, lambda: [_randn(*dims), *_angles(first, last // 2)], 1, (2.0, 4.0)),
    }
    return Fused(name, dims, *known[name])


def _fused() -> list[Fused]:
    return [
        _one("scale_mask_softmax", 8, 8, 1024, 1024),
        _one("cross_entropy", 1024, 50304),
        _one("cross_entropy", 2048, 8192),
        _one("layer_norm", 2048, 384),
        _one("rms_norm", 2048, 384),
        _one("layer_norm", 4096, 4096),
        _one("rms_norm", 4096, 4096),
        _one("swiglu", 2048, 2048),
        _one("swiglu", 4096, 8192),
        _one("bias_gelu", 2048, 1536),
        _one("bias_gelu", 4096, 8192),
        _one("bias_dropout_add", 2048, 384),
        _one("rotary", 2048, 1, 16, 64),
    ]


def _odd() -> list[Case]:
    """Rows that are no whole lines, and many small tensors, in the modes that have goals; against eager torch only."""
    cases = [
        _case(_one("scale_mask_softmax", 2, 6, 777, 777), "fwd+bwd"),
        _cross_entropy_backward(333, 50257),
        _case(_one("layer_norm", 4097, 513), "fwd+bwd"),
        _case(_one("rms_norm", 4097, 513), "fwd+bwd"),
        _case(_one("swiglu", 4097, 2002), "fwd+bwd"),
        _case(_one("rotary", 777, 2, 12, 80), "fwd"),
        _adamw("5.1M in 300 tensors", [17_001] * 300),
    ]
    peers = (OURS, "eager", "AdamW(fused=True)")
    return [
        replace(c, name=f"odd {c.name}", candidates={n: c.candidates[n] for n in peers if n in c.candidates})
        for c in cases
    ]


def _call(function: Function, op: Fused, mode: str) -> Call:
    torch.manual_seed(0)
    tensors = list(op.inputs())
    if mode == "fwd":

        def forward() -> Tensor:
            with torch.no_grad():
                return function(*tensors)

        return forward
    wanted = [t.requires_grad_() for t in tensors[: op.grads]]
    dy = torch.randn_like(function(*tensors).detach())
    return lambda: torch.autograd.grad(function(*tensors), wanted, dy)


def _compiled(function: Function) -> Function:
    torch._dynamo.reset()  # its limit of recompilations counts per function, not per case
    return torch.compile(function, dynamic=False)


def _case(op: Fused, mode: str) -> Case:
    return Case(
        f"{op.name} {mode}",
        "f32 " + "x".join(map(str, op.dims)),
        {
            OURS: Candidate(lambda: _call(op.ours(), op, mode), "hal"),
            "eager": Candidate(lambda: _call(op.eager, op, mode)),
            "compile": Candidate(lambda: _call(_compiled(op.eager), op, mode), "compile"),
        },
        work=op.passes[mode != "fwd"] * 4.0 * math.prod(op.dims),
        ceiling="copy",
        allocators=("default", "pooled"),
    )


_ADAMW = {"33.6M in 1 tensor": [33_600_000], "13.8M in 97 tensors": [142_268] * 97}


def _parameters(sizes: Sequence[int]) -> list[Tensor]:
    parameters = [_randn(n) for n in sizes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def _adamw_ours(sizes: Sequence[int]) -> Call:
    params = _parameters(sizes)
    grads, m, v = [p.grad for p in params], *([torch.zeros_like(p) for p in params] for _ in range(2))
    return lambda: hal.ops.adamw(params, grads, m, v, step=10, lr=1e-4, weight_decay=0.01)


def _adamw_torch(sizes: Sequence[int], **how: bool) -> Call:
    return torch.optim.AdamW(_parameters(sizes), lr=1e-4, weight_decay=0.01, **how).step


def _adamw(shape: str, sizes: Sequence[int]) -> Case:
    return Case(
        "adamw",
        f"f32 {shape}",
        {
            OURS: Candidate(lambda: _adamw_ours(sizes), "hal"),
            "AdamW(fused=True)": Candidate(lambda: _adamw_torch(sizes, fused=True)),
            "AdamW": Candidate(lambda: _adamw_torch(sizes)),
        },
        work=28.0 * sum(sizes),
        ceiling="copy",
    )


class _Handed(torch.autograd.Function):
    """Logits as a model hands them to its loss: nobody but the graph holds them. make: their memory, new or used."""

    @staticmethod
    def forward(ctx: object, seed: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_ones(1), None


def _loss(rows: int, v: int, make: Callable[[], Tensor], function: Function) -> Call:
    """The loss of logits that `make` makes, and their gradient."""
    seed = torch.ones(1, device=worker.device(), requires_grad=True)
    target = torch.randint(v, (rows,), device=worker.device())
    dloss = torch.full((rows,), 1.0 / rows, device=worker.device())
    return lambda: torch.autograd.grad(function(_Handed.apply(seed, make), target), seed, dloss)


def _loss_backward(rows: int, v: int, function: Callable[[], Function]) -> Call:
    """The same memory becomes new logits every time, so that making them costs nothing. On a device: new memory."""
    if worker.device().type != "cpu":
        return _loss(rows, v, lambda: _randn(rows, v), function())
    values = torch.randn(rows, v).numpy()
    return _loss(rows, v, lambda: torch.from_numpy(values), function())


def _ours_in_place() -> Function:
    return functools.partial(hal.ops.cross_entropy, inplace_backward=True)


def _cross_entropy_backward(rows: int, v: int) -> Case:
    return Case(
        "cross_entropy fwd+bwd",
        f"f32 {rows}x{v}",
        {
            OURS: Candidate(lambda: _loss_backward(rows, v, _ours_in_place), "hal"),
            "eager": Candidate(lambda: _loss_backward(rows, v, lambda: _cross_entropy)),
            "compile": Candidate(lambda: _loss_backward(rows, v, lambda: _compiled(_cross_entropy)), "compile"),
        },
        work=3.0 * 4.0 * rows * v,
        ceiling="copy",
        allocators=("default", "pooled"),
    )


def _cross_entropy_memory(rows: int, v: int) -> Case:
    return Case(
        "cross_entropy memory",
        f"f32 {rows}x{v}",
        {
            OURS: Candidate(lambda: _loss(rows, v, lambda: _randn(rows, v), _ours_in_place()), "hal-memory"),
            "eager": Candidate(lambda: _loss(rows, v, lambda: _randn(rows, v), _cross_entropy), "memory"),
        },
        budgets={"two buffers of logits": 2.0 * 4 * rows * v},
        quantity="bytes",
    )


def cases() -> list[Case]:
    """Every fused op in both modes, the optimizer, and the memory of the loss."""
    found = [
        _case(op, mode)
        for op in _fused()
        for mode in ("fwd", "fwd+bwd")
        if (op.name, mode) != ("cross_entropy", "fwd+bwd")  # its logits are handed over: see below
    ]
    found += [_cross_entropy_backward(1024, 50304), _cross_entropy_backward(2048, 8192)]
    found += [_adamw(shape, sizes) for shape, sizes in _ADAMW.items()]
    return [*found, _cross_entropy_memory(1024, 50304), *_odd()]
