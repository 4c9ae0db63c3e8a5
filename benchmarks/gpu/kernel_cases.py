"""The kernels of HAL in `make gpu`, against eager and compiled torch and other libraries; and training steps.

Sizes are those of a 7B model in bfloat16, and once each tensors of more than 2^31 elements, whose offsets need 64 bits,
and small ones, for which the cost of a launch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hal
from hal import Rng, ops

from ..harness.case import OURS, Thunk
from . import libraries
from .cases import DROPOUT, GpuCase, Work, both
from .gpu_report import SMALL
from .rehearsal import Gpu
from .values import ByRows, Errors, Function

RNG = Rng(1)
HIDDEN, GATED, VOCABULARY = 4096, 11008, 50304
BEYOND = "beyond 2^31 elements"
"""In the shape of cases whose offsets do not fit into 32 bits."""


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _case(
    gpu: Gpu,
    name: str,
    op: Function,
    plain: Function,
    inputs: Sequence[Tensor],
    check: ByRows,
    *,
    reread: Sequence[int] | None = None,
    written: Sequence[int] | None = None,
    hidden_bytes: int = 0,
    note: str = "",
    libraries: Mapping[str, Function] | None = None,
    modules: Mapping[str, Callable[[], Any]] | None = None,
) -> Iterator[GpuCase]:
    """reread: inputs that the backward pass has to read again (default: all). written: inputs whose gradient it has to
    write (default: all that have one; a gradient that is dy itself is not). hidden_bytes: bytes of an input of which
    neither pass has to read."""
    shape = f"{'x'.join(map(str, inputs[0].shape))} {str(inputs[0].dtype).removeprefix('torch.')}"
    with torch.no_grad():
        out = _bytes([op(*inputs)])
    forward = _bytes(inputs) + out - hidden_bytes
    again = inputs if reread is None else [inputs[i] for i in reread]
    gradients = inputs[: check.gradients] if written is None else [inputs[i] for i in written]
    backward = out + _bytes(again) + _bytes(gradients) - 2 * hidden_bytes
    functions = {OURS: op, "eager": plain, "compile": gpu.compile(plain), **(libraries or {})}
    work = Work(bytes=(forward, forward + backward))
    yield from both(gpu, name, f"{shape}{note}", functions, inputs, check, work, modules)


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=hal.device())


def _reference(op: hal.Op[Any, Any], *arguments: Any, **options: Any) -> Function:
    """op's reference as a function of (first row, inputs)."""
    return lambda first, *inputs: op.reference(*inputs, *arguments, **options)


