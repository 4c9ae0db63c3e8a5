"""cuda/fused: dropout's bits, results against those in float64, planted faults, and the calls that no fused kernel
takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cuda_helpers import planted
from torch import Tensor

import hal
from hal import Rng, ops
from hal.backends.cuda import Cuda, compile
from hal.backends.cuda.attention import fused
from hal.backends.cuda.simulator.build import Simulator
from hal.ops.random import keep_mask

(FUSED,) = (impl for impl in Cuda.impls["flash_attention"] if impl.id == fused.ID)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}

RNG = Rng(5, 11)
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 5, 5, 40, 71], [0, 3, 12, 20, 60, 70]))
PACKED = {"layout": "TND", "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
DROPOUT = {"dropout_p": 0.3, "rng": RNG}

SINKS = torch.tensor([0.5, -3.0, 2.0, 6.0])  # of 4 query heads

# name -> (b, query heads, key/value heads, sq, skv, d[, dv]), other arguments
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal, more keys than queries": ((1, 2, 1, 40, 70, 64), {"next_tokens": 0}),
    "dropout in a window": ((2, 2, 1, 70, 40, 24), {"pre_tokens": 20, "next_tokens": 3, **DROPOUT}),
    "a block of a larger draw": (
        (1, 1, 1, 34, 37, 16),
        {"dropout_p": 0.5, "rng": RNG.block((3, 4, 90, 90), (2, 1, 33, 46))},
    ),
    "a mask, and dropout": (
        (2, 2, 2, 33, 65, 128),
        {"mask": torch.arange(65) % 3 == torch.arange(33)[:, None] % 3, **DROPOUT},
    ),
    "odd head size": ((1, 2, 2, 9, 35, 7), {"next_tokens": 0, **DROPOUT}),
    "dead rows": ((1, 1, 1, 20, 20, 8), {"pre_tokens": 5, "next_tokens": -3, **DROPOUT}),
    "a negative scale": ((1, 1, 1, 17, 33, 64), {"scale": -0.4}),
    "packed": ((1, 4, 2, 71, 70, 32), {**PACKED, "next_tokens": 0, **DROPOUT}),
    "packed, top left": ((1, 2, 2, 71, 70, 32), {**PACKED, "pre_tokens": 4, "next_tokens": 2, "top_left": True}),
    "sinks": ((1, 4, 2, 33, 40, 16), {"pre_tokens": 9, "next_tokens": -2, "sinks": SINKS, **DROPOUT}),
    "sinks, packed": ((1, 4, 2, 71, 70, 32), {**PACKED, "next_tokens": 0, "sinks": SINKS, **DROPOUT}),
    "narrower values": ((2, 2, 1, 35, 40, 48, 32), {"next_tokens": 0, **DROPOUT}),
    "wider values, of odd size": ((1, 2, 2, 20, 33, 24, 67), {**DROPOUT}),
    "narrower values, packed": ((1, 4, 2, 71, 70, 40, 17), {**PACKED, "next_tokens": 0, "sinks": SINKS, **DROPOUT}),
}


def _inputs(sizes: tuple[int, ...], dtype: torch.dtype, layout: str) -> list[Tensor]:
    b, n, g, sq, skv, d, *dv = sizes
    draw = torch.Generator().manual_seed(0)
    tensors = ((sq, n, d), (skv, g, d), (skv, g, dv[0] if dv else d))
    shapes = [(s, h, e) if layout == "TND" else (b, h, s, e) for s, h, e in tensors]
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def _results(run: Callable[..., Any], inputs: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    """out, dq, dk, dv, dsinks if the call has them, and lse."""
    how, wanted = {"layout": "BNSD", **how}, list(inputs)
    if "sinks" in how:
        how["sinks"] = how["sinks"].detach().requires_grad_()
        wanted.append(how["sinks"])
    out, lse = run(*inputs, return_lse=True, **how)
    dout = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, wanted, dout), lse]


def _error(dtype: torch.dtype, sizes: tuple[int, ...], how: dict[str, Any]) -> float:
    """The largest difference from the float64 reference; NaN if a result has one that the reference has not."""
    inputs = _inputs(sizes, dtype, how.get("layout", "BNSD"))
    results = _results(FUSED.call, inputs, how)
    double = [x.detach().double().requires_grad_() for x in inputs]
    expected = _results(ops.flash_attention.reference, double, how)
    # Equal infinities, of queries without a visible key, differ by 0.
    errors = [torch.where(r == e, 0.0, (r.detach() - e.detach()).abs()).max() for r, e in zip(results, expected)]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference(simulated: Cuda, name: str, dtype: torch.dtype) -> None:
    assert _error(dtype, *CASES[name]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_more_than_128_channels(simulated: Cuda, dtype: torch.dtype) -> None:
    """Whose sums two warps share in the backward pass; in float32 those of more than 64 channels do."""
    mask = torch.arange(40) % 5 == torch.arange(37)[:, None] % 5
    assert _error(dtype, (1, 4, 2, 37, 40, 192, 136), {"mask": mask, **DROPOUT}) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("skv", [32, 30, 33])  # rows of the draw that start in the middle of a Philox block, too
def test_the_elements_that_are_dropped_are_hals(simulated: Cuda, dtype: torch.dtype, skv: int) -> None:
    """With the identity as values, the output is the matrix of probabilities after dropout."""
    q, k = torch.randn(1, 2, 19, 40, dtype=dtype), torch.randn(1, 2, skv, 40, dtype=dtype)
    v = torch.eye(skv, 40, dtype=dtype).expand(1, 2, skv, 40)
    keep = keep_mask((1, 2, 19, skv), 0.4, RNG)
    for extras in ({}, {"sinks": SINKS[:2]}):
        out = FUSED.call(q, k, v, layout="BNSD", dropout_p=0.4, rng=RNG, **extras)
        assert torch.equal(out[..., :skv] != 0, keep)
    wide = torch.nn.functional.pad(v, (0, 24))  # heads of 64 channels in v, and of 40 in k
    out = FUSED.call(q, k, wide, layout="BNSD", dropout_p=0.4, rng=RNG)
    assert torch.equal(out[..., :skv] != 0, keep)


@pytest.mark.slow
def test_results_repeat_and_do_not_depend_on_the_grid(simulated: Cuda, simulator: Callable[..., Simulator]) -> None:
    sizes, how = CASES["packed"]
    inputs = _inputs(sizes, torch.bfloat16, "TND")
    first, second = (_results(FUSED.call, inputs, how) for _ in range(2))
    simulator({}, keep=("attention.cu", "attention_tiles.h"), grid=100)
    third = _results(FUSED.call, inputs, how)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third))


def _far_apart() -> bool:
    """Whether rows of q and of k that are 2^27 elements apart give what adjacent ones do; their memory is not touched
    elsewhere."""
    rows, step, d = 20, 1 << 27, 8
    q, k, v = (torch.randn(1, 1, rows, d, dtype=torch.bfloat16) for _ in range(3))
    far = [torch.empty((rows - 1) * step + d, dtype=torch.bfloat16) for _ in range(2)]
    views = [x.as_strided((1, 1, rows, d), (step * rows, step * rows, step, 1)).copy_(y) for x, y in zip(far, (q, k))]
    near = FUSED.call(q, k, v, layout="BNSD", next_tokens=0)
    return torch.equal(FUSED.call(*views, v, layout="BNSD", next_tokens=0), near)


@pytest.mark.slow
@pytest.mark.parametrize("planted_offset", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_offsets_beyond_32_bits(simulator: Callable[..., Simulator], planted_offset: bool) -> None:
    fault = planted("attention.cu", "from += STEP * stride", "from += (int)(STEP * stride)")
    simulator(_sources(fault if planted_offset else {}))
    with hal.activated(Cuda(simulate=True)):
        if planted_offset:
            with pytest.raises(hal.HalError, match="CUDA simulator, kernel attention_fwd"):
                _far_apart()
        else:
            assert _far_apart()


def _sources(changed: dict[str, str]) -> dict[str, str]:
    """The kernel files with these changes, and only for bfloat16 and small heads, because compiling takes time."""
    texts = {f: (compile.KERNELS / f).read_text() for f in ("attention.cu", "attention_tiles.h")} | changed
    texts["attention.cu"] = re.sub(r"(?m)^EXPORT\(.*<(?!bf16, 64>|bf16>).*\n", "", texts["attention.cu"])
    return texts


FAULTS = {
    "fragments of A in another order": (
        "attention_tiles.h",
        "ldmatrix<false>(x, a, step * 2 + place<T, D>(lane % 16, lane / 16 * 16, k))",
        "ldmatrix<false>(x, a, step * 2 + place<T, D>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16, k))",
    ),
    "columns of B in the place of rows": ("attention_tiles.h", "ldmatrix<true>(y, b", "ldmatrix<false>(y, b"),
    "a tile that is used before it has arrived": ("attention.cu", "if (AHEAD && key >= start) finish_copies();", ""),
    "no barrier after the loads": (
        "attention.cu",
        "finish_copies();\n            __syncthreads();",
        "finish_copies();",
    ),
    "no barrier before results are stored": (
        "attention.cu",
        "__syncthreads();\n        store_rows<Q, D>",
        "store_rows<Q, D>",
    ),
    "the old maximum is kept": ("attention.cu", "top[r] = now;", ""),
    "dropout before the sum": (
        "attention.cu",
        "sum[j / 2] += x;\n                    if (!kept(i, j)) x = 0.0f;",
        "if (!kept(i, j)) x = 0.0f;\n                    sum[j / 2] += x;",
    ),
    "bits of the next key": ("attention.cu", "at + key, 8)", "at + key + 1, 8)"),
    "the window of another sequence": ("attention.cu", "i -= s.cu_q[low];", ""),
    "heads of another group": ("attention.cu", "int n = g * (int)s.group,", "int n = g,"),
    "numbers of another query": ("attention.cu", "at + (2 * t + g / 4) * step", "at + 2 * t * step"),
    "statistics of another query": ("attention.cu", "own_mean, from)", "own_mean, from ^ 1)"),
    "a tile of queries is left out": ("attention.cu", ".high > block; })", ".high > block + K; })"),
    "keys that begin beyond a tile": ("attention.cu", ".low >= block + K; })", ".low >= block; })"),
    "the gradient of k without the scale": (
        "attention.cu",
        "put_rows<T, D>(ks, of_k, own, column, scale, scale)",
        "put_rows<T, D>(ks, of_k, own, column, 1.0f, scale)",
    ),
    "a sink that dropout may drop": (
        "attention.cu",
        "sinks && lane % 4 == 0 ? 1.0f",
        "sinks && lane % 4 == 0 ? 0.0f",
    ),
    "values as wide as keys": ("attention.cu", "out.s, first, s.sq, s.dv", "out.s, first, s.sq, s.d"),
    "no gradient through the sum": ("attention.cu", "- mean[j / 2])", "- 0.0f * mean[j / 2])"),
}


FAULTY_CASES = ("packed", "dropout in a window", "narrower values, packed")


def _marks(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow if name.startswith("no barrier before") else pytest.mark.nightly)


@pytest.mark.parametrize("name", map(_marks, FAULTS))
def test_a_planted_fault_is_found(simulator: Callable[..., Simulator], name: str) -> None:
    file, old, new = FAULTS[name]
    simulator(_sources(planted(file, old, new)))
    with hal.activated(Cuda(simulate=True)):
        try:
            errors = [_error(torch.bfloat16, *CASES[case]) for case in FAULTY_CASES]
        except hal.HalError as error:  # the simulator stops a wrong access
            assert "CUDA simulator, kernel attention_" in str(error)
            return
    assert not all(error < 2 * TOLERANCE[torch.bfloat16] for error in errors)


def _table() -> list[tuple[torch.dtype, int, int, dict[str, Any]]]:
    """70 calls with dropout, document masks, padding, windows, packed sequences, sinks, and latent attention's heads:
    dtype, head sizes of k and v, arguments."""
    s, mask = 1024, {"dtype": torch.bool, "device": "meta"}
    cu = torch.empty(9, dtype=torch.int32, device="meta")
    packed = {"layout": "TND", "cu_seqlens_q": cu, "cu_seqlens_k": cu, "next_tokens": 0}
    dropout = {"dropout_p": 0.1, "rng": RNG}
    sinks = torch.empty(16, device="meta")
    kinds: list[dict[str, Any]] = [
        {"next_tokens": 0, **dropout},
        {"pre_tokens": 256, "next_tokens": 0, **dropout},
        {"mask": torch.empty(2, 1, s, s, **mask), "next_tokens": 0},
        {"mask": torch.empty(2, 1, s, s, **mask), "next_tokens": 0, **dropout},
        {"mask": torch.empty(2, 1, 1, s, **mask), **dropout},
        packed,
        {**packed, **dropout},
        {**packed, "pre_tokens": 256, **dropout},
        {"pre_tokens": 128, "next_tokens": 0, "sinks": sinks, **dropout},
        {**packed, "sinks": sinks, **dropout},
    ]
    settings = [
        (torch.bfloat16, 64, 64),
        (torch.bfloat16, 128, 128),
        (torch.float16, 96, 96),
        (torch.bfloat16, 256, 256),
        (torch.float32, 64, 64),
        (torch.bfloat16, 192, 128),
        (torch.float32, 96, 64),
    ]
    return [(*setting, how) for setting, how in product(settings, kinds)]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("groups", [16, 4])
def test_dropout_and_document_masks_never_take_the_unfused_path(
    no_engine: None, architecture: str, groups: int
) -> None:
    """As `hal why` shows for the 70 calls of a table."""
    backend, table = Cuda(simulate=False), _table()
    assert len(table) == 70
    backend.set_attention_order("this device", architecture)
    with hal.activated(backend):
        for dtype, d, dv, how in table:
            packed = how.get("layout") == "TND"
            q, k, v = (
                torch.empty((2048, n, e) if packed else (2, n, 1024, e), dtype=dtype, device="meta")
                for n, e in ((16, d), (groups, d), (groups, dv))
            )
            why = hal.why(ops.flash_attention, q, k, v, **{"layout": "BNSD", **how})
            assert why.chosen is not None and why.chosen != "cuda/unfused", str(why)
            ours = "rng" in how or (packed and (dtype == torch.float32 or d != dv))
            assert (why.chosen == "cuda/fused") == ours, str(why)
