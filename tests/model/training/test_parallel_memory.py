"""Parallelism reduces the memory of each rank. Counted in elements, not read from an allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_runs import GPT2, PP2, RECOMPUTE, SP, TP2, trainer

from hal.model.training.optimizer import local
from hal.testing.processes import run_processes


def _elements(options: dict[str, Any]) -> dict[str, int]:
    """Elements on this rank: weights and optimizer state between steps, activations stored for one backward pass."""
    run = trainer(options)
    saved: dict[int, int] = {}
    weights = {local(p).untyped_storage().data_ptr() for p in run.optimizer.model.values()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if x.is_floating_point() and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes() // x.element_size()
        return x

    stage, c = run.stages[0], run.config
    tokens = torch.zeros(c.micro_batch_size, c.seq_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = stage(tokens, torch.zeros(1, dtype=torch.int64))
    run.step()
    optimizer = run.optimizer
    del out
    return {
        "weights": sum(local(p).numel() for p in optimizer.model.values()),
        "state": sum(t.numel() for moment in (optimizer.exp_avg, optimizer.exp_avg_sq) for t in moment.values()),
        "activations": sum(saved.values()),
    }


def elements(world: int, **options: Any) -> list[dict[str, int]]:
    """The elements on each rank of the first pipeline stage."""
    return run_processes(world, _elements, {**GPT2, "seq_length": 64, **options})


@pytest.mark.slow
def test_zero_divides_the_optimizer_state_by_the_replicas() -> None:
    whole = elements(2)[0]
    for zero in (1, 3):
        shared = elements(2, zero_stage=zero)
        assert sum(r["state"] for r in shared) == whole["state"]
        assert max(r["state"] for r in shared) == pytest.approx(whole["state"] / 2, rel=0.01)
        assert max(r["weights"] for r in shared) == pytest.approx(whole["weights"] / 2, rel=0.01)


@pytest.mark.slow
def test_sequence_parallelism_and_recomputation_shrink_activations() -> None:
    tensor, sequence = elements(2, **TP2)[0]["activations"], elements(2, **TP2, **SP)[0]["activations"]
    again = elements(2, **TP2, **SP, **RECOMPUTE)[0]["activations"]
    # Without sequence parallelism each rank stores the whole inputs and outputs of two norms per layer and of the last
    # one (Korthikanti et al., arXiv 2205.05198, section 4.2.1, without dropout); with it, half of them.
    repeated = (4 * GPT2["num_layers"] + 2) * 64 * GPT2["hidden_size"]
    assert tensor - sequence >= repeated / 2, (tensor, sequence)
    assert again < 0.1 * sequence, (sequence, again)


@pytest.mark.slow
def test_a_pipeline_divides_the_layers() -> None:
    whole, parts = elements(2)[0]["weights"], run_processes(2, _weights, {**GPT2, **PP2})
    table = 128 * 32
    positions = 64 * 32 - 16 * 32
    assert sum(parts) + positions == whole + table, "all weights once, and the last stage's copy of the tied one"


def _weights(options: dict[str, Any]) -> int:
    return sum(p.numel() for p in trainer(options).optimizer.model.values())
