"""The simulated library accepts and refuses the same calls as Ascend's, with its codes, and computes as documented.

Sources of the rules: aclnnFlashAttentionScore and aclnnFlashAttentionVarLenScore (constraints), and the operator's
tiling. 161002 is an invalid parameter, 561002 what the tiling refuses.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import ops
from hal.backends.npu import Npu, simulator

TRIANGLE = (2048, 2048)
BAND: dict[str, Any] = {"sparse_mode": 4, "atten_mask": TRIANGLE}


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str = "BNSD", **options: Any) -> Tensor:
    """The vendor's own Python call; queued errors are raised."""
    out = torch.ops.npu.npu_fusion_attention(q, k, v, heads, layout, **options)[0]
    return out.cpu()


def bnsd(
    sq: int, sk: int, n: int = 2, d: int = 16, dtype: torch.dtype = torch.float32, kv: int | None = None
) -> list[Tensor]:
    torch.manual_seed(sq * 1000 + sk)
    shapes = (1, n, sq, d), (1, kv or n, sk, d), (1, kv or n, sk, d)
    return [torch.randn(shape).to(dtype).npu() for shape in shapes]


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.triu(torch.ones(shape), 1).to(dtype).npu()


ILLEGAL = [
    # what, code, sizes and dtype, options
    ("compressed mask of another size, mode 2", 561002, {}, {"sparse_mode": 2, "atten_mask": (24, 24)}),
    ("compressed mask of another size, mode 3", 561002, {}, {"sparse_mode": 3, "atten_mask": (1024, 2048)}),
    ("compressed mask of another size, mode 4", 561002, {}, {"sparse_mode": 4, "atten_mask": (24, 24)}),
    ("prefix mode with the causal mask", 561002, {}, {"sparse_mode": 6, "atten_mask": TRIANGLE, "prefix": [4]}),
    ("mask of one row", 561002, {}, {"atten_mask": (1, 24)}),
    ("mask of three dimensions", 561002, {}, {"atten_mask": (1, 24, 24)}),
    ("mask with another number of heads", 561002, {}, {"atten_mask": (1, 3, 24, 24)}),
    ("mask in float", 561002, {}, {"atten_mask": (24, 24), "dtype": torch.float32}),
    ("band without an intersection", 561002, {}, {**BAND, "pre_tockens": -3, "next_tockens": 2}),
    ("both edges negative", 561002, {}, {"atten_mask": (24, 24), "pre_tockens": -1, "next_tockens": -1}),
    ("band beyond the keys", 561002, {}, {**BAND, "pre_tockens": -24, "next_tockens": 60}),
    ("prefix out of range", 561002, {}, {"sparse_mode": 5, "atten_mask": (1, 1, 24, 24), "prefix": [25]}),
    ("prefix mode without a prefix", 561002, {}, {"sparse_mode": 6, "atten_mask": (3072, 2048)}),
    ("float64", 161002, {"dtype": torch.float64}, {}),
    ("head size above 768", 161002, {"d": 770}, {}),
    ("more than 256 heads", 561002, {"n": 257, "d": 1}, {}),
    ("key heads that do not divide the query heads", 561002, {"n": 4, "kv": 3}, {}),
    ("a padding mask", 161002, {}, {"padding_mask": (24, 24)}),
    ("a dropout mask that is too short", 561002, {}, {"keep_prob": 0.5, "dropout_mask": 4}),
]  # fmt: skip


