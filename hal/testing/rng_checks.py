"""Additional checks for ops that draw random numbers.

`edge_samples` sets the dropout probability to the bits of a drawn element, and to one step below and above, where a
kernel that compares floats, or with > in place of >=, drops the wrong element. `check_order` checks that a draw depends
on its Rng alone, not on earlier draws.
"""

from __future__ import annotations

import torch

from hal.core.op import Sample, TensorSpec
from hal.rng import Rng

from .calls import build, run
from .comparison import equal_bits
from .subject import Subject


def edge_samples(name: str) -> list[Sample]:
    """Calls of op `name` whose dropout probability is at the edge of one element's bits; empty for other ops."""
    makers = {"dropout": _dropout, "bias_dropout_add": _bias_dropout_add, "flash_attention": _flash_attention}
    if name not in makers:
        return []
    from hal.ops.random import element_index, philox_bits

    rng, shape = Rng(0x1234567890ABCDEF, 77), (1, 1, 4, 8)
    bits = int(philox_bits(element_index(shape, rng), rng).flatten()[13] >> 8)
    return [makers[name](shape, b / (1 << 24), rng) for b in (bits - 1, bits, bits + 1)]


def _dropout(shape: tuple[int, ...], p: float, rng: Rng) -> Sample:
    return Sample((TensorSpec(shape), p, rng))


def _bias_dropout_add(shape: tuple[int, ...], p: float, rng: Rng) -> Sample:
    # With large values, the error of an element that is dropped wrongly exceeds every tolerance.
    return Sample((TensorSpec(shape, scale=10.0), None, TensorSpec(shape)), {"p": p, "rng": rng})


def _flash_attention(shape: tuple[int, ...], p: float, rng: Rng) -> Sample:
    # With scale 0, each of the 8 keys has weight 1/8, so that one wrong element changes its row far beyond tolerance.
    q, kv = TensorSpec((*shape[:2], shape[2], 8)), TensorSpec((*shape[:2], shape[3], 8), scale=4.0)
    return Sample((q, kv, kv), {"layout": "BNSD", "scale": 0.0, "dropout_p": p, "rng": rng})


def check_order(subject: Subject) -> int:
    """Draws from two forks in both orders, which must give the same bits. Returns the number of calls that ran."""
    op = subject.op
    sample = next((s for s in op.edge_cases() if _draws(s)), None)
    if sample is None or "rng" not in op.signature.parameters:
        return 0
    results: list[torch.Tensor] = []
    for names in (("first", "second"), ("second", "first")):
        drawn = {}
        for name in names:
            arguments = build(op, sample, subject.dtype, subject.device)
            if subject.impl.refusals(op.Call(**arguments)):
                return 0
            arguments["rng"] = Rng(3).fork("layer", name)
            drawn[name] = next(iter(run(op, op, arguments, False).outputs.values()))
        results.append(drawn["first"])
    if not equal_bits(*results):
        raise subject.fail("a draw depends on what was drawn before it (fork order matters)", sample, check="order")
    return 4


def _draws(sample: Sample) -> bool:
    rngs = [v for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, Rng)]
    sizes = [v.shape for v in sample.args if isinstance(v, TensorSpec)]
    return bool(rngs) and rngs[0].full_shape is None and all(0 not in s for s in sizes)
