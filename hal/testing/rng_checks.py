"""Random numbers as values: extra calls for ops that draw.

`edge_samples` puts the dropout probability exactly on, and one step beside, the bits of a drawn element, where a kernel
that compares floats, or compares with > for >=, drops the wrong one. `check_order` holds that a draw depends on its Rng
alone, not on what was drawn before.
"""

from __future__ import annotations

import torch

from hal.op import Sample, T
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
    return Sample((T(shape), p, rng))


def _bias_dropout_add(shape: tuple[int, ...], p: float, rng: Rng) -> Sample:
    # Large values: an element dropped wrongly is far outside of any tolerance.
    return Sample((T(shape, scale=10.0), None, T(shape)), {"p": p, "rng": rng})


def _flash_attention(shape: tuple[int, ...], p: float, rng: Rng) -> Sample:
    # Head size 8 over 8 keys with scale 0: every key weighs 1/8, so that a wrong element moves its row by a lot.
    q, kv = T((*shape[:2], shape[2], 8)), T((*shape[:2], shape[3], 8), scale=4.0)
    return Sample((q, kv, kv), {"layout": "BNSD", "scale": 0.0, "dropout_p": p, "rng": rng})


def check_order(subject: Subject) -> int:
    """Draws from two forks in both orders; the bits must not care. Returns the number of calls that ran."""
    op = subject.op
    sample = next((s for s in op.directed() if _draws(s)), None)
    if sample is None or "rng" not in op.signature.parameters:
        return 0
    results: list[torch.Tensor] = []
    for names in (("first", "second"), ("second", "first")):
        drawn = {}
        for name in names:
            arguments = build(op, sample, subject.dtype, subject.device)
            if _reasons(subject, arguments):
                return 0
            arguments["rng"] = Rng(3).fork("layer", name)
            drawn[name] = next(iter(run(op, op, arguments, False).outputs.values()))
        results.append(drawn["first"])
    if not equal_bits(*results):
        raise subject.fail("a draw depends on what was drawn before it (fork order matters)", sample, check="order")
    return 4


def _draws(sample: Sample) -> bool:
    rngs = [v for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, Rng)]
    sizes = [v.shape for v in sample.args if isinstance(v, T)]
    return bool(rngs) and rngs[0].full_shape is None and all(0 not in s for s in sizes)


def _reasons(subject: Subject, arguments: dict[str, object]) -> bool:
    from .calls import invoke

    return bool(invoke(subject.op, subject.impl.why_not, arguments))