@pytest.mark.parametrize("what, code, sizes, options", ILLEGAL, ids=[row[0] for row in ILLEGAL])
def test_an_illegal_call_is_refused_with_the_librarys_code(
    npu: Npu, what: str, code: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    options = dict(options)
    dtype = options.pop("dtype", torch.bool)
    for name in ("atten_mask", "padding_mask"):
        if name in options:
            options[name] = mask(*options[name], dtype=dtype)
    if "dropout_mask" in options:
        options["dropout_mask"] = torch.zeros(options["dropout_mask"], dtype=torch.uint8).npu()
    q, k, v = bnsd(24, 24, **sizes)
    with pytest.raises(RuntimeError, match=f"error {code}"):
        attention(q, k, v, q.shape[1], **options)


def _companion(name: str, *sizes: tuple[int, ...], **options: Any) -> None:
    out = getattr(torch.ops.npu, name)(*(torch.ones(size).npu() for size in sizes), **options)
    (out[0] if isinstance(out, tuple) else out).cpu()


ILLEGAL_COMPANIONS = [
    ("npu_rotary_mul", [(1, 2, 2, 896), (1, 2, 1, 896), (1, 2, 1, 896)], "below 896"),
    ("npu_rotary_mul", [(1, 2, 2, 7), (1, 2, 1, 7), (1, 2, 1, 7)], "D must be even"),
    ("npu_swiglu", [(3, 7)], "must be even"),
    ("npu_swiglu_backward", [(3, 3), (3, 7)], "must be even"),
    ("npu_geglu", [(3, 7)], "must be even"),
    ("npu_rms_norm", [(3, 8), (7,)], "last sizes of x"),
    ("npu_rms_norm", [(3, 8), (3, 1)], "last sizes of x"),
]


@pytest.mark.parametrize("name, sizes, says", ILLEGAL_COMPANIONS)
def test_companion_operators_refuse_sizes_beyond_their_rules(
    npu: Npu, name: str, sizes: list[tuple[int, ...]], says: str
) -> None:
    with pytest.raises(RuntimeError, match="error 161002") as refused:
        _companion(name, *sizes)
    assert says in str(refused.value)
    assert torch.ones(2).npu().add(1).tolist() == [2, 2]  # the call itself was refused, so the queue still runs


ILLEGAL_SOFTMAX = """
import torch, hal
hal.use('npu', simulate=True)
x = torch.ones({x}).npu()
torch.ops.npu.npu_scaled_masked_softmax(x, torch.zeros({mask}, dtype=torch.bool).npu(), 1.0, {triangle}).cpu()
"""


@pytest.mark.parametrize(
    "x, mask, triangle, says",
    [
        ((1, 1, 32, 40), (1, 1, 32, 40), False, "multiples of 32 in 32..4096"),
        ((1, 1, 32, 32), (1, 1, 32, 31), False, "does not broadcast"),
        ((1, 1, 32, 32), (1, 1, 32, 32), True, "fixed_triu_mask is reserved"),
    ],
)
def test_the_softmax_kernel_beyond_its_limits(
    simulated: Npu, x: tuple[int, ...], mask: tuple[int, ...], triangle: bool, says: str
) -> None:
    """Each in a separate process: this operator is refused in torch_npu's queue, which then stops."""
    code = ILLEGAL_SOFTMAX.format(x=x, mask=mask, triangle=triangle)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "ScaledMaskedSoftmax: " in done.stderr, done.stderr
    assert says in done.stderr and "error 161002" in done.stderr, done.stderr


@pytest.mark.parametrize("shape", [(2, 2, 24, 20), (1, 2, 24, 20), (2, 2, 1, 20)])
def test_the_gradient_of_a_positional_bias(npu: Npu, shape: tuple[int, ...]) -> None:
    """pse is added before the scale; its gradient is summed over the broadcast dimensions."""
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 2, 24, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    bias, dy = torch.randn(shape), torch.randn(2, 2, 24, 8)
    ours, exact = bias.npu().requires_grad_(), bias.double().requires_grad_()
    out = torch.ops.npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 2, "BNSD", pse=ours, scale=0.3)[0]
    out.backward(dy.npu())
    score = 0.3 * (q.double() @ k.double().transpose(-1, -2) + exact)
    (score.softmax(-1) @ v.double()).backward(dy.double())
    assert ours.grad is not None and exact.grad is not None
    assert close(ours.grad.cpu(), exact.grad)


