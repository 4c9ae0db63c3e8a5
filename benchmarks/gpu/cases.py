"""What `make gpu` measures: attention against every kernel of torch's, own kernels against eager and compiled torch.

Ours and the peers take the same tensors. Bytes are what must move at least once: inputs read, outputs written. The
tests run the calls on the simulator, with sizes divided by `shrink`.
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

Call = Callable[[], object]

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
TOKENS, HEADS, KV_HEADS, SIZE, WINDOW = 32768, 16, 4, 128, 1024


@dataclass(frozen=True)
class Case:
    """One comparison: calls by name, "ours" among them; bytes that one call must move (0: not bound by memory)."""

    name: str
    shape: str
    calls: dict[str, Call]
    bytes: int = 0


def _training(function: Callable[..., Tensor], inputs: Sequence[Tensor], wanted: int) -> Call:
    """Forward and backward; `wanted`: how many of the inputs, from the first, get a gradient."""
    leaves = [x.detach().requires_grad_(i < wanted) for i, x in enumerate(inputs)]
    dy = torch.randn_like(function(*leaves).detach())
    return lambda: torch.autograd.grad(function(*leaves), leaves[:wanted], dy)


def _both(
    name: str, shape: str, functions: dict[str, Callable[..., Tensor]], inputs: Sequence[Tensor], wanted: int, size: int
) -> Iterator[Case]:
    """A case for the forward pass and one for forward and backward. size: bytes of the forward pass."""
    sets = _sets(inputs)

    def forward(function: Callable[..., Tensor]) -> Call:
        turns = itertools.cycle(sets)

        def run() -> Tensor:
            with torch.no_grad():
                return function(*next(turns))

        return run

    yield Case(f"{name} fwd", shape, {n: forward(f) for n, f in functions.items()}, size)
    yield Case(f"{name} fwd+bwd", shape, {n: _once(f, sets, wanted) for n, f in functions.items()}, 0)


def _sets(inputs: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The inputs, and so many copies of them that all others fill the L2 cache before a set has its turn again."""
    cache = torch.cuda.get_device_properties(hal.device()).L2_cache_size if hal.device().type == "cuda" else 0
    sets = [inputs]
    for _ in range(-(-cache // sum(x.numel() * x.element_size() for x in inputs))):
        copies = {id(x): x.clone() for x in inputs}  # a tensor that is given twice stays one
        sets.append([copies[id(x)] for x in inputs])
    return sets


def _once(function: Callable[..., Tensor], sets: Sequence[Sequence[Tensor]], wanted: int) -> Call:
    """`_training`, made when it is first called: a peer that cannot run says so then."""
    made: list[Iterator[Call]] = []

    def run() -> object:
        if not made:
            made.append(itertools.cycle([_training(function, inputs, wanted) for inputs in sets]))
        return next(made[0])()

    return run


def _peer(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return run


def _pinned(impl: hal.Impl) -> Callable[..., Tensor]:
    """One implementation, called as the dispatcher would (a pin makes the dispatcher anew, at a cost per call)."""

    def run(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
        refused = impl.why_not(q, k, v, **call)
        if refused:
            raise hal.UnsupportedOp("; ".join(refused))
        return impl.call(q, k, v, **call)  # type: ignore[no-any-return]

    return run


def attention(shrink: int = 1) -> Iterator[Case]:
    """Causal, and causal with a window; bfloat16, grouped-query heads; [b, n, s, d] for everybody.

    flex_attention, torch's peer for windows, is there as cuda/flex: the same kernel, compiled once for both.
    """
    for length in (n // shrink for n in LENGTHS):
        b = max(1, TOKENS // shrink // length)
        q, k, v = (
            torch.randn(b, n, length, SIZE, dtype=torch.bfloat16, device=hal.device())
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        shape = f"b{b} n{HEADS}/{KV_HEADS} s{length} d{SIZE} bf16"
        for window in (None, WINDOW):
            call = {"layout": "BNSD", "pre_tokens": window, "next_tokens": 0}
            functions: dict[str, Callable[..., Tensor]] = {"ours": partial(ops.flash_attention, **call)}
            for impl in hal.backend().impls["flash_attention"]:
                if impl.id != "cuda/unfused":  # it would need s x s memory
                    functions[impl.id] = partial(_pinned(impl), **call)
            if window is None:
                functions["SDPA flash"] = _peer(SDPBackend.FLASH_ATTENTION, True)
                functions["SDPA cuDNN"] = _peer(SDPBackend.CUDNN_ATTENTION, True)
                functions["SDPA efficient"] = _peer(SDPBackend.EFFICIENT_ATTENTION, True)
            name = "attention causal" if window is None else f"attention window {window}"
            yield from _both(name, shape, functions, (q, k, v), 3, 0)


def _op_case(
    name: str,
    op: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    wanted: int,
    unread: int = 0,
) -> Iterator[Case]:
    """unread: bytes of the inputs that the forward pass need not read."""
    shape = f"{'x'.join(map(str, inputs[0].shape))} {str(inputs[0].dtype).removeprefix('torch.')}"
    with torch.no_grad():
        out = op(*inputs)
    size = sum(x.numel() * x.element_size() for x in (*inputs, out)) - unread
    functions = {"ours": op, "eager": plain, "compile": torch.compile(plain, dynamic=False)}
    yield from _both(name, shape, functions, inputs, wanted, size)


def kernels(shrink: int = 1) -> Iterator[Case]:
    """Every own kernel at the sizes of a 7B model, bfloat16; peers: the ops' references and torch's own layers."""

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
        unread=4 * 16 * n * (n - 1) // 2 * scores.element_size(),  # what no row sees
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


def _optimizer(shrink: int) -> Iterator[Case]:
    """Lists of 200 tensors in training's mixture of dtypes: float32 states, bfloat16 gradients and model copies."""
    sizes = [4_000_000 // shrink] * 100 + [4096 // shrink] * 100
    p, m, v = ([torch.zeros(n, device=hal.device()) for n in sizes] for _ in range(3))
    g = [torch.randn(n, device=hal.device()).bfloat16() for n in sizes]
    copies = [torch.empty_like(x) for x in g]
    leaves = [torch.nn.Parameter(x.clone()) for x in p]
    for leaf, grad in zip(leaves, g):
        leaf.grad = grad.float()
    fused = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
    elements = sum(sizes)
    yield Case(
        "adamw",
        f"{elements} elements in {len(sizes)} tensors",
        {
            "ours": lambda: ops.adamw(p, g, m, v, step=3, lr=1e-4, model_params=copies),
            "torch fused (float32 grads, no bf16 copy)": lambda: fused.step(),
        },
        elements * (3 * 8 + 2 + 2),
    )
    norm = {"ours": lambda: ops.l2norm(g), "torch": lambda: torch.nn.utils.get_total_norm(g)}
    yield Case("l2norm", f"{elements} elements bf16", dict(norm), elements * 2)
    check = {
        "ours": lambda: ops.unscale_and_check(g, 1.0),
        "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            g, torch.zeros(1, device=hal.device()), torch.ones(1, device=hal.device())
        ),
    }
    yield Case("unscale_and_check", f"{elements} elements bf16", dict(check), elements * 4)


def train_step(shrink: int = 1) -> Iterator[Case]:
    """HAL's GPT against the same model in plain torch, eager and compiled: 12 layers, hidden 1024, S 1024, bfloat16."""
    from hal.model.config import Config
    from hal.model.gpt import GPT
    from hal.model.optimizer import Optimizer

    from .plain_gpt import PlainGPT, step_of

    layers, heads, batch = 12, 16, 8
    hidden, length, vocabulary = 1024 // shrink, 1024 // shrink, 50304 // shrink
    ids = torch.randint(vocabulary, (batch, length + 1), device=hal.device())
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    config = Config(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=length,
        micro_batch_size=batch,
        vocab_size=vocabulary,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        clip_grad=0.0,
        bf16=True,
    )
    model = GPT(config, hal.device())
    optimizer = Optimizer(config, dict(model.named_parameters()))

    def ours() -> None:
        optimizer.zero_grad()
        model.loss(model(tokens), labels).backward()
        optimizer.step(1e-4, 0.0)

    def plain(compiled: bool) -> Call:
        peer = PlainGPT(vocabulary, length, layers, hidden, heads).to(hal.device())
        return step_of(peer, tokens, labels, bf16=True, compiled=compiled)

    shape = f"L{layers} H{hidden} S{length} B{batch} bf16"
    yield Case("training step", shape, {"ours": ours, "torch": plain(False), "torch.compile": plain(True)})
