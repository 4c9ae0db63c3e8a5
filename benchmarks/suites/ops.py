"""The fused ops against eager and compiled torch, with glibc's default malloc settings and with kept freed memory.

Shares of the copy rate count ideal traffic: the forward pass reads the inputs and writes the output; the backward pass
reads again what the gradient needs, reads the output's gradient and writes the inputs'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hal import ops

from ..harness import target
from ..harness.case import OURS, Candidate, Case, Thunk
from ..harness.thunks import forward, forward_backward

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Fused:
    """An op, its equivalent in plain torch, and its inputs.

    dims: the first input's shape. inputs: creates the tensors for both; the first `grads` of them get gradients.
    passes: memory traffic of the forward pass, and of forward and backward, in units of the first input's size.
    """

    name: str
    dims: tuple[int, ...]
    ours: Callable[[], Function]
    eager: Function
    inputs: Callable[[], Sequence[Tensor]]
    grads: int
    passes: tuple[float, float]


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=target.device())


def _softmax(x: Tensor, masked: Tensor) -> Tensor:
    return torch.softmax((x * 0.125).masked_fill(masked, float("-inf")), -1)


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
    """x [rows, width] and vectors [width]."""
    return [_randn(rows, width), *(_randn(width) for _ in range(tensors - 1))]


def _causal_mask(s: int) -> Tensor:
    """bool [s, s], True = masked out."""
    return torch.ones(s, s, dtype=torch.bool, device=target.device()).triu(1)


def _rotary_cos_sin(s: int, half: int) -> list[Tensor]:
    """cos and sin [s, half] of the angles by which channels are rotated."""
    angle = torch.arange(s)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return [angle.cos().to(target.device()), angle.sin().to(target.device())]


def _targets(rows: int, v: int) -> Tensor:
    return torch.randint(v, (rows,), device=target.device())


def _fused_op(name: str, *dims: int) -> Fused:
    """The op `name` with a first input of this shape."""

    def ours() -> Function:
        function: Function = getattr(ops, name)
        return function

    def causal() -> Function:
        return lambda x, masked: ops.scale_mask_softmax(x, None, 0.125, True)

    def bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + (x + bias)

    first, last = dims[0], dims[-1]
    Definition = tuple[Callable[[], Function], Function, Callable[[], Sequence[Tensor]], int, tuple[float, float]]
    definitions: dict[str, Definition] = {
        "scale_mask_softmax": (causal, _softmax, lambda: [_randn(*dims), _causal_mask(last)], 1, (2.0, 5.0)),
        "cross_entropy": (ours, _cross_entropy, lambda: [_randn(*dims), _targets(*dims)], 1, (1.0, 3.0)),
        "layer_norm": (ours, _layer_norm, lambda: _norm_inputs(first, last, 3), 3, (2.0, 5.0)),
        "rms_norm": (ours, _rms_norm, lambda: _norm_inputs(first, last, 2), 2, (2.0, 5.0)),
        "swiglu": (ours, _swiglu, lambda: [_randn(*dims)], 1, (1.5, 4.0)),
        "bias_gelu": (ours, _bias_gelu, lambda: _norm_inputs(first, last, 2), 2, (2.0, 5.0)),
        "bias_dropout_add": (ours, bias_add, lambda: [_randn(*dims), _randn(last), _randn(*dims)], 3, (3.0, 4.0)),
        "rotary": (ours, _rotary, lambda: [_randn(*dims), *_rotary_cos_sin(first, last // 2)], 1, (2.0, 4.0)),
    }
    return Fused(name, dims, *definitions[name])


def _fused() -> list[Fused]:
    return [
        _fused_op("scale_mask_softmax", 8, 8, 1024, 1024),
        _fused_op("cross_entropy", 1024, 50304),
        _fused_op("cross_entropy", 2048, 8192),
        _fused_op("layer_norm", 2048, 384),
        _fused_op("rms_norm", 2048, 384),
        _fused_op("layer_norm", 4096, 4096),
        _fused_op("rms_norm", 4096, 4096),
        _fused_op("swiglu", 2048, 2048),
        _fused_op("swiglu", 4096, 8192),
        _fused_op("bias_gelu", 2048, 1536),
        _fused_op("bias_gelu", 4096, 8192),
        _fused_op("bias_dropout_add", 2048, 384),
        _fused_op("rotary", 2048, 1, 16, 64),
    ]


def _odd() -> list[Case]:
    """Rows that are no multiples of cache lines, and lists of small tensors, in modes with goals; eager peers only."""
    even = [
        _case(_fused_op("scale_mask_softmax", 2, 6, 777, 777), "fwd+bwd"),
        _cross_entropy_backward(333, 50257),
        _case(_fused_op("layer_norm", 4097, 513), "fwd+bwd"),
        _case(_fused_op("rms_norm", 4097, 513), "fwd+bwd"),
        _case(_fused_op("swiglu", 4097, 2002), "fwd+bwd"),
        _case(_fused_op("rotary", 777, 2, 12, 80), "fwd"),
        _adamw("5.1M in 300 tensors", [17_001] * 300),
    ]
    peers = (OURS, "eager", "AdamW(fused=True)")
    return [
        replace(c, name=f"odd {c.name}", candidates={n: c.candidates[n] for n in peers if n in c.candidates})
        for c in even
    ]


def _thunk(function: Function, op: Fused, mode: str) -> Thunk:
    torch.manual_seed(0)
    inputs = list(op.inputs())
    return forward(function, inputs) if mode == "fwd" else forward_backward(function, inputs, op.grads)


def _compiled(function: Function) -> Function:
    torch._dynamo.reset()  # recompilations are limited per function, and cases share functions
    return torch.compile(function, dynamic=False)


def _case(op: Fused, mode: str) -> Case:
    return Case(
        f"{op.name} {mode}",
        "f32 " + "x".join(map(str, op.dims)),
        {
            OURS: Candidate(lambda: _thunk(op.ours(), op, mode), "hal"),
            "eager": Candidate(lambda: _thunk(op.eager, op, mode)),
            "compile": Candidate(lambda: _thunk(_compiled(op.eager), op, mode), "compile"),
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


def _adamw_ours(sizes: Sequence[int]) -> Thunk:
    params = _parameters(sizes)
    grads = [p.grad for p in params if p.grad is not None]
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    return lambda: ops.adamw(params, grads, m, v, step=10, lr=1e-4, weight_decay=0.01)


def _adamw_torch(sizes: Sequence[int], fused: bool | None = None) -> Thunk:
    return torch.optim.AdamW(_parameters(sizes), lr=1e-4, weight_decay=0.01, fused=fused).step


def _adamw(shape: str, sizes: Sequence[int]) -> Case:
    return Case(
        "adamw",
        f"f32 {shape}",
        {
            OURS: Candidate(lambda: _adamw_ours(sizes), "hal"),
            "AdamW(fused=True)": Candidate(lambda: _adamw_torch(sizes, fused=True)),
            "AdamW": Candidate(lambda: _adamw_torch(sizes)),
        },
        work=28.0 * sum(sizes),  # float32: four tensors read (p, g, m, v), three written
        ceiling="copy",
    )


class _Logits(torch.autograd.Function):
    """Logits as a model passes them to its loss, i.e. referenced only by the graph. make: returns them."""

    @staticmethod
    def forward(ctx: object, seed: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_ones(1), None


def _loss(rows: int, v: int, make: Callable[[], Tensor], function: Function) -> Thunk:
    """The loss of the logits [rows, v] that `make` returns, and their gradient."""
    seed = torch.ones(1, device=target.device(), requires_grad=True)
    labels = torch.randint(v, (rows,), device=target.device())
    dloss = torch.full((rows,), 1.0 / rows, device=target.device())
    return lambda: torch.autograd.grad(function(_Logits.apply(seed, make), labels), seed, dloss)  # type: ignore[no-untyped-call]


def _loss_backward(rows: int, v: int, function: Callable[[], Function]) -> Thunk:
    """On the CPU the logits of every call are a new tensor over the same memory, which takes negligible time."""
    if target.device().type != "cpu":
        return _loss(rows, v, lambda: _randn(rows, v), function())
    values = torch.randn(rows, v).numpy()
    return _loss(rows, v, lambda: torch.from_numpy(values), function())


def _ours_in_place() -> Function:
    return partial(ops.cross_entropy, inplace_backward=True)


def _cross_entropy_backward(rows: int, v: int) -> Case:
    return Case(
        "cross_entropy fwd+bwd",
        f"f32 {rows}x{v}",
        {
            OURS: Candidate(lambda: _loss_backward(rows, v, _ours_in_place), "hal"),
            "eager": Candidate(lambda: _loss_backward(rows, v, lambda: _cross_entropy)),
            "compile": Candidate(lambda: _loss_backward(rows, v, lambda: _compiled(_cross_entropy)), "compile"),
        },
        work=3.0 * 4.0 * rows * v,  # float32: logits read twice, their gradient written once
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
    result = [
        _case(op, mode)
        for op in _fused()
        for mode in ("fwd", "fwd+bwd")
        if (op.name, mode) != ("cross_entropy", "fwd+bwd")  # has a separate case, because it may overwrite its logits
    ]
    result += [_cross_entropy_backward(1024, 50304), _cross_entropy_backward(2048, 8192)]
    result += [_adamw(shape, sizes) for shape, sizes in _ADAMW.items()]
    return [*result, _cross_entropy_memory(1024, 50304), *_odd()]
