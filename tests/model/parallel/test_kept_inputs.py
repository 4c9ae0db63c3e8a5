"""The inputs of recomputed layers are kept on the host, or divided over the ranks that all have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_runs import DROPOUT, GPT2, RECOMPUTE, TP2, on
from torch import Tensor

import hal
from hal import Comm
from hal.comm.threads import run_threads
from hal.model.config.command_line import build
from hal.model.gpt.activation_checkpointing import recompute
from hal.model.parallel.kept_inputs import kept_inputs
from hal.model.parallel.tensor_sharding import Parallel

DIVIDED = {**GPT2, **RECOMPUTE, **TP2, "partition_activations": True}


@pytest.fixture(autouse=True)
def backend() -> None:
    hal.use("cpu_ref")


def kept(options: dict[str, Any], comm: Comm, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Tensor]:
    """(elements that are kept of the input x of a recomputed function, the gradient of x)."""
    monkeypatch.setenv("WORLD_SIZE", str(comm.size))
    contexts, packed = kept_inputs(build(options), Parallel(comm)), []

    def recording_contexts() -> Any:
        hooks: Any = contexts()
        pack = hooks.pack_hook

        def record(x: Tensor) -> Any:
            packed.append(pack(x))
            return packed[-1]

        hooks.pack_hook = record
        return hooks

    x = x.clone().requires_grad_()
    recompute(lambda t: (t * t).sin().sum(), x, kept=recording_contexts).backward()
    assert x.grad is not None
    return sum(of.untyped_storage().nbytes() // of.element_size() for of, *_ in packed), x.grad


@pytest.mark.parametrize("shape, share", [((4, 2, 6), 24), ((3, 1, 5), 15)])
def test_each_rank_keeps_its_share_if_their_number_is_divisible(
    shape: tuple[int, ...], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape)
    for count, grad in run_threads(2, lambda comm: kept(DIVIDED, comm, x, monkeypatch)):
        assert count == share
        assert torch.equal(grad, (x * x).cos() * 2 * x)


def test_without_the_options_autograd_keeps_inputs_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    def hooks(options: dict[str, Any], parallel: Parallel) -> bool:
        return isinstance(kept_inputs(build(options), parallel)(), torch.autograd.graph.saved_tensors_hooks)

    def on_rank(comm: Comm) -> list[bool]:
        usual = {**GPT2, **RECOMPUTE}
        return [
            hooks(usual, Parallel(comm)),
            hooks(DIVIDED, Parallel(comm, sequence=True)),  # the inputs are divided already
            hooks(DIVIDED, Parallel()),
            hooks({**usual, "checkpoint_in_cpu": True}, Parallel()),
        ]

    assert run_threads(2, on_rank) == [[False, False, False, True]] * 2


@pytest.mark.slow
def test_a_run_that_divides_its_inputs_and_keeps_them_on_the_host_has_the_same_bits() -> None:
    base = {**GPT2, **DROPOUT, **TP2, **RECOMPUTE}
    assert on(2, {**base, "partition_activations": True, "checkpoint_in_cpu": True}, 3) == on(2, base, 3)
