"""The mandatory calls of the production tier, of the sizes that models use, and their reduced forms for simulators.

Sizes are those of published models: hidden sizes 4,096 to 16,384, sequences of 4,096 to 32,768 tokens, a vocabulary of
152,064 (Qwen), heads of 64, 128 and 256 channels, products over up to 16,384 elements, 100,000 rows, and offsets beyond
2^31 elements. Weights are scaled by 1 / sqrt(their number of summands), as models initialise them, so that an output is
of order 1 and the tolerances of the default tier apply unchanged. Some calls have values at which a detail decides:
rows of 1e-3, where a norm's eps is as large as their variance, and logits of 100 and 1,000, whose exponentials overflow
unless the largest is subtracted first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hal.core.op import OPS, DtypeSpec, Sample, TensorSpec
from hal.rng import Rng

from .blocks import (
    RUN,
    Blocks,
    along,
    attention,
    columns,
    draws,
    every,
    groups,
    in_place,
    overflow,
    packed_attention,
    queries,
    sums,
    table_rows,
    tokens_of_rows,
    whole,
)


@dataclass(frozen=True)
class Case:
    """One call. sample: at full size; reduced: for simulators, None if they leave it out.

    dtypes: those under test, () for all that the op has tolerances for. plant: changes the arguments in place. Both
    samples have the same blocks.
    """

    op: str
    name: str
    sample: Sample
    reduced: Sample | None
    blocks: Blocks
    dtypes: tuple[torch.dtype, ...] = ()
    plant: Callable[[Mapping[str, Any]], None] = lambda arguments: None

    def in_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtypes or tuple(OPS[self.op].tol)


_BF16 = (torch.bfloat16,)
_RNG = Rng(seed=20, offset=3)


_WITHOUT_FLOAT16 = (torch.float32, torch.bfloat16)
"""Of cases in which float16 would only repeat what bfloat16 shows: equal code on tensors of equal size."""

_SMALL = 1e-3
"""The scale of rows whose variance is not above eps."""


def _plus(name: str, number: float) -> Callable[[Mapping[str, Any]], None]:
    """Adds a number to all elements of an argument."""

    def plant(arguments: Mapping[str, Any]) -> None:
        arguments[name].add_(number)

    return plant


def _norm(op: str, rows: int, width: int, scale: float = 1.0, **sample: Any) -> Sample:
    weights = [TensorSpec((width,))] * (2 if op == "layer_norm" else 1)
    return Sample((TensorSpec((rows, width), scale=scale), *weights), **sample)


def _norms() -> list[Case]:
    cases = []
    for op, weights in (("rms_norm", ("weight",)), ("layer_norm", ("weight", "bias"))):
        blocks = every(along("x"), sums(*weights, over=["x"]))
        cases += [
            Case(op, "hidden 4096", _norm(op, 8192, 4096), _norm(op, 70, 1100), blocks),
            Case(op, "hidden 16384", _norm(op, 1024, 16384), _norm(op, 5, 4096), blocks, _WITHOUT_FLOAT16),
            Case(op, "100,000 rows", _norm(op, 100_003, 1024, _SMALL), _norm(op, 1500, 40, _SMALL), blocks),
            Case(op, "beyond 2^31 elements", _norm(op, 524_297, 4096, grad=False), None, along("x"), _BF16),
        ]
    return cases


def _activation(rows: int, width: int, bias: bool = True, **kw: Any) -> Sample:
    return Sample((TensorSpec((rows, width)), TensorSpec((width,)) if bias else None), kw)


def _activations() -> list[Case]:
    def blocks(gated: bool) -> Blocks:
        return every(along("x"), columns(gated=gated, x=1, bias=0))

    return [
        Case(
            "swiglu",
            "28672 to 14336",
            _activation(4096, 28672, False),
            _activation(40, 1300, False),
            along("x"),
        ),
        Case("swiglu", "100,000 rows", _activation(100_003, 512), _activation(1500, 34), blocks(True)),
        Case("geglu", "22016 to 11008", _activation(2048, 22016), _activation(12, 1604), blocks(True)),
        Case(
            "geglu",
            "fast",
            _activation(4096, 2048, approximate="fast"),
            _activation(300, 34, approximate="fast"),
            blocks(True),
        ),
        Case(
            "bias_gelu",
            "16384",
            _activation(4096, 16384),
            _activation(8, 6400),
            blocks(False),
        ),
    ]


def _dropout(rows: int, width: int, **sample: Any) -> Sample:
    return Sample((TensorSpec((rows, width)), 0.1, _RNG), **sample)


def _residual(rows: int, width: int) -> Sample:
    x, bias = TensorSpec((rows, width)), TensorSpec((width,))
    return Sample((x, bias, x), {"p": 0.1, "rng": _RNG})


def _random() -> list[Case]:
    add = every(along("x", "residual"), columns(x=1, bias=0, residual=1))
    return [
        Case("philox_uniform", "100,000 rows", Sample(((100_003, 4099), _RNG)), Sample(((1600, 43), _RNG)), draws),
        Case("dropout", "100,000 rows", _dropout(100_003, 2048), _dropout(1600, 43), along("x")),
        Case("dropout", "beyond 2^31 elements", _dropout(524_297, 4096, grad=False), None, along("x"), _BF16),
        Case("bias_dropout_add", "hidden 8192", _residual(8192, 8192), _residual(300, 1100), add),
    ]


def _linear(rows: int, inputs: int, outputs: int) -> Sample:
    weight = TensorSpec((outputs, inputs), scale=inputs**-0.5)
    return Sample((TensorSpec((rows, inputs)), weight, TensorSpec((outputs,))))


def _scattered(rows: int, inputs: int, outputs: int) -> Sample:
    return Sample((TensorSpec((rows, inputs)), TensorSpec((outputs, inputs), scale=inputs**-0.5)))


def _wgrad(rows: int, inputs: int, outputs: int) -> Sample:
    dy = TensorSpec((rows, outputs), scale=rows**-0.5)
    main, bias = (TensorSpec(shape, dtype=torch.float32) for shape in ((outputs, inputs), (outputs,)))
    return Sample((TensorSpec((rows, inputs)), dy, main, bias))


def _last_rows_in_16_bits(arguments: Mapping[str, Any]) -> None:
    """Leaves the last rows of dy only, because in a sum over all they disappear in the tolerance of 16-bit dtypes."""
    dy = arguments["dy"]
    if dy.dtype.itemsize < 4:
        dy[:-RUN].zero_()
        dy[-RUN:].mul_(len(dy) ** 0.5)


def _products() -> list[Case]:
    linear = every(along("x"), columns(weight=0, bias=0))
    unbiased = every(along("x"), columns(weight=0))
    wgrad = in_place("main_grad", "main_bias_grad", by_column=["dy"])
    return [
        Case("linear", "4096 to 11008", _linear(2048, 4096, 11008), _linear(50, 1100, 70), linear),
        Case("linear", "sums of 16384", _linear(300, 16384, 4096), _linear(10, 4096, 40), linear),
        Case("linear", "100,000 rows", _linear(100_003, 128, 96), _linear(1500, 20, 12), linear),
        Case("all_gather_linear", "4096 to 11008", _linear(2048, 4096, 11008), _linear(50, 1100, 70), linear),
        Case(
            "linear_reduce_scatter", "11008 to 4096", _scattered(2048, 11008, 4096), _scattered(50, 1100, 40), unbiased
        ),
        Case("linear_wgrad", "8192 tokens", _wgrad(8192, 4096, 2048), _wgrad(1100, 70, 40), wgrad),
        Case(
            "linear_wgrad",
            "100,000 tokens",
            _wgrad(100_003, 128, 96),
            _wgrad(4096, 20, 12),
            wgrad,
            plant=_last_rows_in_16_bits,
        ),
    ]


def _scaled_linear(rows: int, inputs: int, outputs: int, scales: str) -> Sample:
    """scales: "tensor", "row" or "block" (of 1 x 128 elements of x and 128 x 128 of the weight)."""
    shapes = {
        "tensor": ((), ()),
        "row": ((rows, 1), (outputs, 1)),
        "block": ((rows, -(-inputs // 128)), (-(-outputs // 128), -(-inputs // 128))),
    }[scales]
    x, weight = (TensorSpec((n, inputs), dtype=torch.float8_e4m3fn) for n in (rows, outputs))
    x_scale, weight_scale = (
        TensorSpec(shape, scale=scale, dtype=torch.float32) for shape, scale in zip(shapes, (1.0, inputs**-0.5))
    )
    return Sample((x, weight, x_scale, weight_scale), {"dtype": DtypeSpec()})


def _scaled_products() -> list[Case]:
    def case(name: str, scales: str, full: tuple[int, int, int], small: tuple[int, int, int], blocks: Blocks) -> Case:
        return Case("scaled_linear", name, _scaled_linear(*full, scales), _scaled_linear(*small, scales), blocks)

    by_tensor, by_row = (
        every(along("x"), columns(weight=0)),
        every(along("x", "x_scale"), columns(weight=0, weight_scale=0)),
    )
    return [
        case("4096 to 11008", "tensor", (1024, 4096, 11008), (50, 1104, 80), by_tensor),
        case("sums of 16384", "row", (300, 16384, 4096), (10, 4096, 48), by_row),
        case("4096 to 4100, scales of blocks", "block", (300, 4096, 4100), (50, 1100, 270), along("x", "x_scale")),
        case("100,000 rows", "row", (100_003, 128, 96), (1500, 16, 16), by_row),
    ]


def _attention(
    b: int, heads: int, kv: int, sq: int, skv: int, d: int, layout: str = "BNSD", e: int = 0, **kw: Any
) -> Sample:
    """A call with heads of d channels, e of v (0: d)."""

    def shape(n: int, s: int, d: int = d) -> tuple[int, ...]:
        length = {"B": b, "N": n, "S": s, "D": d, "H": n * d}
        return tuple(length[letter] for letter in layout)

    if "H" in layout:
        kw |= {"num_heads": heads, "num_kv_heads": kv}
    q, k, v = TensorSpec(shape(heads, sq)), TensorSpec(shape(kv, skv)), TensorSpec(shape(kv, skv, e or d))
    return Sample((q, k, v), {"layout": layout, **kw})


def _packed(lengths: tuple[int, ...], heads: int, kv: int, d: int) -> Sample:
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cu = TensorSpec((len(ends),), "values", values=tuple(map(float, ends)), dtype=torch.int32)
    tokens = [TensorSpec((ends[-1], n, d)) for n in (heads, kv, kv)]
    return Sample(tuple(tokens), {"layout": "TND", "next_tokens": 0, "cu_seqlens_q": cu, "cu_seqlens_k": cu})


def _masked(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(shape, "bool", p=0.3, dtype=torch.bool)


def _merged(tokens: int, batch: int, heads: int, d: int) -> Sample:
    single = torch.float32
    result, lse = (tokens, batch, heads, d), TensorSpec((batch, heads, tokens), scale=3.0, dtype=single)
    return Sample((TensorSpec(result, dtype=single), lse, TensorSpec(result), lse))


def _attentions() -> list[Case]:
    causal: dict[str, Any] = {"next_tokens": 0}
    lse = functools.partial(attention, lse=True)

    def case(name: str, sample: Sample, reduced: Sample | None, blocks: Blocks = attention) -> Case:
        return Case("flash_attention", name, sample, reduced, blocks)

    def slopes(heads: int) -> TensorSpec:
        values = tuple(2.0 ** (-8 * (i + 1) / heads) for i in range(heads))
        return TensorSpec((heads,), "values", values=values, dtype=torch.float32)

    return [
        case(
            "latent attention, 4096 tokens, heads of 192 and 128",  # DeepSeek-V3
            _attention(1, 4, 4, 4096, 4096, 192, e=128, **causal),
            _attention(1, 2, 2, 300, 300, 24, e=16, **causal),
        ),
        case(
            "absorbed latent attention, one query, 16384 keys of 576 and 512 channels",
            _attention(1, 16, 1, 1, 16384, 576, e=512),
            _attention(1, 4, 1, 1, 600, 36, e=32),
        ),
        case(
            "softcap, window of 4096, 8192 tokens, heads of 256",  # Gemma 2
            _attention(1, 2, 1, 8192, 8192, 256, pre_tokens=4096, softcap=50.0, **causal),
            _attention(1, 2, 1, 400, 400, 16, pre_tokens=130, softcap=5.0, **causal),
        ),
        case(
            "sinks, window of 127, 8192 tokens, heads 8 over 1 of 64",  # gpt-oss
            _attention(1, 8, 1, 8192, 8192, 64, pre_tokens=127, sinks=TensorSpec((8,)), **causal),
            _attention(1, 4, 1, 400, 400, 16, pre_tokens=50, sinks=TensorSpec((4,)), **causal),
        ),
        case(
            "ALiBi, 4096 tokens, heads of 128",  # BLOOM
            _attention(1, 4, 4, 4096, 4096, 128, alibi_slopes=slopes(4), **causal),
            _attention(1, 2, 2, 300, 300, 16, alibi_slopes=slopes(2), **causal),
        ),
        case(
            "a bias of every head, 2048 tokens, heads of 64",  # T5
            _attention(2, 4, 4, 2048, 2048, 64, scale=1.0, bias=TensorSpec((1, 4, 2048, 2048))),
            _attention(2, 2, 2, 280, 280, 16, scale=1.0, bias=TensorSpec((1, 2, 280, 280))),
        ),
        case(
            "causal, BSND, 4096 tokens, heads 8 over 2 of 128",
            _attention(1, 8, 2, 4096, 4096, 128, "BSND", **causal),
            _attention(1, 4, 2, 300, 300, 16, "BSND", **causal),
        ),
        case(
            "all keys with their log-sum-exp, 4096 tokens, heads of 256",
            _attention(1, 2, 2, 4096, 4096, 256, return_lse=True),
            _attention(1, 2, 2, 70, 300, 40, return_lse=True),
            lse,
        ),
        case(
            "mask, SBND, 2048 tokens, heads of 64",
            _attention(2, 2, 2, 2048, 2048, 64, "SBND", mask=_masked((2, 1, 2048, 2048))),
            _attention(2, 2, 2, 280, 280, 16, "SBND", mask=_masked((2, 1, 280, 280))),
        ),
        case(
            "window of 4096, 16384 tokens",
            _attention(1, 2, 1, 16384, 16384, 128, pre_tokens=4096, **causal),
            _attention(1, 2, 1, 400, 400, 16, pre_tokens=130, **causal),
        ),
        case("causal, 32768 tokens, heads of 64", _attention(1, 1, 1, 32768, 32768, 64, **causal), None),
        case(
            "SBH, batch of 2",
            _attention(2, 8, 8, 2048, 2048, 128, "SBH", **causal),
            _attention(2, 4, 4, 280, 280, 16, "SBH", **causal),
        ),
        case(
            "dropout, 2048 tokens",
            _attention(1, 2, 2, 2048, 2048, 128, dropout_p=0.1, rng=_RNG, **causal),
            _attention(1, 2, 2, 280, 280, 16, dropout_p=0.1, rng=_RNG, **causal),
        ),
        case(
            "one query, 32768 keys, heads 32 over 8 of 128",
            _attention(1, 32, 8, 1, 32768, 128),
            _attention(1, 4, 2, 1, 600, 16),
        ),
        case(
            "packed sequences", _packed((4096, 1, 5003), 8, 2, 128), _packed((300, 1, 271), 4, 2, 16), packed_attention
        ),
        Case("merge_attention", "100,000 tokens", _merged(100_003, 1, 8, 64), _merged(1500, 1, 4, 16), queries),
        Case("merge_attention", "heads of 192", _merged(4096, 2, 16, 192), _merged(300, 2, 4, 24), queries),
    ]


def _rotary(tokens: int, batch: int, heads: int, d: int, **sample: Any) -> Sample:
    angles = TensorSpec((tokens, d // 2), dtype=torch.float32)
    return Sample((TensorSpec((tokens, batch, heads, d)), angles, angles), **sample)


def _softmax(
    b: int,
    n: int,
    sq: int,
    sk: int,
    causal: bool = False,
    mask: TensorSpec | None = None,
    spread: float = 1.0,
    **sample: Any,
) -> Sample:
    arguments = {"mask": mask, "causal": causal, "scale": 0.125}
    return Sample((TensorSpec((b, n, sq, sk), scale=spread),), arguments, **sample)


def _loss(tokens: int, vocabulary: int, smoothing: float = 0.0, **sample: Any) -> Sample:
    target = TensorSpec((tokens,), "int", low=0, high=vocabulary, dtype=torch.int64)
    logits = TensorSpec((tokens, vocabulary), scale=3.0)
    return Sample((logits, target), {"label_smoothing": smoothing}, **sample)


def _embedding(vocabulary: int, width: int, tokens: int) -> Sample:
    ids = TensorSpec((tokens,), "int", low=0, high=vocabulary, dtype=torch.int64)
    return Sample((TensorSpec((vocabulary, width)), ids))


def _rows() -> list[Case]:
    loss = along("logits", "target")
    queries, heads = along("x", dim=2), along("x", dim=1, run=1, drawn=1)
    return [
        Case(
            "rotary",
            "beyond 2^31 elements",
            _rotary(524_297, 1, 32, 128, grad=False),
            None,
            along("x", "cos", "sin"),
            _BF16,
        ),
        Case("rotary", "32768 tokens", _rotary(32768, 1, 16, 128), _rotary(700, 2, 3, 16), along("x", "cos", "sin")),
        Case(
            "rotary",
            "interleaved, 32768 tokens",
            _rotary(32768, 1, 16, 128, kwargs={"interleaved": True}),
            _rotary(700, 2, 3, 16, kwargs={"interleaved": True}),
            along("x", "cos", "sin"),
        ),
        Case(
            "scale_mask_softmax",
            "causal, 4096 tokens",
            _softmax(1, 4, 4096, 4096, True),
            _softmax(1, 4, 608, 608, True),
            heads,
            _WITHOUT_FLOAT16,
        ),
        Case(
            "scale_mask_softmax",
            "mask, 4096 tokens",
            _softmax(1, 4, 4096, 4096, mask=_masked((1, 1, 4096, 4096))),
            _softmax(1, 4, 288, 608, mask=_masked((1, 1, 288, 608))),
            heads,
        ),
        Case(
            "scale_mask_softmax",
            "32768 keys, logits of 1,000",
            _softmax(1, 1, 2048, 32768, spread=8.0),
            _softmax(1, 1, 96, 3008, spread=8.0),
            queries,
            plant=_plus("x", 8000.0),
        ),
        Case(
            "scale_mask_softmax",
            "beyond 2^31 elements",
            _softmax(1, 1, 65_600, 32768, grad=False),
            None,
            queries,
            _BF16,
        ),
        Case(
            "cross_entropy",
            "vocabulary of 152064, logits of 100",
            _loss(1024, 152_064),
            _loss(30, 9000),
            loss,
            plant=_plus("logits", 100.0),
        ),
        Case(
            "cross_entropy",
            "vocabulary of 152064, label smoothing",
            _loss(1024, 152_064, 0.1),
            _loss(30, 9000, 0.1),
            loss,
        ),
        Case("cross_entropy", "100,000 tokens", _loss(100_003, 1031), _loss(1500, 37), loss, _WITHOUT_FLOAT16),
        Case("cross_entropy", "beyond 2^31 elements", _loss(14_200, 152_064, grad=False), None, loss, _BF16),
        Case(
            "embedding", "vocabulary of 152064", _embedding(152_064, 4096, 8192), _embedding(3000, 40, 900), table_rows
        ),
    ]


def _add_norm(op: str, rows: int, width: int, scale: float = 1.0) -> Sample:
    x, weights = TensorSpec((rows, width), scale=scale), [TensorSpec((width,))] * (2 if op == "add_layer_norm" else 1)
    return Sample((x, x, *weights))


def _linear_loss(tokens: int, width: int, vocabulary: int) -> Sample:
    weight = TensorSpec((vocabulary, width), scale=width**-0.5)
    target = TensorSpec((tokens,), "int", low=0, high=vocabulary, dtype=torch.int64)
    return Sample((TensorSpec((tokens, width)), weight, target), {"label_smoothing": 0.1})


def _mlp(rows: int, inputs: int, outputs: int, activation: str) -> Sample:
    weight = TensorSpec((outputs, inputs), scale=inputs**-0.5)
    return Sample((TensorSpec((rows, inputs)), weight, TensorSpec((outputs,))), {"activation": activation})


def _heads(tokens: int, heads: int, kv_heads: int, d: int) -> Sample:
    q, k = (TensorSpec((tokens, 1, n, d)) for n in (heads, kv_heads))
    # Cosines and sines of up to about 1.
    weight, angles = TensorSpec((d,)), TensorSpec((tokens, d // 2), scale=0.3, dtype=torch.float32)
    return Sample((q, k, weight, weight, angles, angles))


def _composites() -> list[Case]:
    cases = []
    for op, weights in (("add_rms_norm", ("weight",)), ("add_layer_norm", ("weight", "bias"))):
        blocks = every(along("x", "residual", outputs=2), sums(*weights, over=["x", "residual"]))
        cases += [
            Case(op, "hidden 8192", _add_norm(op, 4096, 8192), _add_norm(op, 70, 1100), blocks),
            Case(op, "100,000 rows", _add_norm(op, 100_003, 512, _SMALL), _add_norm(op, 1500, 40, _SMALL), blocks),
        ]
    loss = every(along("x", "target"), sums("weight", over=["x", "target"]))

    def mlp(size: str, activation: str, full: tuple[int, int, int], reduced: tuple[int, int, int]) -> Case:
        blocks = every(along("x"), columns(gated=activation != "gelu", weight=0, bias=0))
        samples = _mlp(*full, activation), _mlp(*reduced, activation)
        return Case("linear_bias_activation", f"{activation}, {size}", *samples, blocks)

    heads = every(along("q", "k", "cos", "sin", outputs=2), sums("q_weight", "k_weight", over=["q", "k", "cos", "sin"]))
    return [
        *cases,
        Case(
            "linear_cross_entropy",
            "vocabulary of 152064",
            _linear_loss(300, 512, 152_064),
            _linear_loss(30, 16, 9000),
            loss,
        ),
        Case(
            "linear_cross_entropy",
            "100,000 tokens",
            _linear_loss(100_003, 512, 1031),
            _linear_loss(1500, 8, 37),
            loss,
            _WITHOUT_FLOAT16,
        ),
        mlp("4096 to 11008", "swiglu", (1024, 4096, 11008), (50, 300, 70)),
        mlp("4096 to 2048", "geglu", (300, 4096, 2048), (50, 300, 70)),
        mlp("100,000 rows", "gelu", (100_003, 128, 96), (1500, 20, 12)),
        Case("qk_norm_rotary", "32768 tokens", _heads(32768, 8, 2, 128), _heads(700, 3, 1, 16), heads),
    ]


def _lists(*sizes: int, **how: Any) -> list[TensorSpec]:
    return [TensorSpec((n,), **how) for n in sizes]


def _adamw(*sizes: int, model: torch.dtype | None = None) -> Sample:
    squares = _lists(*sizes, dist="int", high=3, dtype=torch.float32)
    kw: dict[str, Any] = {"step": 7, "lr": 0.01, "weight_decay": 0.1}
    if model is not None:
        kw["model_params"] = _lists(*sizes, dtype=model)
    return Sample((_lists(*sizes), _lists(*sizes, dtype=model), _lists(*sizes), squares), kw)


def _last_infinite(arguments: Mapping[str, Any]) -> None:
    arguments["grads"][-1][-1] = float("inf")


def _optimizer() -> list[Case]:
    adamw = in_place("params", "exp_avgs", "exp_avg_sqs", "model_params", reads=["grads"])
    full, small, bf16 = (4096, 152_064 * 1024), (40, 35_000), torch.bfloat16
    lists = [Sample((_lists(*sizes),)) for sizes in (full, small)]
    lengths = (3,) * 600  # more tensors than one launch takes, and more partial sums than a block has threads
    scaled = [Sample((_lists(*sizes), 0.125)) for sizes in (full, small)]
    return [
        Case("adamw", "156 million parameters", _adamw(*full), _adamw(*small), adamw),
        Case("adamw", "bfloat16 copies", _adamw(*full, model=bf16), _adamw(*small, model=bf16), adamw),
        Case("adamw", "beyond 2^31 bytes", _adamw((1 << 29) + 4099), None, adamw),
        Case("adamw", "600 tensors", _adamw(*lengths), _adamw(*lengths), adamw),
        Case("l2norm", "156 million elements", lists[0], lists[1], whole()),
        Case("l2norm", "600 tensors", Sample((_lists(*lengths),)), Sample((_lists(*lengths),)), whole()),
        Case("unscale_and_check", "finite", scaled[0], scaled[1], every(in_place("grads"), overflow)),
        Case("unscale_and_check", "infinity in the last element", scaled[0], scaled[1], overflow, plant=_last_infinite),
    ]


_DEEPSEEK: dict[str, Any] = {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4, "scaling_factor": 2.5}


def _router(tokens: int, experts: int, topk: int, **kw: Any) -> Sample:
    return Sample((TensorSpec((tokens, experts)), topk), kw)


def _biased_router(tokens: int, experts: int) -> Sample:
    return _router(tokens, experts, 8, expert_bias=TensorSpec((experts,), scale=0.1, dtype=torch.float32), **_DEEPSEEK)


def _assigned(tokens: int, experts: int, topk: int, low: int = 0) -> TensorSpec:
    return TensorSpec((tokens, topk), "int", low=low, high=experts, dtype=torch.int64)


def _balance(tokens: int, experts: int, topk: int) -> Sample:
    return Sample((TensorSpec((tokens, experts)), _assigned(tokens, experts, topk)), {"sequences": 2})


def _drop(tokens: int, experts: int, topk: int) -> Sample:
    assigned = _assigned(tokens, experts, topk)
    return Sample((TensorSpec((tokens, topk)), assigned, experts, tokens * topk // experts))


def _permutation(tokens: int, h: int, experts: int, topk: int, low: int = 0, **kw: Any) -> Sample:
    weights = TensorSpec((tokens, topk), dtype=torch.float32)
    return Sample((TensorSpec((tokens, h)), _assigned(tokens, experts, topk, low), experts), {"probs": weights, **kw})


def _unpermutation(tokens: int, h: int, topk: int) -> Sample:
    rows = tokens * topk  # a prime number is the step, so that every row occurs once
    row_map = tuple(float(i * 7919 % rows) for i in range(rows))
    spec = TensorSpec((tokens, topk), "values", values=row_map, dtype=torch.int64)
    return Sample((TensorSpec((rows, h)), spec), {"probs": TensorSpec((tokens, topk), dtype=torch.float32)})


def _zipf(rows: int, experts: int) -> TensorSpec:
    """Sizes of groups in proportion to 1, 1/2, 1/3, ...; the second group is empty."""
    total = sum(1 / (i + 1) for i in range(experts) if i != 1)
    sizes = [0 if i == 1 else int(rows / (i + 1) / total) for i in range(experts)]
    sizes[0] += rows - sum(sizes)
    return TensorSpec((experts,), "values", values=tuple(map(float, sizes)), dtype=torch.int64)


def _experts(rows: int, experts: int, n_in: int, n_out: int) -> Sample:
    weight = TensorSpec((experts, n_out, n_in), scale=n_in**-0.5)
    return Sample((TensorSpec((rows, n_in)), weight, _zipf(rows, experts)))


def _experts_wgrad(rows: int, experts: int, n_in: int, n_out: int) -> Sample:
    dy, main = TensorSpec((rows, n_out), scale=rows**-0.5), TensorSpec((experts, n_out, n_in), dtype=torch.float32)
    return Sample((TensorSpec((rows, n_in)), dy, _zipf(rows, experts), main))


def _mixture_of_experts() -> list[Case]:
    router = along("logits", outputs=2)
    sums = whole("logits", outputs=3)
    permuted = whole("x", "probs", outputs=4)
    return [
        Case("moe_router", "100,000 tokens, 2 of 8 experts", _router(100_003, 8, 2), _router(1500, 8, 2), router),
        Case("moe_router", "8 of 256 experts in 8 groups", _biased_router(8192, 256), _biased_router(100, 64), router),
        Case("moe_balance_sums", "256 experts", _balance(8192, 256, 8), _balance(200, 64, 8), sums),
        Case("moe_drop", "100,000 tokens", _drop(100_003, 64, 4), _drop(1500, 8, 2), whole()),
        Case(
            "permute", "64 experts, hidden 1024", _permutation(2048, 1024, 64, 8), _permutation(200, 70, 8, 3), permuted
        ),
        Case(
            "permute",
            "dropped and padded",
            _permutation(100_003, 32, 8, 2, -1, capacity=20_000),
            _permutation(1500, 16, 8, 2, -1, capacity=300),
            permuted,
        ),
        Case("unpermute", "hidden 4096", _unpermutation(4096, 4096, 2), _unpermutation(300, 130, 4), tokens_of_rows),
        Case("grouped_linear", "4096 to 1408", _experts(4096, 16, 4096, 1408), _experts(300, 5, 700, 40), groups),
        Case("grouped_linear", "100,000 rows", _experts(100_003, 64, 128, 96), _experts(1500, 12, 20, 12), groups),
        Case(
            "grouped_linear_wgrad",
            "16384 rows",
            _experts_wgrad(16384, 8, 2048, 1408),
            _experts_wgrad(1100, 5, 70, 40),
            groups,
        ),
        Case(
            "grouped_swiglu",
            "100,000 rows",
            Sample((TensorSpec((100_003, 2816)), TensorSpec((100_003,)))),
            Sample((TensorSpec((1500, 70)), TensorSpec((1500,)))),
            along("x", "probs"),
        ),
    ]


def cases() -> list[Case]:
    """All cases, by op."""
    return [
        *_norms(),
        *_activations(),
        *_random(),
        *_products(),
        *_scaled_products(),
        *_attentions(),
        *_rows(),
        *_composites(),
        *_optimizer(),
        *_mixture_of_experts(),
    ]
