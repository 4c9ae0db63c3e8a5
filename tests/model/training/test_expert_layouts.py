"""Mixtures of experts train on every layout like one process: losses, gradient norms, and tokens per expert."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from parallel_runs import (
    CP2,
    DEEPSEEK,
    DISTRIBUTED_OPTIMIZER,
    DROPOUT,
    EP2,
    ETP1,
    INTERLEAVED,
    LATENT,
    MIXTRAL,
    PP2,
    RECOMPUTE,
    SP,
    TP2,
    ULYSSES,
    ZBV,
    trainer,
)
from torch import Tensor

import hal
from hal import Comm, Work
from hal.model.gpt.moe import MoE
from hal.model.training.expert_load import ExpertReport
from hal.testing import Spy
from hal.testing.processes import run_processes

# Several sequences per micro-batch, and half of the assignments are dropped: the order of the tokens matters.
DROPPING = {**MIXTRAL, "micro_batch_size": 2, "moe_expert_capacity_factor": 0.5}
SHAPES = {
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "latent": LATENT,
    "dropping": DROPPING,
    "dropping-by-position": {**DROPPING, "moe_token_drop_policy": "position"},
    "padded": {**DROPPING, "moe_pad_expert_input_to_capacity": True},
    "sinkhorn": {**MIXTRAL, "moe_router_load_balancing_type": ("sinkhorn",), "moe_aux_loss_coeff": ("0.0",)},
    "geglu": {**MIXTRAL, "swiglu": False, "geglu": True},
}
EP4, ALL_GATHER = {"expert_model_parallel_size": 4}, {"moe_token_dispatcher_type": "allgather"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "ep2": (2, EP2),
    "ep2-allgather": (2, {**EP2, **ALL_GATHER}),
    "ep2-zero1": (2, {**EP2, **DISTRIBUTED_OPTIMIZER}),
    "ep2-full-recomputation": (2, {**EP2, **RECOMPUTE}),
    "ep4": (4, EP4),
    "tp2-sp": (2, {**TP2, **SP}),
    "ep2-tp2": (2, {**TP2, **SP, **EP2, **ETP1}),
    "ep2-etp2": (4, {**TP2, **SP, **EP2}),
    "ep2-etp2-allgather": (4, {**TP2, **SP, **EP2, **ALL_GATHER}),
    "etp2-without-tp": (4, {**EP2, "expert_tensor_parallel_size": 2}),
    "ep2-cp2": (2, {**CP2, **EP2}),
    "ep2-ulysses": (2, {**ULYSSES, **EP2}),
    "ep2-pp2": (4, {**PP2, **EP2}),
    "ep2-interleaved": (4, {**INTERLEAVED, **EP2}),
    "ep2-zero-bubble": (4, {**ZBV, **EP2}),
    "ep2-overlap": (4, {**EP2, "overlap_grad_reduce": True, "ddp_bucket_size": 3000}),
    "ep2-distributed-optimizer": (4, {**EP2, **DISTRIBUTED_OPTIMIZER}),
    "ep2-zero2": (4, {**EP2, "zero_stage": 2}),
    "ep2-zero3": (4, {**EP2, "zero_stage": 3}),
    "ep2-tp2-cp2": (4, {**TP2, **SP, **CP2, **EP2}),
}


def _run(options: dict[str, Any], count: int) -> list[tuple[float, float | None, ExpertReport | None]]:
    run = trainer(options)
    results = [run.step() for _ in range(count)]
    return [(r.loss, r.grad_norm, r.experts) for r in results]


@functools.cache
def _one(options: str, count: int) -> Any:
    return _run(json.loads(options), count)


def _compare(base: dict[str, Any], name: str, count: int = 10, losses: float = 1e-5, norms: float = 1e-4) -> None:
    world, layout = LAYOUTS[name]
    want = _one(json.dumps(base), count)
    for got in run_processes(world, _run, {**base, **layout}, count, timeout=240.0):
        assert [r[0] for r in got] == pytest.approx([r[0] for r in want], rel=losses)
        assert [r[1] for r in got] == pytest.approx([r[1] for r in want], rel=norms)
        for (_, _, mine), (_, _, right) in zip(got, want):
            assert mine is not None and right is not None
            assert mine.load == right.load and mine.dropped == pytest.approx(right.dropped)
            assert mine.losses == pytest.approx(right.losses, rel=1e-4)
            assert mine.entropy == pytest.approx(right.entropy, rel=1e-4)


QUICK = {("deepseek", "ep2")}
SLOW = {("mixtral", "ep2-zero3"), ("mixtral", "ep2-zero-bubble"), ("deepseek", "ep2-tp2-cp2")}
SLOW |= {
    ("deepseek", "ep2-etp2"),
    ("mixtral", "ep2-etp2-allgather"),
    ("dropping", "ep2-cp2"),
    ("mixtral", "ep2-full-recomputation"),
    ("latent", "ep2-zero-bubble"),
}


def _cases() -> list[Any]:
    pairs = [(shape, name) for shape in ("mixtral", "deepseek", "latent") for name in LAYOUTS]
    pairs += [(s, n) for s in ("dropping", "dropping-by-position") for n in ("ep2", "ep2-cp2", "ep2-etp2")]
    pairs += [("padded", n) for n in ("ep2", "ep2-etp2", "ep2-allgather")]
    pairs += [("sinkhorn", n) for n in ("ep2", "ep2-tp2")] + [("geglu", "ep2-etp2")]
    marks = {pair: () if pair in QUICK else pytest.mark.slow if pair in SLOW else pytest.mark.nightly for pair in pairs}
    return [pytest.param(*pair, id="-".join(pair), marks=marks[pair]) for pair in pairs]


@pytest.mark.parametrize("shape, name", _cases())
def test_a_layout_trains_as_one_process(shape: str, name: str) -> None:
    _compare(SHAPES[shape], name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ep2", "ep2-etp2", "ep2-pp2", "ep2-zero3"])
def test_with_dropout(name: str) -> None:
    _compare({**DEEPSEEK, **DROPOUT}, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep2", pytest.param("ep2-zero3", marks=pytest.mark.nightly)])
def test_bfloat16_within_its_own_tolerance(name: str) -> None:
    """Rounding decides between close scores, so a token may have another expert; the losses stay close."""
    world, layout = LAYOUTS[name]
    base = {**MIXTRAL, "bf16": True, "lr": 1e-3, "moe_router_dtype": "fp32"}
    want = _one(json.dumps(base), 5)
    for got in run_processes(world, _run, {**base, **layout}, 5, timeout=240.0):
        assert [r[0] for r in got] == pytest.approx([r[0] for r in want], rel=2**-7)


def test_the_reported_loss_is_that_of_the_model_alone() -> None:
    """Auxiliary losses change gradients but not the loss, as in Megatron."""
    with_losses, without = (
        _one(json.dumps(MIXTRAL), 2),
        _one(json.dumps({**MIXTRAL, "moe_aux_loss_coeff": ("0.0",)}), 2),
    )
    assert with_losses[0][0] == without[0][0] and with_losses[0][1] != without[0][1]


@functools.cache
def _recomputed(how: str | None) -> Any:
    again = {} if how is None else RECOMPUTE if how == "full" else {"recompute_granularity": "selective"}
    return _run({**DEEPSEEK, **DROPOUT, **again}, 3)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputation_counts_every_token_once(how: str) -> None:
    assert _recomputed(how) == _recomputed(None)


def _sums(options: dict[str, Any]) -> dict[str, int]:
    run = trainer(options)
    with hal.activated(Spy(hal.backend())) as spy:
        run.forward_backward()
    return spy.counts()


def test_products_add_to_the_gradients_of_the_microbatches_before() -> None:
    counts = _sums(MIXTRAL)
    assert counts["grouped_linear_wgrad"] == 2 * MIXTRAL["num_layers"] * (MIXTRAL["global_batch_size"] - 1)


def _events(options: dict[str, Any], layer: int) -> list[str]:
    """What one expert layer starts, waits for and computes, in a forward and a backward pass of one microbatch."""
    events: list[str] = []

    class Recorded(Comm):
        def __init__(self, comm: Comm) -> None:
            self.comm, self.name, self.rank, self.size = comm, comm.name, comm.rank, comm.size

        def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
            return self.comm.start(collective, x, op=op, source=source)

        def _exchange_start(self, sends: Any, receives: Any) -> Any:
            events.append("start")
            finish = self.comm.exchange_start(sends, receives)
            return lambda: (events.append("wait"), finish())[1]

    run = trainer(options)
    moe = next(m for m in run.model.modules() if isinstance(m, MoE) and m.layer == layer)
    moe.experts.parallel = replace(moe.experts.parallel, experts=Recorded(moe.experts.parallel.experts))
    assert moe.shared_experts is not None
    moe.shared_experts.register_forward_hook(lambda *_: events.append("shared expert"))
    moe.shared_experts.register_full_backward_hook(lambda *_: events.append("shared expert, backward"))
    moe.experts.linear_fc1.register_forward_hook(lambda *_: events.append("experts"))
    run.forward_backward()
    return events


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_tokens_are_on_their_way_while_the_shared_expert_computes(recompute: bool) -> None:
    options = {**DEEPSEEK, **EP2, "global_batch_size": 2, **(RECOMPUTE if recompute else {})}
    forward = ["start", "start", "shared expert", "wait", "wait", "experts", "start", "wait"]
    backward = ["start", "wait", "start", "start", "shared expert, backward", "wait", "wait"]
    want = [*forward, *(forward if recompute else []), *backward]
    assert run_processes(2, _events, options, 2, timeout=240.0) == [want, want]
