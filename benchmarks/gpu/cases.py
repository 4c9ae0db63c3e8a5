"""The cases of `make gpu`: attention against each of torch's kernels, HAL's kernels against eager and compiled torch.

Ours and the peers get the same tensors. Bytes are those that must move at least once: inputs read, outputs written.
The tests run the calls on the simulator, with sizes divided by `shrink`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hal
from hal import Rng, ops

from ..harness.case import OURS, Thunk
from ..harness.thunks import forward_backward

Function = Callable[..., Any]
"""Takes tensors, returns one."""

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
TOKENS, HEADS, KV_HEADS, SIZE, WINDOW = 32768, 16, 4, 128, 1024
"""Sizes of the attention cases: tokens in a batch, heads, key/value heads, channels of a head, keys in the window."""
DROPOUT = 0.1


@dataclass(frozen=True)
class GpuCase:
    """One comparison.

    calls: by name, including "ours". bytes: the minimum memory traffic of one call; 0 if it is not bound by memory.
    """

    name: str
    shape: str
    calls: dict[str, Thunk]
    bytes: int = 0


def _both(
    name: str, shape: str, functions: dict[str, Function], inputs: Sequence[Tensor], wanted: int, size: int
) -> Iterator[GpuCase]:
    """A case for the forward pass and one for forward and backward.

    wanted: the first `wanted` inputs get a gradient. size: bytes of the forward pass.
    """
    sets = _sets(inputs)
    yield GpuCase(f"{name} fwd", shape, {n: _forward(f, sets) for n, f in functions.items()}, size)
    yield GpuCase(f"{name} fwd+bwd", shape, {n: _forward_backward(f, sets, wanted) for n, f in functions.items()})


def _sets(inputs: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The inputs and copies of them, enough to evict a set from the L2 cache before it is used again."""
    cache = torch.cuda.get_device_properties(hal.device()).L2_cache_size if hal.device().type == "cuda" else 0
    sets = [inputs]
    for _ in range(-(-cache // sum(x.numel() * x.element_size() for x in inputs))):
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


def attention(shrink: int = 1) -> Iterator[GpuCase]:
    """Causal attention, with a window, and with dropout; bfloat16, grouped-query heads; all functions take
    [b, n, s, d].

    flex_attention, torch's peer for windows, appears as cuda/flex: the same kernel, compiled once for both.
    """
    for length in (n // shrink for n in LENGTHS):
        b = max(1, TOKENS // shrink // length)
        q, k, v = (
            torch.randn(b, n, length, SIZE, dtype=torch.bfloat16, device=hal.device())
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        shape = f"b{b} n{HEADS}/{KV_HEADS} s{length} d{SIZE} bf16"
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
            name = "attention causal" if window is None else f"attention window {window}"
            yield from _both(name, shape, functions, (q, k, v), 3, 0)
        dropout = partial(ops.flash_attention, layout="BNSD", next_tokens=0, dropout_p=DROPOUT, rng=hal.Rng(1))
        functions = {OURS: dropout, "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION, DROPOUT)}
        yield from _both("attention with dropout", shape, functions, (q, k, v), 3, 0)


def _op_case(
    name: str, op: Function, plain: Function, inputs: Sequence[Tensor], wanted: int, unread: int = 0
) -> Iterator[GpuCase]:
    """unread: bytes of the inputs that the forward pass does not have to read."""
    shape = f"{'x'.join(map(str, inputs[0].shape))} {str(inputs[0].dtype).removeprefix('torch.')}"
    with torch.no_grad():
        out: Tensor = op(*inputs)
    size = sum(x.numel() * x.element_size() for x in (*inputs, out)) - unread
    functions = {OURS: op, "eager": plain, "compile": torch.compile(plain, dynamic=False)}
    yield from _both(name, shape, functions, inputs, wanted, size)


def kernels(shrink: int = 1) -> Iterator[GpuCase]:
    """Every kernel of HAL at the sizes of a 7B model, bfloat16; peers: the ops' references and torch's layers."""

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=hal.device())

    rows, h = 8192 // shrink, 4096 // shrink
    x, w = normal(rows, h), normal(h)
    yield from _op_case("layer_norm", ops.layer_norm, lambda x, w, b: F.layer_norm(x, (h,), w, b), (x, w, w), 3)
    yield from _op_case("rms_norm", ops.rms_norm, lambda x, w: F.rms_norm(x, (h,), w, 1e-5), (x, w), 2)
    wide = normal(rows, 2 * 11008 // shrink)
    yield from _op_case("swiglu", ops.swiglu, ops.swiglu.reference, (wide,), 1)
    yield from _op_case("geglu", ops.geglu, ops.geglu.reference, (wide,), 1)
    yield from _op_case(
        "bias_gelu",
        ops.bias_gelu,
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        (normal(rows, 4 * h), normal(4 * h)),
        2,
    )
    rng = Rng(1)
    yield from _op_case(
        "bias_dropout_add",
        lambda x, b, r: ops.bias_dropout_add(x, b, r, p=0.1, rng=rng),
        lambda x, b, r: r + F.dropout(x + b, 0.1),
        (x, w, normal(rows, h)),
        3,
    )
    yield from _op_case("dropout", lambda x: ops.dropout(x, 0.1, rng), lambda x: F.dropout(x, 0.1), (x,), 1)
    n = 2048 // shrink
    scores = normal(4, 16, n, n)
    yield from _op_case(
        "scale_mask_softmax",
        lambda x: ops.scale_mask_softmax(x, None, 0.1, True),
        lambda x: ops.scale_mask_softmax.reference(x, None, 0.1, True),
        (scores,),
        1,
        unread=4 * 16 * n * (n - 1) // 2 * scores.element_size(),  # the masked triangle
    )
    length = 4096 // shrink
    heads, angle = normal(length, 2, 32, 128), torch.rand(length, 64, device=hal.device())
    yield from _op_case("rotary", ops.rotary, ops.rotary.reference, (heads, angle.cos(), angle.sin()), 1)
    target = torch.randint(50257 // shrink, (length,), device=hal.device())
    for v in (50257, 50304):  # rows off and on 16-byte boundaries
        yield from _op_case(
            "cross_entropy",
            lambda z: ops.cross_entropy(z, target),
            lambda z: F.cross_entropy(z.float(), target, reduction="none"),
            (normal(length, v // shrink),),
            1,
        )
    yield from _optimizer(shrink)


def _optimizer(shrink: int) -> Iterator[GpuCase]:
    """Lists of 200 tensors with the dtypes of training: float32 states, bfloat16 gradients and model copies."""
    sizes = [4_000_000 // shrink] * 100 + [4096 // shrink] * 100
    p, m, v = ([torch.zeros(n, device=hal.device()) for n in sizes] for _ in range(3))
    g = [torch.randn(n, device=hal.device()).bfloat16() for n in sizes]
    copies = [torch.empty_like(x) for x in g]
    leaves = [torch.nn.Parameter(x.clone()) for x in p]
    for leaf, grad in zip(leaves, g):
        leaf.grad = grad.float()
    fused = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
    elements = sum(sizes)
    yield GpuCase(
        "adamw",
        f"{elements} elements in {len(sizes)} tensors",
        {
            OURS: lambda: ops.adamw(p, g, m, v, step=3, lr=1e-4, model_params=copies),
            "torch fused (float32 grads, no bf16 copy)": lambda: fused.step(),
        },
        elements * (3 * 8 + 2 + 2),  # p, m, v read and written; a gradient read and a model copy written
    )
    norm: dict[str, Thunk] = {OURS: lambda: ops.l2norm(g), "torch": lambda: torch.nn.utils.get_total_norm(g)}
    yield GpuCase("l2norm", f"{elements} elements bf16", norm, elements * 2)
    check: dict[str, Thunk] = {
        OURS: lambda: ops.unscale_and_check(g, 1.0),
        "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            g, torch.zeros(1, device=hal.device()), torch.ones(1, device=hal.device())
        ),
    }
    yield GpuCase("unscale_and_check", f"{elements} elements bf16", check, elements * 4)


def train_step(shrink: int = 1) -> Iterator[GpuCase]:
    """HAL's GPT against the same model in plain torch, eager and compiled: 12 layers, hidden 1024, S 1024, bfloat16."""
    from ..peers import hal_gpt, plain_gpt

    layers, heads, batch = 12, 16, 8
    hidden, length, vocabulary = 1024 // shrink, 1024 // shrink, 50304 // shrink
    ids = torch.randint(vocabulary, (batch, length + 1), device=hal.device())
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    config = hal_gpt.config_of(layers, hidden, heads, length, vocabulary, bf16=True)

    def plain(compiled: bool) -> Thunk:
        model = plain_gpt.PlainGPT(vocabulary, length, layers, hidden, heads).to(hal.device())
        return plain_gpt.step_of(model, tokens, labels, bf16=True, compiled=compiled)

    ours = hal_gpt.step_of(config, hal.device(), tokens, labels)
    shape = f"L{layers} H{hidden} S{length} B{batch} bf16"
    yield GpuCase("training step", shape, {OURS: ours, "torch": plain(False), "torch.compile": plain(True)})