@pytest.mark.parametrize("kind, shape", [(0, (2, 2, 24, 24)), (0, (1, 2, 24, 24)), (2, (2,)), (2, (2, 2)), (3, (2,))])
def test_the_kinds_of_positional_bias_of_the_second_version(npu: Npu, kind: int, shape: tuple[int, ...]) -> None:
    """0: added after the scale, with a gradient; 2 and 3: slopes, of which the library forms ALiBi's bias."""
    torch.manual_seed(3)
    (q, k, v, dy), pse = (torch.randn(2, 2, 24, 8) for _ in range(4)), torch.randn(shape)
    ours, exact = [q.npu().requires_grad_(), pse.npu().requires_grad_()], [q.double(), pse.double()]
    out = torch.ops.npu.npu_fusion_attention_v2(
        ours[0], k.npu(), v.npu(), 2, "BNSD", pse=ours[1], pse_type=kind, scale=0.3
    )[0]
    out.backward(dy.npu())
    for x in exact:
        x.requires_grad_()
    apart = (torch.arange(24)[:, None] - torch.arange(24)).abs().double()
    added = exact[1] if kind == 0 else -exact[1][..., None, None] * (apart.sqrt() if kind == 3 else apart)
    score = 0.3 * (exact[0] @ k.double().transpose(-1, -2)) + added
    expected = score.softmax(-1) @ v.double()
    expected.backward(dy.double())
    for got, right in ((out, expected), *((a.grad, b.grad) for a, b in zip(ours, exact) if kind == 0 or a is ours[0])):
        assert got is not None and right is not None and close(got.detach().cpu(), right.detach())


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_a_sink_takes_part_in_the_softmax(npu: Npu, layout: str) -> None:
    """As in the example of op-plugin's page: one more logit per head, whose column is dropped before the product."""
    torch.manual_seed(3)
    (q, k, v, dy), sink = (torch.randn(1, 2, 24, 8) for _ in range(4)), torch.randn(2)
    move = (lambda x: x.npu()) if layout == "BNSD" else (lambda x: x[0].transpose(0, 1).contiguous().npu())
    ours, exact = [move(q).requires_grad_(), sink.npu().requires_grad_()], [q.double(), sink.double()]
    packed = {} if layout == "BNSD" else {"actual_seq_qlen": [24], "actual_seq_kvlen": [24], "softmax_layout": "TND"}
    out = torch.ops.npu.npu_fusion_attention(ours[0], move(k), move(v), 2, layout, sink=ours[1], **packed)[0]
    out.backward(move(dy))
    for x in exact:
        x.requires_grad_()
    score = exact[0] @ k.double().transpose(-1, -2)
    extra = exact[1].view(1, 2, 1, 1).expand(1, 2, 24, 1)
    expected = torch.cat([score, extra], -1).softmax(-1)[..., :-1] @ v.double()
    expected.backward(dy.double())
    for got, right in ((out, expected), *((a.grad, b.grad) for a, b in zip(ours, exact))):
        assert got is not None and right is not None
        right = right if layout == "BNSD" or right.ndim == 1 else right[0].transpose(0, 1)
        assert close(got.detach().cpu(), right.detach())


def test_torch_npus_own_checks_come_first(npu: Npu) -> None:
    q, k, v = bnsd(8, 8)
    for options in ({"layout": "SBND"}, {"sparse_mode": 9}, {"keep_prob": 1.5}):
        with pytest.raises(RuntimeError, match=r"layout|sparse_mode|keep_prob"):
            attention(q, k, v, 2, **options)


