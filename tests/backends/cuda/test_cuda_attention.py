"""The code around torch's attention kernels: the arguments it passes to them, and when it copies."""

from __future__ import annotations

import functools
import importlib.util
import math
import shutil
import sysconfig
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hal
from hal import ops
from hal.backend_tools import AttentionSpec, attention_spec
from hal.backends.cuda import Cuda, launch
from hal.backends.cuda.attention import common, cudnn, flash, flash_wheels, flex, masks, stand_ins, unfused

IMPLS = {impl.id: impl for impl in Cuda.impls["flash_attention"]}
CU = torch.tensor([0, 3, 40, 100], dtype=torch.int32)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize("id", ["cuda/flash", "cuda/cudnn", "cuda/sdpa"])
@pytest.mark.parametrize("layout", ops.layouts.LAYOUTS)
def test_torchs_operators_take_what_we_pass_them(no_engine, monkeypatch, id, layout):
    """On meta tensors torch's own schemas and shape functions run, forward and backward, without a GPU."""
    monkeypatch.setattr(cudnn, "_version", lambda: None)
    sizes = {"B": 2, "S": 100, "T": 100, "D": 64}
    q, k = (meta(*[(sizes | {"N": n, "H": 64 * n})[c] for c in layout]) for n in (4, 2))
    how = {"layout": layout, "next_tokens": 0}
    if layout in ("SBH", "BSH"):
        how |= {"num_heads": 4, "num_kv_heads": 2}
    if layout == "TND":
        how |= {"cu_seqlens_q": CU.to("meta"), "cu_seqlens_k": CU.to("meta")}
    impl = IMPLS[id]
    if impl.refusals(impl.op.Call(q, k, k, **how)):
        assert layout == "TND"
        return
    out, lse = impl.call(q, k, k, **how, return_lse=True)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.dtype == torch.float32
    assert lse.shape == ((4, 100) if layout == "TND" else (2, 4, 100))
    v = k.detach().requires_grad_()
    grads = torch.autograd.grad(impl.call(q, k, v, **how), (q, k, v), out)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_torchs_memory_efficient_operator_takes_heads_of_two_sizes(no_engine):
    q, k, v = meta(2, 4, 100, 192), meta(2, 2, 100, 192), meta(2, 2, 100, 128)
    impl = IMPLS["cuda/sdpa"]
    assert not impl.refusals(impl.op.Call(q, k, v, layout="BNSD", next_tokens=0))
    out = impl.call(q, k, v, layout="BNSD", next_tokens=0)
    assert out.shape == (2, 4, 100, 128)
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    narrow = meta(2, 2, 100, 12)
    assert list(impl.refusals(impl.op.Call(q, k, narrow, layout="BNSD"))) == [
        "head size 12 (sdpa takes multiples of 8 in torch.bfloat16)"
    ]


@pytest.mark.parametrize("id", ["cuda/flash", "cuda/cudnn", "cuda/sdpa", "cuda/flex", "cuda/fused"])
def test_what_fused_kernels_lack_is_left_to_the_unfused_implementation(simulated, id):
    q, bias, ones = meta(2, 4, 128, 64), meta(128, 128), torch.ones(4, device="meta")
    for how in ({"softcap": 30.0}, {"alibi_slopes": ones}, {"bias": bias}, {"sinks": ones}):
        if id == "cuda/fused" and "sinks" in how:
            continue
        call = ops.flash_attention.Call(q, q, q, layout="BNSD", **how)
        assert any(next(iter(how)) in reason for reason in IMPLS[id].refusals(call)), (id, how)
        assert not IMPLS["cuda/unfused"].refusals(call)


def test_layouts_reach_the_kernel_as_views():
    for layout in ("SBND", "BSND", "BNSD", "SBH", "BSH"):
        sizes = {"B": 2, "S": 16, "N": 4, "D": 32, "H": 128}
        x = torch.randn([sizes[c] for c in layout], dtype=torch.float32)
        rows = flash.rows(common.heads_first(x, layout, 4), False)
        assert rows.shape == (2, 16, 4, 32) and rows.data_ptr() == x.data_ptr()


def test_what_a_kernel_could_not_read_is_copied():
    x = torch.randn(2, 4, 16, 33, dtype=torch.float32)[..., :32]  # rows of 33 elements are not on 16-byte boundaries
    assert common.readable(x).data_ptr() != x.data_ptr()
    shifted = torch.randn(2 * 4 * 16 * 32 + 1, dtype=torch.float32)[1:].view(2, 4, 16, 32)
    assert common.readable(shifted).data_ptr() != shifted.data_ptr()


