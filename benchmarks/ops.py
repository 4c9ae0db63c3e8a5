"""The fused ops against eager and compiled torch, with the allocator as it comes and told to keep what is freed.

Shares of the copy rate count ideal traffic: forward reads the inputs and writes the output; forward and backward reads
what the gradient needs once more, reads the output's gradient and writes the inputs'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def _fused() -> list[Fused]:
    def logits(rows: int, v: int) -> list[Tensor]:
        return [_randn(rows, v), torch.randint(v, (rows,), device=worker.device())]

    def hidden(s: int) -> Tensor:
        return torch.ones(s, s, dtype=torch.bool, device=worker.device()).triu(1)

    def angles(s: int, half: int) -> list[Tensor]:
        turn = torch.arange(s)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        return [turn.cos().to(worker.device()), turn.sin().to(worker.device())]

    found = [
        Fused(
            "scale_mask_softmax",
            (8, 8, 1024, 1024),
            lambda: lambda x, mask: hal.ops.scale_mask_softmax(x, None, 0.125, True),
            _softmax,
            lambda: [_randn(8, 8, 1024, 1024), hidden(1024)],
            1,
            (2.0, 5.0),
        )
    ]
    for rows, v in ((1024, 50304), (2048, 8192)):
        found.append(
            Fused(
                "cross_entropy",
                (rows, v),
                lambda: hal.ops.cross_entropy,
                _cross_entropy,
                lambda r=rows, v=v: logits(r, v),
                1,
                (1.0, 3.0),
            )
        )
    for rows, width in ((2048, 384), (4096, 4096)):
        found += [
            Fused(
                "layer_norm",
                (rows, width),
                lambda: hal.ops.layer_norm,
                _layer_norm,
                lambda r=rows, w=width: _norm_inputs(r, w, 3),
                3,
                (2.0, 5.0),
            ),
            Fused(
                "rms_norm",
                (rows, width),
                lambda: hal.ops.rms_norm,
                _rms_norm,
                lambda r=rows, w=width: _norm_inputs(r, w, 2),
                2,
                (2.0, 5.0),
            ),
        ]
    for rows, width in ((2048, 1024), (4096, 4096)):
        found.append(
            Fused(
                "swiglu",
                (rows, 2 * width),
                lambda: hal.ops.swiglu,
                _swiglu,
                lambda r=rows, w=width: [_randn(r, 2 * w)],
                1,
                (1.5, 4.0),
            )
        )
    for rows, width in ((2048, 1536), (4096, 8192)):
        found.append(
            Fused(
                "bias_gelu",
                (rows, width),
                lambda: hal.ops.bias_gelu,
                _bias_gelu,
                lambda r=rows, w=width: _norm_inputs(r, w, 2),
                2,
                (2.0, 5.0),
            )
        )
    found.append(
        Fused(
            "bias_dropout_add",
            (2048, 384),
            lambda: hal.ops.bias_dropout_add,
            lambda x, bias, residual: residual + (x + bias),
            lambda: [_randn(2048, 384), _randn(384), _randn(2048, 384)],
            3,
            (3.0, 4.0),
        )
    )
    found.append(
        Fused(
            "rotary",
            (2048, 1, 16, 64),
            lambda: hal.ops.rotary,
            _rotary,
            lambda: [_randn(2048, 1, 16, 64), *angles(2048, 32)],
            1,
            (2.0, 4.0),
        )
    )
    return found


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
    return [*found, _cross_entropy_memory(1024, 50304)]
