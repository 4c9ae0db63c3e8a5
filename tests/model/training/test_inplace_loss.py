"""The trainer lets the loss write its gradient over the logits; the results are bit-identical."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from parallel_runs import CP2, DOCUMENTS, GPT2, INTERLEAVED, PP2, SP, TP2, ZBV, trainer
from torch import Tensor

from hal.model.gpt.model import GPT
from hal.model.training.optimizer import local
from hal.testing.processes import run_processes


def _iterations(options: dict[str, Any], allowed: bool) -> tuple[list[Any], int]:
    """(loss and gradient digests of two iterations, number of overwritten logits tensors) on this rank."""
    pairs: list[tuple[Tensor, Tensor]] = []
    original = GPT.loss

    def loss(self: GPT, logits: Tensor, labels: Tensor, *, inplace_backward: bool = False, **rest: Any) -> Tensor:
        pairs.append((logits.detach(), logits.detach().clone()))
        return original(self, logits, labels, inplace_backward=inplace_backward and allowed, **rest)

    GPT.loss = loss  # type: ignore[method-assign]  # this process ends with the test
    run, results = trainer(options), []
    for _ in range(2):
        value = run.forward_backward()
        grads = {n: local(g).contiguous() for n, g in run.optimizer.grads().items()}
        results.append((float(value), {n: hashlib.sha256(g.numpy().tobytes()).hexdigest() for n, g in grads.items()}))
        run.optimizer.step(1e-2, run.optimizer.clip_factor(run.optimizer.grad_norm()))
        run.optimizer.zero_grad()
        run.iteration += 1
    return results, sum(not torch.equal(now, before) for now, before in pairs)


CASES = {
    "tp2-documents": (2, {**TP2, **SP, **DOCUMENTS}),
    "pp2": (2, PP2),
    "pp2-interleaved": (2, INTERLEAVED),
    "pp2-zero-bubble": (2, ZBV),
    "pp2-zero-bubble-untied": (2, {**ZBV, "untie_embeddings_and_output_weights": True}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "cp2-ring": (2, CP2),
    "tp2-pp2-zero-bubble": (4, {**TP2, **ZBV}),
}


SLOW = {"pp2-zero-bubble", "dp2-zero3", "cp2-ring"}


def _cases() -> list[Any]:
    marks = {"tp2-documents": (), **dict.fromkeys(SLOW, pytest.mark.slow)}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.nightly)) for name in CASES]


@pytest.mark.parametrize("name", _cases())
def test_losses_and_gradients_are_bit_equal_when_the_logits_are_written_over(name: str) -> None:
    world, layout = CASES[name]
    options = {**GPT2, "hidden_dropout": 0.1, **layout}
    inplace, apart = (run_processes(world, _iterations, options, allowed) for allowed in (True, False))
    assert [results for results, _ in inplace] == [results for results, _ in apart]
    assert sum(count for _, count in apart) == 0
    assert sum(count for _, count in inplace) > 0, "no logits were written over"