@pytest.mark.parametrize("id", list(IMPLS))
def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity_from_every_implementation(simulated, id):
    q = torch.randn(1, 152, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(1, 136, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    how = {"layout": "BSND", "next_tokens": 0, "return_lse": True}
    if id == "cuda/cudnn":  # such rows need more queries than keys, which it refuses
        assert IMPLS[id].refusals(ops.flash_attention.Call(q, k, k, **how))
        return
    assert not IMPLS[id].refusals(ops.flash_attention.Call(q, k, k, **how))
    out, lse = IMPLS[id].call(q, k, k, **how)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not out[:, :16].any() and not dq[:, :16].any() and out[:, 16:].any()
    assert (lse[..., :16] == -math.inf).all() and lse[..., 16:].isfinite().all()


def test_the_longest_packed_sequence_is_read_once_per_tensor():
    cu = CU.clone()
    assert flash._longest(cu, 100) == 60
    version, _ = cu._hal_longest
    cu._hal_longest = (version, 7)  # the cached value is used ...
    assert flash._longest(cu, 100) == 7
    cu[2] = 90  # ... until the tensor changes
    assert flash._longest(cu, 100) == 87


WHEELS = {"cuda/fa3": flash_wheels.FA3, "cuda/fa4": flash_wheels.FA4}


@pytest.mark.parametrize("id", WHEELS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "pre, following", [(None, 0), (3, 0), (None, 6), (None, 12), (9, None), (2, None), (20, 20), (0, 0)]
)
def test_the_wheels_have_hals_windows_with_more_queries_than_keys(simulated, id, packed, pre, following):
    q, k = torch.randn(14, 4, 16, dtype=torch.float16), torch.randn(9, 2, 16, dtype=torch.float16)
    window = {"pre_tokens": pre, "next_tokens": following}
    expected = ops.flash_attention.reference(q[None], k[None], k[None], layout="BSND", **window)[0]
    cu = [torch.tensor([0, n], dtype=torch.int32) for n in (14, 9)]
    how = {"layout": "TND", "cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]} if packed else {"layout": "BSND"}
    call = (q, k, k) if packed else (q[None], k[None], k[None])
    assert not IMPLS[id].refusals(ops.flash_attention.Call(*call, **how, **window))
    got = IMPLS[id].call(*call, **how, **window)
    torch.testing.assert_close(got if packed else got[0], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("id", WHEELS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_tells_the_wheels_whether_sums_are_ordered(simulated, monkeypatch, id, deterministic):
    from hal.backends.cuda.attention import stand_in_wheels

    monkeypatch.setattr(launch, "deterministic", deterministic)
    q, seen = torch.randn(1, 2, 130, 16, dtype=torch.bfloat16, requires_grad=True), []
    out = IMPLS[id].call(q, q, q, layout="BNSD")
    if id == "cuda/fa3":
        front = importlib.import_module("torch.nn.attention._fa3")
        real = front._FA3_CUDA_BWD
        monkeypatch.setattr(front, "_FA3_CUDA_BWD", lambda *args: seen.append(args[-2]) or real(*args))
    else:
        real = stand_in_wheels._flash_attn_bwd
        recorded = lambda *args, **how: seen.append(how["deterministic"]) or real(*args, **how)  # noqa: E731
        monkeypatch.setattr(stand_in_wheels, "_flash_attn_bwd", recorded)
    torch.autograd.grad(out, q, torch.ones_like(out))
    assert seen == [deterministic]


@pytest.mark.parametrize("id", WHEELS)
def test_a_process_keeps_its_flash_attention(simulated, id):
    current = torch.nn.attention.current_flash_attention_impl
    q = torch.randn(1, 2, 130, 16, dtype=torch.bfloat16)
    before = current()
    IMPLS[id].call(q, q, q, layout="BNSD")
    assert current() == before


@pytest.mark.parametrize("id", WHEELS)
def test_a_wheel_that_cannot_run_says_why(no_engine, monkeypatch, id):
    wheel, q = WHEELS[id], meta(1, 2, 64, 64)
    call = ops.flash_attention.Call(q, q, q, layout="BNSD", next_tokens=0)
    (reason,) = IMPLS[id].refusals(call)
    assert (
        "ModuleNotFoundError" in reason and f"wheel {wheel.package}" in reason and isinstance(reason, hal.Unavailable)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(flash_wheels, "_major", lambda index: 8)
    (reason,) = IMPLS[id].refusals(call)
    assert reason.startswith("compute capability 8.x") and wheel.name in reason and isinstance(reason, hal.Unavailable)


@pytest.mark.parametrize("next_tokens", [0, 6, 9, 12, 13, 40])
def test_a_window_to_the_right_of_few_keys_is_flashs_window(simulated, next_tokens):
    """The kernel treats a side at least as long as the keys as unbounded, which is wrong if there are more queries."""
    q, k = torch.randn(14, 2, 16, dtype=torch.float16), torch.randn(9, 2, 16, dtype=torch.float16)
    dense = (q[None], k[None], k[None])
    cu_q, cu_k = torch.tensor([0, 14], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    packed = {"layout": "TND", "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "next_tokens": next_tokens}
    expected = ops.flash_attention.reference(*dense, layout="BSND", next_tokens=next_tokens)[0]
    got = IMPLS["cuda/flash"].call(q, k, k, **packed)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    reasons = IMPLS["cuda/flash"].refusals(ops.flash_attention.Call(*dense, layout="BSND", next_tokens=next_tokens))
    assert bool(reasons) == (next_tokens in (9, 12))
    if not reasons:
        got = IMPLS["cuda/flash"].call(*dense, layout="BSND", next_tokens=next_tokens)[0]
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_one_query_of_grouped_heads_may_be_read_as_the_rows_of_one_tile(no_engine):
    """flash does that where no side is bounded; a causal window of one query bounds none."""
    q, k = meta(2, 1, 8, 64), meta(2, 300, 2, 64)
    call = attention_spec(ops.flash_attention.Call(q, k, k, layout="BSND", next_tokens=0))
    how = flash._how(call)
    assert (how["window_size_left"], how["window_size_right"]) == (-1, -1)
    assert flash._how(call._replace(sq=2))["window_size_right"] == 0


@pytest.mark.parametrize(("sq", "pre", "next_tokens"), [(10, 3, None), (10, 3, 12), (6, 3, None), (10, 5, None)])
def test_a_bounded_left_side_hides_nothing_to_the_right(simulated, sq, pre, next_tokens):
    """With a bounded left side, the kernel bounds the right one, hiding keys if queries outnumber them by 2 or more."""
    q, k = torch.randn(1, sq, 2, 16, dtype=torch.float16), torch.randn(1, 5, 2, 16, dtype=torch.float16)
    how = {"layout": "BSND", "pre_tokens": pre, "next_tokens": next_tokens}
    reasons = IMPLS["cuda/flash"].refusals(ops.flash_attention.Call(q, k, k, **how))
    assert bool(reasons) == (sq == 10 and pre == 3)
    if reasons:
        assert "flash limits an unbounded right side" in reasons[0]
        return
    expected = ops.flash_attention.reference(q, k, k, **how)
    torch.testing.assert_close(IMPLS["cuda/flash"].call(q, k, k, **how), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("next_tokens", [None, 2, 8, 9, 40])
@pytest.mark.parametrize("pre", [0, 1, 3])
def test_a_bounded_left_side_hides_nothing_to_the_right_of_packed_keys(simulated, pre, next_tokens):
    """Forward and backward: the kernel gets a number of keys that matches the end it assigns to the right side."""
    q = torch.randn(12, 2, 16, dtype=torch.float16, requires_grad=True)
    k = torch.randn(4, 2, 16, dtype=torch.float16, requires_grad=True)
    how = {"layout": "TND", "pre_tokens": pre, "next_tokens": next_tokens}
    how["cu_seqlens_q"] = torch.tensor([0, 10, 12], dtype=torch.int32)
    how["cu_seqlens_k"] = torch.tensor([0, 2, 4], dtype=torch.int32)
    assert not IMPLS["cuda/flash"].refusals(ops.flash_attention.Call(q, k, k, **how))
    got, expected = IMPLS["cuda/flash"].call(q, k, k, **how), ops.flash_attention.reference(q, k, k, **how)
    dy = torch.randn_like(got)
    grads = [torch.autograd.grad(y, (q, k), dy) for y in (got, expected)]
    torch.testing.assert_close((got, *grads[0]), (expected, *grads[1]), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("left", "right", "longest", "visible"),
    [
        (3, -1, 5, 1),
        (3, 12, 5, 1),
        (3, -1, 9, 5),
        (-1, -1, 5, 5),
        (5, -1, 5, 5),
        (-1, 4, 5, 0),
    ],
)
def test_the_stand_in_for_flash_ends_an_open_side_as_torch_does(left, right, longest, visible):
    """flash_api.cpp, set_params_fprop: of 10 queries and 5 keys the first sees the keys up to `longest` - 5."""
    first = stand_ins._window(10, 5, left, right, longest)[0]
    assert (first == 0).tolist() == [True] * visible + [False] * (5 - visible)


def test_sides_beyond_32_bits_reach_the_kernel_as_unbounded():
    call = AttentionSpec("BNSD", 1, 2, 2, 8, 8, 16, 2**40, 2**40, 1.0, 0.0, None, 16, None, False, ())
    assert (flash._how(call)["window_size_left"], flash._how(call)["window_size_right"]) == (-1, -1)


def test_packed_single_queries_and_empty_sequences_with_grouped_heads(simulated):
    """With one query at most, the kernel moves query heads into the batch and raises if a sequence has none."""
    q, k = torch.randn(2, 4, 16, dtype=torch.float16), torch.randn(9, 2, 16, dtype=torch.float16)
    cu = {"cu_seqlens_q": torch.tensor([0, 1, 1, 2], dtype=torch.int32)}
    cu["cu_seqlens_k"] = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    got = IMPLS["cuda/flash"].call(q, k, k, layout="TND", **cu)
    torch.testing.assert_close(got, ops.flash_attention.reference(q, k, k, layout="TND", **cu), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("id", list(IMPLS))
def test_torch_is_asked_for_ordered_sums_around_its_attention_only(simulated, monkeypatch, id):
    """A product of matrices raises in torch's deterministic mode, unless an environment variable is set."""
    monkeypatch.setattr(launch, "deterministic", True)
    modes = []
    for module, name in (
        (stand_ins, "flash_backward"),
        (stand_ins, "efficient_backward"),
        (unfused, "softmax_backward"),
    ):
        real = getattr(module, name)

        def watched(*args, real=real, **kwargs):
            modes.append(torch.are_deterministic_algorithms_enabled())
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)
    q = torch.randn(1, 2, 130, 16, dtype=torch.bfloat16, requires_grad=True)
    if id == "cuda/cudnn":
        backend = Cuda(simulate=True, deterministic=True)
        (impl,) = (impl for impl in backend.implementations(ops.flash_attention) if impl.id == id)
        text = "deterministic mode (cudnn's backward adds in no fixed order)"
        assert impl.refusals(ops.flash_attention.Call(q, q, q, layout="BNSD")) == (text,)
        assert IMPLS[id].refusals(ops.flash_attention.Call(q, q, q, layout="BNSD")) == ()
        return
    # Dispatch asks for refusals first, which imports a wheel.
    assert IMPLS[id].refusals(ops.flash_attention.Call(q, q, q, layout="BNSD")) == ()
    out = IMPLS[id].call(q, q, q, layout="BNSD")
    torch.autograd.grad(out, q, torch.ones_like(out))
    # The wheels are told by an argument, see test_torch_passes_the_wheels_what_they_take.
    asked = {"cuda/flex": [], "cuda/fused": [], "cuda/fa3": [], "cuda/fa4": [], "cuda/unfused": [False]}
    assert modes == asked.get(id, [True])
    assert not torch.are_deterministic_algorithms_enabled()


def test_cudnn_is_given_no_gradient_whose_elements_share_memory():
    x = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
    assert cudnn._readable(x).data_ptr() == x.data_ptr()
    assert 0 not in cudnn._readable(x.expand(3, -1, -1, -1)).stride()


@pytest.mark.parametrize(
    ("version", "length", "refused"),
    [
        (91500, 100, True),
        (91500, 256, False),
        (91501, 100, False),
        (None, 100, False),
    ],
)
def test_lengths_that_an_old_cudnn_reads_past_are_refused(no_engine, monkeypatch, version, length, refused):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    cudnn._version.cache_clear()
    try:
        for q, k in ((meta(1, 2, length, 64), meta(1, 2, 128, 64)), (meta(1, 2, 128, 64), meta(1, 2, length, 64))):
            reasons = IMPLS["cuda/cudnn"].refusals(ops.flash_attention.Call(q, k, k, layout="BNSD"))
            assert [("read past the end" in r) for r in reasons] == [True] * refused
    finally:
        cudnn._version.cache_clear()


def test_the_simulator_asks_no_cudnn_for_its_version(simulated, monkeypatch):
    monkeypatch.setattr(cudnn, "_version", lambda: pytest.fail("asked"))
    q = torch.randn(1, 2, 9, 16, dtype=torch.bfloat16)
    assert not IMPLS["cuda/cudnn"].refusals(ops.flash_attention.Call(q, q, q, layout="BNSD"))


def test_a_bias_that_32_bits_cannot_index_is_refused(no_engine):
    long, window = meta(1, 1, 2**16, 64), {"layout": "BNSD", "pre_tokens": 9}

    def why_not(*args: Any, **how: Any) -> Sequence[str]:
        return IMPLS["cuda/sdpa"].refusals(ops.flash_attention.Call(*args, **how))

    for keys in (2**16, 2**16 - 7):  # a row in memory has a multiple of 8 elements
        k = meta(1, 1, keys, 64)
        assert "in 32 bits" in why_not(long, k, k, **window)[0]
    mask = torch.empty(1, 2**16, dtype=torch.bool, device="meta")
    assert "in 32 bits" in why_not(long, long, long, layout="BNSD", mask=mask)[0]
    shorter = meta(1, 1, 2**16 - 8, 64)
    assert not why_not(long, shorter, shorter, **window)
    for causal in (None, 0):  # no bias
        assert not why_not(long, long, long, layout="BNSD", next_tokens=causal)


@pytest.mark.parametrize(
    ("spec", "compiler", "include", "message"),
    [
        (None, "gcc", "", "pip install triton"),
        (object(), None, "", "install gcc"),
        (object(), "gcc", "", "install python3-dev"),
        (object(), "gcc", "Python.h", None),
    ],
)
def test_flex_says_what_its_compiler_lacks(no_engine, monkeypatch, tmp_path, spec, compiler, include, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if include:
        (tmp_path / include).touch()
    flex._cannot_compile.cache_clear()
    try:
        q = meta(1, 2, 128, 64)
        reasons = IMPLS["cuda/flex"].refusals(ops.flash_attention.Call(q, q, q, layout="BNSD"))
        assert (message is None and not reasons) or message in reasons[0]
    finally:
        flex._cannot_compile.cache_clear()


@pytest.mark.slow
def test_compiling_flex_leaves_backward_passes_that_retain_the_graph(monkeypatch):
    """torch raises in them after a plain one of the same shape. (flex has no backward on a CPU; a stub replaces it.)"""
    from torch._functorch import config

    entry = config._config["donated_buffer"]
    monkeypatch.setattr(entry, "default", entry.default)
    with config.patch(donated_buffer=True):
        entry.default = True
        flex._compiled.cache_clear()
        flex._compiled()
        function = torch.compile(lambda x: (x.sin() * x).exp().cos(), backend="aot_eager")
        x, errors = torch.randn(8, requires_grad=True), []

        def twice(retain):
            try:
                y = function(x).sum()
                y.backward(retain_graph=retain)
                if retain:
                    y.backward()
            except RuntimeError as error:
                errors.append(error)

        twice(False)
        twice(True)
        thread = threading.Thread(target=twice, args=(True,))  # on a GPU, the backward pass runs in such a thread
        thread.start()
        thread.join()
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    assert not errors


@pytest.mark.slow
def test_flex_is_compiled_for_more_shapes_than_torch_allows(monkeypatch):
    """torch's limit is 8 per function, after which flex_attention raises. (Its compiler is replaced by a stub here.)"""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex._compiled.cache_clear()
    try:
        for length in range(128, 139):
            call = AttentionSpec("BNSD", 1, 2, 1, length, length + 3, 16, 40, 0, 0.25, 0.0, None, 16, None, False, ())
            q, k = torch.randn(1, 2, length, 16), torch.randn(1, 1, length + 3, 16)
            blocks = flex._blocks(call, None, q.device)
            out, lse = flex._compiled()(q, k, k, block_mask=blocks, scale=call.scale, enable_gqa=True)
            expected = stand_ins.flex(q, k, k, masks.dense_mask(call, None, q.device), call.scale)
            torch.testing.assert_close((out, lse), expected)
    finally:
        flex._compiled.cache_clear()
        torch._dynamo.reset()


def test_packed_and_dense_agree(simulated):
    """A batch packed into one sequence of tokens attends as the batch does, with windows and GQA."""
    q, k, v = (torch.randn(3, 20, n, 16, dtype=torch.float16) for n in (4, 2, 2))
    cu = torch.arange(0, 61, 20, dtype=torch.int32)
    window = {"pre_tokens": 5, "next_tokens": 0}
    for id in ("cuda/flash", "cuda/unfused"):
        with hal.policy(pin={"flash_attention": id}):
            dense = ops.flash_attention(q, k, v, layout="BSND", **window)
            packed = ops.flash_attention(
                *(x.flatten(0, 1) for x in (q, k, v)), layout="TND", cu_seqlens_q=cu, cu_seqlens_k=cu, **window
            )
        torch.testing.assert_close(packed, dense.flatten(0, 1), rtol=2e-3, atol=2e-3)