def test_packed_sequences_need_a_key_for_every_row(npu: Npu) -> None:
    q, k = torch.randn(9, 2, 8).npu(), torch.randn(7, 2, 8).npu()
    lengths = {"actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 7]}
    with pytest.raises(RuntimeError, match="error 561002"):
        attention(q, k, k, 2, "TND", sparse_mode=3, atten_mask=mask(*TRIANGLE), **lengths)
    with pytest.raises(RuntimeError, match="error 561002"):
        attention(q, k, k, 2, "TND", actual_seq_qlen=[4, 12], actual_seq_kvlen=[4, 7])


def test_packed_sequences_are_at_most_1024(npu: Npu) -> None:
    x = torch.randn(1025, 1, 8).npu()
    ends = list(range(1, 1026))
    with pytest.raises(RuntimeError, match=r"packed sequences must be in 1\.\.1024"):
        attention(x, x, x, 1, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """softmax over the visible keys, on the CPU, in float64; all tensors [1, n, s, d]; scale 1."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    score = q @ k.transpose(-1, -2)
    if visible is not None:
        score = score.masked_fill(~visible, -math.inf)
    return score.softmax(-1) @ v


def close(got: Tensor, exact: Tensor) -> bool:
    return bool(torch.allclose(got.double(), exact, atol=2e-5, rtol=1e-4))


def test_without_a_mask_pre_and_next_are_ignored(npu: Npu) -> None:
    q, k, v = bnsd(24, 24)
    for mode in (0, 2, 3, 4):
        got = attention(q, k, v, 2, pre_tockens=3, next_tockens=0, sparse_mode=mode)
        assert close(got, plain(q, k, v, None)), f"mode {mode}"


def test_mode_1_and_the_causal_modes_ignore_pre_and_next(npu: Npu) -> None:
    q, k, v = bnsd(24, 24)
    causal = torch.ones(24, 24).tril().bool()
    for mode, sizes in ((1, (24, 24)), (2, TRIANGLE), (3, TRIANGLE)):
        got = attention(q, k, v, 2, pre_tockens=1, next_tockens=5, sparse_mode=mode, atten_mask=mask(*sizes))
        assert close(got, plain(q, k, v, causal)), f"mode {mode}"


def test_the_origin_of_each_mode(npu: Npu) -> None:
    """Mode 2 counts from the top left, modes 3 and 4 from the bottom right."""
    q, k, v = bnsd(9, 20)
    i, j = torch.arange(9)[:, None], torch.arange(20)
    expected = {2: j <= i, 3: j <= i + 11, 4: (j >= i + 11 - 4) & (j <= i + 11 + 2)}
    for mode, visible in expected.items():
        got = attention(q, k, v, 2, pre_tockens=4, next_tockens=2, sparse_mode=mode, atten_mask=mask(*TRIANGLE))
        assert close(got, plain(q, k, v, visible)), f"mode {mode}"


def test_the_compressed_mask_is_read_not_assumed(npu: Npu) -> None:
    q, k, v = bnsd(24, 24)
    nothing_masked = torch.zeros(TRIANGLE, dtype=torch.bool).npu()
    got = attention(q, k, v, 2, sparse_mode=3, atten_mask=nothing_masked)
    assert close(got, plain(q, k, v, None))


def test_a_row_without_a_key_is_an_average_unless_asked_otherwise(npu: Npu) -> None:
    q, k, v = bnsd(8, 8)
    dead = mask(8, 8)
    dead[3] = True
    uniform = attention(q, k, v, 2, sparse_mode=1, atten_mask=dead)
    zero = attention(q, k, v, 2, sparse_mode=1, atten_mask=dead, inner_precise=2)
    assert torch.allclose(uniform[:, :, 3], v.cpu().mean(2), atol=1e-6)
    assert not zero[:, :, 3].any()
    assert torch.equal(uniform[:, :, 4:], zero[:, :, 4:])


def test_mode_0_skips_whole_tiles_only(machine: simulator.Simulator) -> None:
    """A causal mask with pre=2048 and the device's tiles: row 2175 still sees 127 keys that lie outside the window, row
    2176 sees none."""
    machine.set("tile", 128)
    size = 2304
    q, k = torch.zeros(1, 1, size, 1).npu(), torch.zeros(1, 1, size, 1).npu()  # every visible key has the same weight
    oldest = torch.zeros(1, 1, size, 1)
    oldest[:, :, :128] = 1.0
    got = attention(q, k, oldest.npu(), 1, pre_tockens=2048, next_tockens=0, atten_mask=mask(size, size))
    counts = (got.flatten() * torch.arange(1, size + 1)).round()  # how many of the first 128 keys a row still sees
    assert counts[2175] == 128 and ops.band_mask(size, size, 2048, 0)[2175, :127].all()  # type: ignore[index]
    assert counts[2176] == 0


@pytest.mark.parametrize("layout", ["SBH", "BSH"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pre, next", [(65536, 65536), (2048, 0)])
@pytest.mark.parametrize("size", [2177, 2304])
def test_megatrons_windows_are_exact_beyond_a_tile(
    npu: Npu, layout: str, dtype: torch.dtype, pre: int, next: int, size: int
) -> None:
    """The eight combinations of megatron_npu's README, on more than 2176 tokens, forward and backward."""
    heads, d = 1, 8
    torch.manual_seed(size)
    shape = (size, 1, heads * d) if layout == "SBH" else (1, size, heads * d)
    operands = [torch.randn(shape).to(dtype) for _ in range(4)]
    here = {"layout": layout, "num_heads": heads, "pre_tokens": pre, "next_tokens": next}
    results = []
    for attention_op, tensors in (
        (ops.flash_attention, [x.npu() for x in operands]),
        (ops.flash_attention.reference, [x.double() for x in operands]),
    ):
        leaves = [x.requires_grad_() for x in tensors[:3]]
        out = attention_op(*leaves, **here)
        out.backward(tensors[3])
        results.append([out, *(x.grad for x in leaves)])
    for got, exact in zip(*results):
        assert torch.allclose(got.detach().cpu().double(), exact, atol=8e-3, rtol=2e-2)


@pytest.mark.parametrize("layout", ["SBH", "BSH"])
def test_megatrons_causal_mask_with_the_readmes_flags(npu: Npu, layout: str) -> None:
    """megatron_npu always adds a causal mask: 65536 and 65536 become causal attention, 2048 and 0 do not change."""
    size, d = 2177, 8
    torch.manual_seed(0)
    shape = (size, 1, d) if layout == "SBH" else (1, size, d)
    q, k, v = (torch.randn(shape).half().npu() for _ in range(3))
    causal = torch.ones(size, size, dtype=torch.bool).triu(1).npu()
    here = {"layout": layout, "num_heads": 1}
    masked = ops.flash_attention(q, k, v, pre_tokens=65536, next_tokens=65536, mask=causal, **here)
    assert torch.equal(masked, ops.flash_attention(q, k, v, next_tokens=0, **here))
    window = ops.flash_attention(q, k, v, pre_tokens=2048, next_tokens=0, mask=causal, **here)
    assert torch.equal(window, ops.flash_attention(q, k, v, pre_tokens=2048, next_tokens=0, **here))
    assert not torch.equal(window, masked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2, 32, 32), (2, 3, 64, 96)])
