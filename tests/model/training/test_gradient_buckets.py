"""Buckets of gradients are sent while earlier layers still compute theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hal import Comm
from hal.comm.threads import run_threads
from hal.model.training.gradient_buckets import GradientReducer


def _events(comm: Comm, overlap: bool) -> tuple[list[str], list[torch.Tensor]]:
    """(the order of sends and layers' backward passes before the last microbatch ends, the reduced gradients)."""
    events: list[str] = []
    start = comm.start
    comm.start = lambda *args, **more: events.append("send") or start(*args, **more)  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for number, layer in enumerate(model):
        nn.init.eye_(layer.weight)
        layer.register_full_backward_hook(lambda *_, number=number: events.append(f"layer {number}"))
    parameters = dict(model.named_parameters())
    reducer = GradientReducer(
        comm,
        parameters,
        lambda: {name: p.grad for name, p in parameters.items()},
        bucket_size=16,
        overlap=overlap,
        count=2,
    )
    for _ in range(2):
        model(torch.randn(3, 4, generator=generator, requires_grad=True)).sum().backward()
    before = list(events)
    reducer.finish()
    return before, [p.grad for p in parameters.values()]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bucket_is_on_its_way_while_the_layers_before_it_compute(overlap: bool) -> None:
    (events, first), (_, second) = run_threads(2, lambda comm: _events(comm, overlap))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    computed = [event for event in events if event != "send"]
    assert computed == ["layer 1", "layer 0"] * 2
    if not overlap:
        assert "send" not in events
        return
    last = len(events) - 1 - events[::-1].index("layer 0")
    sends = [i for i, event in enumerate(events) if event == "send"]
    assert len(sends) == 2 and events.index("layer 0") < sends[0] < last, events
