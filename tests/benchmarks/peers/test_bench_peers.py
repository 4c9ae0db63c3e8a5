"""Peers do the same work as HAL: on small inputs each gives the reference's values, and FLOP counts are correct."""

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal import ops
from hal.bench.harness import goals, machine, target
from hal.bench.peers import hal_gpt, megatron_gpt, plain_gpt
from hal.bench.suites import attention, linear, train
from hal.bench.suites import ops as fused
from hal.bench.suites.attention import AttentionShape
from hal.model.gpt.model import GPT
from hal.testing.reference import Reference


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    backend = Reference()
    monkeypatch.setattr(target, "_backend", backend)
    with hal.activated(backend):
        yield


@given(st.integers(1, 40), st.none() | st.integers(0, 50), st.integers(0, 50), st.booleans())
def test_flop_count_pairs_in_the_band(s, pre, next, backward):
    shape = AttentionShape(b=2, h=3, s=s, d=4, pre=pre, next=next)
    i, j = torch.arange(s)[:, None], torch.arange(s)
    inside = (j <= i + next) if pre is None else (j <= i + next) & (j >= i - pre)
    assert shape.flop(backward) == 2 * 3 * 4 * int(inside.sum()) * (14 if backward else 4)


def test_flop_of_packed_sequences_are_those_of_each():
    packed = AttentionShape(layout="TND", h=3, d=4, lengths=(5, 1, 9))
    assert packed.flop(True) == sum(AttentionShape(h=3, d=4, s=s).flop(True) for s in packed.lengths)