def test_the_softmax_kernel_within_its_limits(npu: Npu, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sizes that random calls of the conformance kit rarely hit: multiples of 32."""
    torch.manual_seed(1)
    x = torch.randn(shape).to(dtype)
    mask = torch.rand(shape[0], 1, *shape[2:]) < 0.4
    mask[0, 0, 3] = True  # a fully masked row
    here = {"mask": mask, "scale": 0.3, "causal": True}
    there = {**here, "mask": mask.npu()}
    ours, exact = x.npu().requires_grad_(), x.double().requires_grad_()
    assert hal.why(ops.scale_mask_softmax, ours, **there).chosen == "npu/scaled_masked_softmax"
    y, expected = ops.scale_mask_softmax(ours, **there), ops.scale_mask_softmax.reference(exact, **here)
    dy = torch.randn(shape).to(dtype)
    y.backward(dy.npu())
    expected.backward(dy.double())
    assert ours.grad is not None and exact.grad is not None
    tol = ops.scale_mask_softmax.tol[dtype]
    assert torch.allclose(y.detach().cpu().double(), expected.detach(), atol=tol.atol, rtol=tol.rtol)
    assert torch.allclose(ours.grad.cpu().double(), exact.grad, atol=4 * tol.atol, rtol=4 * tol.rtol)
