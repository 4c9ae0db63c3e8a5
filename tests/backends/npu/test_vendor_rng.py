"""rng="vendor": dropout by the vendor's generator, whose mask the fused attention draws again in its backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import hal
from hal import Rng, ops
from hal.backends.npu import Npu, simulator, vendor_rng
from hal.model.config.command_line import parse
from hal.model.training import run as command


@pytest.fixture
def vendor(simulated: Npu) -> Iterator[Npu]:
    backend = Npu(simulate=True, rng="vendor")
    backend.build()
    with hal.activated(backend):
        yield backend
    simulator.start(**{**simulator.SETTINGS, "poison": 1})


def kept(shape: tuple[int, ...], p: float, rng: Rng) -> Tensor:
    """The elements that the vendor's generator keeps, bool of `shape`, unpacked bit by bit."""
    count = math.prod(shape)
    packed = vendor_rng.mask(torch.ones(1).npu(), count, p, *vendor_rng.seed_and_offset(rng)).cpu()
    bits = torch.stack([(packed >> i) & 1 for i in range(8)], dim=-1).flatten()
    return bits[:count].bool().view(shape)


def expected(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, p: float, causal: bool) -> Tensor:
    """Attention in float64 with this mask of [b, n, sq, skv]; q, k, v [b, n, s, d]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) * keep / (1.0 - p)) @ v


def test_attention_and_its_gradients_use_one_mask(vendor: Npu) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 13, 16, dtype=torch.float64) for _ in range(4)]
    rng, p = Rng(11).block((2, 6, 13, 13), (0, 3, 0, 0)), 0.3
    keep = kept((2, 3, 13, 13), p, rng)
    assert 0.6 < keep.double().mean() < 0.8
    results = []
    for on_device in (True, False):
        q, k, v, dy = (x.float().npu() if on_device else x for x in given)
        for x in (q, k, v):
            x.requires_grad_()
        if on_device:
            how = {"layout": "BNSD", "next_tokens": 0, "dropout_p": p, "rng": rng}
            assert hal.why(ops.flash_attention, q, k, v, **how).chosen == "npu/fusion_attention_vendor_rng"
            out = ops.flash_attention(q, k, v, **how)
        else:
            out = expected(q, k, v, keep, p, causal=True)
        out.backward(dy)
        results.append([x.detach().cpu().double() for x in (out, q.grad, k.grad, v.grad)])
    for got, right in zip(*results):
        assert torch.allclose(got, right, atol=1e-5)


@pytest.mark.parametrize("k_lengths", [[5, 8], [5, 3]], ids=["one call", "a call per sequence"])
def test_packed_sequences(vendor: Npu, k_lengths: list[int]) -> None:
    """A row without a key (3 keys for 4 causal rows) makes a call per sequence; each has numbers of its own."""
    torch.manual_seed(1)
    q_lengths, p, rng = [5, 4], 0.4, Rng(3)
    q, k = torch.randn(9, 2, 16), torch.randn(sum(k_lengths), 2, 16)
    cu = [torch.tensor([0, n[0], sum(n)], dtype=torch.int32).npu() for n in (q_lengths, k_lengths)]
    how = {"layout": "TND", "next_tokens": 0, "dropout_p": p, "rng": rng}
    out = ops.flash_attention(q.npu(), k.npu(), k.npu(), **how, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1]).cpu()
    counts = [2 * a * b for a, b in zip(q_lengths, k_lengths)]
    together = kept((sum(counts),), p, rng).split(counts)
    for i, (rows, keys) in enumerate(zip(q.split(q_lengths), k.split(k_lengths))):
        shape = (1, 2, len(rows), len(keys))
        keep = together[i].view(shape) if k_lengths[1] > 3 else kept(shape, p, rng.fork("sequence", i))
        q_i, k_i = (x.transpose(0, 1)[None].double() for x in (rows, keys))
        right = expected(q_i, k_i, k_i, keep, p, causal=True)[0].transpose(0, 1).nan_to_num()
        assert torch.allclose(out[sum(q_lengths[:i]) :][: len(rows)].double(), right, atol=1e-5)


def test_every_op_that_drops_uses_it(vendor: Npu) -> None:
    x, rng = torch.randn(7, 33), Rng(4)
    assert hal.why(ops.dropout, x.npu(), 0.2, rng).chosen == "npu/vendor_rng"
    keep = kept((7, 33), 0.2, rng)
    assert torch.allclose(ops.dropout(x.npu(), 0.2, rng).cpu(), x * keep / 0.8)
    got = ops.bias_dropout_add(x.npu(), torch.ones(33).npu(), x.npu(), p=0.2, rng=rng).cpu()
    assert torch.allclose(got, x + (x + 1) * keep / 0.8)
    # Shards draw from streams of their own; the same shard, again, from the same one.
    one, other = (vendor_rng.seed_and_offset(rng.block((7, 66), (0, at))) for at in (0, 33))
    assert one == vendor_rng.seed_and_offset(rng) != other


def test_without_the_option_there_is_none_of_it(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [i.id for op in hal.OPS.values() for i in npu.implementations(op) if i.id.endswith(vendor_rng.SUFFIX)]
    assert hal.why(ops.dropout, torch.ones(3).npu(), 0.5, Rng(1)).chosen == "npu/philox"
    assert not npu.capabilities().attention_dropout
    with pytest.raises(hal.HalError, match="rng='cuda'"):
        Npu(simulate=True, rng="cuda")
    monkeypatch.setenv("HAL_NPU_RNG", "cuda")
    with pytest.raises(hal.HalError, match="HAL_NPU_RNG='cuda'"):
        Npu(simulate=True)
    monkeypatch.setenv("HAL_NPU_RNG", "vendor")  # for programs that HAL starts, such as Megatron's scripts
    assert Npu(simulate=True).rng == "vendor" and Npu(simulate=True, rng="hal").rng == "hal"


def test_recomputation_draws_the_same_numbers(vendor: Npu) -> None:
    shape = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    shape += " --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --mock-data --backend npu --simulate"
    words = [*shape.split(), "--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--rng", "vendor"]
    losses = []
    for recompute in ([], ["--recompute-granularity", "full", "--recompute-method", "uniform"]):
        trainer = command.build(parse([*words, *recompute]))[0]
        losses.append([trainer.step().loss for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_attention_with_dropout_is_few_operations_and_little_memory(vendor: Npu) -> None:
    """Forward and backward: fewer than 20 device operations, and less memory than three times the inputs."""
    machine = simulator.running()
    assert machine is not None and vendor.capabilities().attention_dropout
    q, k, v, dy = (torch.randn(1, 4, 1024, 64, dtype=torch.bfloat16).npu() for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    how = {"layout": "BNSD", "next_tokens": 0, "dropout_p": 0.1, "rng": Rng(1)}
    ops.flash_attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], **how)  # makes the compressed mask, which is kept
    torch.npu.synchronize()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    counted = machine.counters()
    ops.flash_attention(q, k, v, **how).backward(dy)
    torch.npu.synchronize()
    made = {name: n - counted[name] for name, n in machine.counters().items()}
    assert made["operators"] < 20 and made["device_to_host"] == 0, made
    assert torch.npu.max_memory_allocated() - before < 3 * sum(x.numel() * x.element_size() for x in (q, k, v))