@pytest.mark.parametrize(("peer", "layout"), [("sdpa", "BNSD"), ("sdpa", "SBH"), ("sdpa", "BSH"), ("naive", "BNSD")])
def test_causal_peers_agree(peer, layout):
    shape = AttentionShape(layout=layout, b=2, h=3, s=33, d=8)
    q, k, v = shape.inputs()
    ours = shape.bnsd(attention._hal(shape)(q, k, v))
    torch.testing.assert_close(attention._PEERS[peer][0](shape)(q, k, v), ours, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("peer", ["sdpa-mask", "sdpa-chunked"])
def test_window_peers_agree(peer):
    shape = AttentionShape(b=2, h=3, s=64, d=8, pre=16)
    q, k, v = shape.inputs()
    ours = attention._hal(shape)(q, k, v)
    torch.testing.assert_close(attention._PEERS[peer][0](shape)(q, k, v), ours, atol=2e-5, rtol=1e-5)


SMALL = {"s": 37, "h": 4}
ODD = [(replace(shape, **SMALL, d=shape.d // 8), peer) for shape, _, peers in attention.ODD for peer in peers]


@pytest.mark.parametrize(("shape", "peer"), ODD, ids=lambda x: str(x).replace(" ", "-"))
def test_peers_of_odd_shapes_agree(shape, peer):
    shape = replace(shape, lengths=tuple(n // 100 for n in shape.lengths), pre=shape.pre and 8, next=shape.next // 16)
    results = []
    for attend in (attention._hal, attention._PEERS[peer][0]):
        inputs = [x.requires_grad_() for x in shape.inputs()]
        out = attend(shape)(*inputs)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    torch.testing.assert_close(*results, atol=5e-5, rtol=1e-4)


def test_the_peer_of_one_query_agrees():
    shape = AttentionShape(h=4, kv=2, s=33, d=16, last=True)
    q, k, v = shape.inputs()
    assert q.shape == (1, 4, 1, 16) and k.shape == (1, 2, 33, 16)
    torch.testing.assert_close(attention._sdpa(shape)(q, k, v), attention._hal(shape)(q, k, v), atol=2e-5, rtol=1e-5)


def test_every_odd_shape_has_a_goal_of_four_fifths(monkeypatch):
    monkeypatch.setattr(machine, "features", lambda: frozenset({"avx512f"}))
    for case in (c for c in attention.cases() if c.name.startswith("attention odd shapes")):
        for peer in case.candidates.keys() - {"ours"}:
            expected = 0.8 * (25.0 if peer == "sdpa-mask" else 3.3 if "S777 " in case.shape else 2.5)
            assert goals.ratio(case.name, case.shape, peer, "default") == expected, (case.shape, peer)


def test_every_odd_case_has_a_goal_and_a_ratio_is_four_fifths(monkeypatch):
    monkeypatch.setattr(machine, "vendor", lambda: "AuthenticAMD")
    odd = [c for module in (linear, fused) for c in module.cases() if c.name.startswith("odd ")]
    assert len(odd) == 13
    for case in odd:
        even, count = case.name.removeprefix("odd "), 0
        for peer in case.candidates:
            for allocator in case.allocators:
                goal = goals.ratio(case.name, case.shape, peer, allocator)
                even_goal = goals.ratio(even, case.shape, peer, allocator)
                assert goal == (None if even_goal is None else 0.8 * even_goal)
                count += goal is not None
        for allocator in case.allocators:
            share = goals.share(case.name, case.shape, case.ceiling, allocator)
            # Products have a share goal only at their even sizes, because the ceiling is measured there.
            product = case.ceiling.startswith("GEMM")
            assert share == (None if product else goals.share(even, case.shape, case.ceiling, allocator))
            count += share is not None
        assert count, case.name


@pytest.mark.parametrize("name", sorted({op.name for op in fused._fused()}))
def test_eager_peers_agree(name, monkeypatch):
    torch.manual_seed(0)
    op = next(op for op in fused._fused() if op.name == name)
    monkeypatch.setattr(fused, "_randn", lambda *shape: torch.randn([min(n, 96) for n in shape]))
    inputs = list(op.inputs())
    if name == "scale_mask_softmax":
        inputs[1] = inputs[1][:96, :96]
    if name == "cross_entropy":
        inputs[1] = inputs[1][:96] % 96
    if name == "rotary":
        inputs[1:] = [t[:96] for t in inputs[1:]]
    leaves = [t.requires_grad_() for t in inputs[: op.grads]]
    theirs, ours = op.eager(*inputs), op.ours()(*inputs)
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-5)
    dy = torch.randn_like(ours)
    gradients = (torch.autograd.grad(y, leaves, dy) for y in (theirs, ours))
    torch.testing.assert_close(*gradients, atol=2e-4, rtol=1e-4)


def test_optimizer_peers_agree():
    torch.manual_seed(0)
    ours = fused._parameters([5, 700, 33])
    theirs = [torch.nn.Parameter(p.clone()) for p in ours]
    grads, m, v = [p.grad for p in ours], *([torch.zeros_like(p) for p in ours] for _ in range(2))
    for p, g in zip(theirs, grads):
        p.grad = g.clone()
    ops.adamw(ours, grads, m, v, step=1, lr=1e-4, weight_decay=0.01)
    torch.optim.AdamW(theirs, lr=1e-4, weight_decay=0.01, fused=True).step()
    torch.testing.assert_close(ours, [p.detach() for p in theirs])


SIZES = 2, 32, 4, 16, 128
"""Layers, hidden size, heads, length and vocabulary of the compared models."""


def _gpt() -> GPT:
    """HAL's model with random biases and norms, so that none of them can be left out unnoticed."""
    torch.manual_seed(0)
    model = GPT(hal_gpt.config_of(*SIZES), torch.device("cpu"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def test_the_plain_gpt_is_the_same_function():
    """HAL's weights in the plain model give HAL's loss."""
    ours, (*_, length, vocabulary) = _gpt(), SIZES
    plain = plain_gpt.with_weights_of(ours)
    ids = torch.randint(vocabulary, (3, length + 1))
    tokens, labels = ids[:, :-1], ids[:, 1:]
    torch.testing.assert_close(plain(tokens, labels), ours.loss(ours(tokens), labels), atol=1e-5, rtol=1e-5)


@pytest.fixture
def megatron_world(recwarn):
    """Calls `megatron_gpt.enter`, which prepares a worker process permanently, and undoes it after the test.

    recwarn: megatron-core warns about its own deprecations.
    """
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
    pytest.importorskip("psutil", reason="psutil is not installed (extra: megatron)")
    from megatron.core import parallel_state

    megatron_gpt.enter()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    assert megatron_gpt._redirected is not None
    megatron_gpt._redirected.close()
    megatron_gpt._redirected = None


def test_without_megatron_core_its_candidates_raise_and_have_no_goals(monkeypatch):
    """A candidate whose `make` raises becomes an absent comparison; see test_bench_workers."""
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.setattr(Reference, "memory_stats", lambda self: {"allocated": 0, "peak": 0})
    cases = [c for c in train.cases() if "megatron-core" in c.candidates]
    assert {c.name for c in cases} == {"training step", "training memory"} and len(cases) == 4
    for case in cases:
        with pytest.raises(ImportError, match="megatron"):
            case.candidates["megatron-core"].make()
        assert not any(goals.ratio(case.name, case.shape, "megatron-core", a) for a in case.allocators)


@pytest.mark.parametrize("bf16", [False, True])
def test_megatron_core_is_the_same_function_and_learns(megatron_world, bf16):
    """HAL's weights in megatron-core's model give HAL's loss, and megatron-core's training steps reduce it."""
    from hal.model.apps.convert.megatron_core import to_megatron_core

    layers, hidden, heads, length, vocabulary = SIZES
    ours = _gpt()
    core = megatron_gpt.gpt(layers, hidden, heads, length, vocabulary, bf16=bf16)
    state = {n: p.detach() for n, p in to_megatron_core(dict(ours.named_parameters())).items()}
    missing, unexpected = core.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing)
    ids = torch.randint(vocabulary, (3, length + 1))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loss = ours.loss(ours(tokens), labels)
    if not bf16:
        torch.testing.assert_close(megatron_gpt.losses(core, tokens, labels).mean(), loss, atol=1e-5, rtol=1e-5)
    step = megatron_gpt.step_of(core, tokens, labels, bf16=bf16)
    for _ in range(20):
        step()
    after = megatron_gpt.losses(core, tokens, labels).float().mean()
    assert after < loss - 0.01, (after, loss)
    assert {p.dtype for p in core.parameters()} == {torch.bfloat16 if bf16 else torch.float32}