def kernels(gpu: Gpu) -> Iterator[GpuCase]:
    """Every kernel of HAL at the sizes of a 7B model, and then beyond 2^31 elements."""
    rows, h = 8192 // gpu.shrink, HIDDEN // gpu.shrink
    for count, note in ((rows, ""), (max(1, 64 // gpu.shrink), SMALL)):
        yield from _norms(gpu, count, h, note)
    yield from _activations(gpu, rows, "")
    yield from _dropout(gpu, rows, h, "")
    yield from _softmax(gpu, 4, "")
    yield from _rotary(gpu)
    for v in (50257, VOCABULARY):  # rows off and on 16-byte boundaries
        yield from _cross_entropy(gpu, 4096 // gpu.shrink, v, "")
    yield from _linear_gelu(gpu, rows // 2, h)
    yield from _optimizer(gpu)


def large(gpu: Gpu) -> Iterator[GpuCase]:
    """The kernels that index one tensor, at more than 2^31 elements."""
    note = f", {BEYOND}"
    yield from _norms(gpu, 524416 // gpu.shrink, HIDDEN // gpu.shrink, note, only_rms=True)
    yield from _activations(gpu, 97600 // gpu.shrink, note, only_swiglu=True)
    yield from _dropout(gpu, 524416 // gpu.shrink, HIDDEN // gpu.shrink, note, only_plain=True)
    yield from _softmax(gpu, 33 if gpu.shrink == 1 else 2, note)
    yield from _cross_entropy(gpu, 42752 // gpu.shrink, VOCABULARY, note)


def _norms(gpu: Gpu, rows: int, h: int, note: str, only_rms: bool = False) -> Iterator[GpuCase]:
    x, w = _normal(rows, h), _normal(h)
    if not only_rms:
        yield from _case(
            gpu,
            "layer_norm",
            ops.layer_norm,
            lambda x, w, b: F.layer_norm(x, (h,), w, b),
            (x, w, w.clone()),
            ByRows(ops.layer_norm, _reference(ops.layer_norm), (True, False, False), 3),
            note=note,
            libraries=libraries.layer_norm(),
            modules={"TransformerEngine": libraries.transformer_engine("LayerNorm", w, w)},
        )
    yield from _case(
        gpu,
        "rms_norm",
        ops.rms_norm,
        lambda x, w: F.rms_norm(x, (h,), w, 1e-5),
        (x, w),
        ByRows(ops.rms_norm, _reference(ops.rms_norm), (True, False), 2),
        note=note,
        libraries=libraries.rms_norm(),
        modules={"TransformerEngine": libraries.transformer_engine("RMSNorm", w)},
    )


def _activations(gpu: Gpu, rows: int, note: str, only_swiglu: bool = False) -> Iterator[GpuCase]:
    wide = _normal(rows, 2 * (GATED // gpu.shrink))
    for op, peers in ((ops.swiglu, libraries.swiglu()), (ops.geglu, libraries.geglu())):
        check = ByRows(op, _reference(op), (True,), 1)
        yield from _case(gpu, op.name, op, op.reference, (wide,), check, note=note, libraries=peers)
        if only_swiglu:
            return
    h = 4 * (HIDDEN // gpu.shrink)
    for kind, plain in (("tanh", "tanh"), ("none", "none")):
        yield from _case(
            gpu,
            f"bias_gelu {kind}",
            partial(ops.bias_gelu, approximate=kind),
            lambda x, b, plain=plain: F.gelu(x + b, approximate=plain),
            (_normal(rows, h), _normal(h)),
            ByRows(ops.bias_gelu, _reference(ops.bias_gelu, kind), (True, False), 2),
            note=note,
        )


def _linear_gelu(gpu: Gpu, rows: int, h: int) -> Iterator[GpuCase]:
    """The first layer of a GPT's MLP: a product, bias and gelu."""
    x, weight, bias = _normal(rows, h), _normal(4 * h, h) * h**-0.5, _normal(4 * h)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    op = ops.linear_bias_activation
    check = ByRows(op, _reference(op, activation="gelu"), (True, False, False), 3)
    shape = f"{rows}x{h}x{4 * h} {str(x.dtype).removeprefix('torch.')}"
    product = 2.0 * rows * h * 4 * h
    ours = partial(op, activation="gelu")
    functions: dict[str, Function] = {OURS: ours, "eager": plain, "compile": gpu.compile(plain)}
    yield from both(
        gpu, "linear + gelu", shape, functions, (x, weight, bias), check, Work(flops=(product, 3 * product))
    )


def _dropout(gpu: Gpu, rows: int, h: int, note: str, only_plain: bool = False) -> Iterator[GpuCase]:
    """Rows have the elements of the draw that follow those of the rows before them."""
    x = _normal(rows, h)
    yield from _case(
        gpu,
        "dropout",
        lambda x: ops.dropout(x, DROPOUT, RNG),
        lambda x: F.dropout(x, DROPOUT),
        (x,),
        ByRows(
            ops.dropout,
            lambda first, x: ops.dropout.reference(x, DROPOUT, RNG.block((rows, h), (first, 0))),
            (True,),
            1,
        ),
        reread=(),
        note=note,
    )
    if only_plain:
        return
    yield from _case(
        gpu,
        "bias_dropout_add",
        lambda x, b, r: ops.bias_dropout_add(x, b, r, p=DROPOUT, rng=RNG),
        lambda x, b, r: r + F.dropout(x + b, DROPOUT),
        (x, _normal(h), _normal(rows, h)),
        ByRows(
            ops.bias_dropout_add,
            lambda first, x, b, r: ops.bias_dropout_add.reference(
                x, b, r, p=DROPOUT, rng=RNG.block((rows, h), (first, 0))
            ),
            (True, False, True),
            3,
        ),
        reread=(),
        written=(0, 1),
        note=note,
    )


def _softmax(gpu: Gpu, batch: int, note: str) -> Iterator[GpuCase]:
    n, heads = 2048 // gpu.shrink, 16
    scores = _normal(batch, heads, n, n)
    yield from _case(
        gpu,
        "scale_mask_softmax",
        lambda x: ops.scale_mask_softmax(x, None, 0.1, True),
        lambda x: ops.scale_mask_softmax.reference(x, None, 0.1, True),
        (scores,),
        ByRows(ops.scale_mask_softmax, _reference(ops.scale_mask_softmax, None, 0.1, True), (True,), 1, chunk=1),
        hidden_bytes=batch * heads * n * (n - 1) // 2 * scores.element_size(),  # the masked triangle
        note=note,
    )


def _rotary(gpu: Gpu) -> Iterator[GpuCase]:
    length = 4096 // gpu.shrink
    heads, angle = _normal(length, 2, 32, 128), torch.rand(length, 64, device=hal.device())
    yield from _case(
        gpu,
        "rotary",
        ops.rotary,
        ops.rotary.reference,
        (heads, angle.cos(), angle.sin()),
        ByRows(ops.rotary, _reference(ops.rotary), (True, True, True), 1),
        reread=(1, 2),
    )


def _cross_entropy(gpu: Gpu, rows: int, vocabulary: int, note: str) -> Iterator[GpuCase]:
    target = torch.randint(vocabulary // gpu.shrink, (rows,), device=hal.device())
    yield from _case(
        gpu,
        "cross_entropy",
        lambda z: ops.cross_entropy(z, target),
        lambda z: F.cross_entropy(z.float(), target, reduction="none"),
        (_normal(rows, vocabulary // gpu.shrink),),
        ByRows(
            ops.cross_entropy,
            lambda first, z: ops.cross_entropy.reference(z, target[first : first + z.shape[0]]),
            (True,),
            1,
        ),
        note=note,
        libraries=libraries.cross_entropy(target),
    )


def _optimizer(gpu: Gpu) -> Iterator[GpuCase]:
    """Lists of 200 tensors with the dtypes of training: float32 states, bfloat16 gradients and model copies."""
    sizes = [4_000_000 // gpu.shrink] * 100 + [HIDDEN // gpu.shrink] * 100
    p, m, v = ([torch.zeros(n, device=hal.device()) for n in sizes] for _ in range(3))
    g = [torch.randn(n, device=hal.device()).bfloat16() for n in sizes]
    copies = [torch.empty_like(x) for x in g]
    leaves = [torch.nn.Parameter(x.clone()) for x in p]
    for leaf, grad in zip(leaves, g):
        leaf.grad = grad.float()
    fused = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
    elements = sum(sizes)

    def step() -> None:
        ops.adamw(p, g, m, v, step=3, lr=1e-4, model_params=copies)

    yield GpuCase(
        "adamw",
        f"{elements} elements in {len(sizes)} tensors",
        {OURS: step, "torch fused (float32 grads, no bf16 copy)": lambda: fused.step()},
        partial(_adamw_error, step, p, g, m, v, copies),
        elements * (3 * 8 + 2 + 2),  # p, m, v read and written; a gradient read and a model copy written
    )
    norm: dict[str, Thunk] = {OURS: lambda: ops.l2norm(g), "torch": lambda: torch.nn.utils.get_total_norm(g)}
    yield GpuCase("l2norm", f"{elements} elements bf16", norm, partial(_norm_error, g), elements * 2)
    check: dict[str, Thunk] = {
        OURS: lambda: ops.unscale_and_check(g, 1.0),
        "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            g, torch.zeros(1, device=hal.device()), torch.ones(1, device=hal.device())
        ),
    }
    yield GpuCase("unscale_and_check", f"{elements} elements bf16", check, partial(_unscale_error, g), elements * 4)


def _adamw_error(step: Thunk, p: list[Tensor], *lists: list[Tensor]) -> float:
    """The error of one step, tensor by tensor."""
    before, errors = [x.clone() for x in p], Errors(ops.adamw)
    g, m, v, copies = lists
    first, second = ([x.clone() for x in state] for state in (m, v))
    step()
    for i in range(len(p)):
        exact = [[x[i].double()] for x in (before, g, first, second)]
        ops.adamw.reference(*exact, step=3, lr=1e-4)
        for got, (right,) in ((p[i], exact[0]), (m[i], exact[2]), (v[i], exact[3]), (copies[i], exact[0])):
            errors.add(got, right)
    return errors.worst


def _norm_error(g: list[Tensor]) -> float:
    errors = Errors(ops.l2norm)
    exact = torch.stack([x.double().square().sum() for x in g]).sum().sqrt()
    errors.add(ops.l2norm(g), exact)
    return errors.worst


def _unscale_error(g: list[Tensor]) -> float:
    """The error of halving copies, and that an infinity in the last tensor is found."""
    errors, part = Errors(ops.unscale_and_check), [x.clone() for x in (g[0], g[-1])]
    finite = ops.unscale_and_check(part, 0.5)
    for got, x in zip(part, (g[0], g[-1])):
        errors.add(got, 0.5 * x.double())
    part[-1][-1] = float("inf")
    flags = [float(finite), float(ops.unscale_and_check(part, 1.0))]
    return errors.worst if flags == [0.0, 1.0] else float("inf")


def train_step(gpu: Gpu) -> Iterator[GpuCase]:
    """HAL's GPT against the same model in plain torch, eager and compiled: 12 layers, hidden 1024, S 1024, bfloat16."""
    from ..peers import hal_gpt, plain_gpt

    layers, heads, batch = (12, 16, 8) if gpu.shrink == 1 else (2, 4, 2)
    hidden, length, vocabulary = 1024 // gpu.shrink, 1024 // gpu.shrink, VOCABULARY // gpu.shrink
    ids = torch.randint(vocabulary, (batch, length + 1), device=hal.device())
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    config = hal_gpt.config_of(layers, hidden, heads, length, vocabulary, bf16=True)

    def plain(compiled: bool, mode: str | None = None) -> Thunk:
        model = plain_gpt.PlainGPT(vocabulary, length, layers, hidden, heads).to(hal.device())
        return plain_gpt.step_of(model, tokens, labels, bf16=True, compiled=compiled, mode=mode)

    def peer(mode: str | None = None) -> Thunk:
        return gpu.compile(plain) if "compile" in gpu.lacks else plain(True, mode)

    def step(recorded: bool = False) -> Thunk:
        return hal_gpt.step_of(config, hal.device(), tokens, labels, recorded=recorded)

    shape, check = f"L{layers} H{hidden} S{length} B{batch} bf16", partial(_loss_error, config, tokens, labels)
    yield GpuCase("training step", shape, {OURS: step(), "torch": plain(False), "torch.compile": peer()}, check)
    graphs = {OURS: step(recorded=True), "torch.compile with CUDA graphs": peer("reduce-overhead")}
    yield GpuCase("training step, --cuda-graphs", shape, graphs, check)


def _loss_error(config: Any, tokens: Tensor, labels: Tensor) -> float:
    """The error of the loss against plain torch with the same weights in float32, in tolerances of the golden loss."""
    from hal.model.gpt.model import GPT
    from hal.testing import golden

    from ..peers import plain_gpt

    model = GPT(config, tokens.device)
    with torch.no_grad():
        exact = plain_gpt.with_weights_of(model)(tokens, labels)
        loss = model.loss(model(tokens), labels)
    allowed = golden.TOL[torch.bfloat16]
    return float((loss.double() - exact.double()).abs() / (allowed.atol + allowed.rtol * exact.abs()))
