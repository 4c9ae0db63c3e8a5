"""Recording work with a graph object that has torch's interface (torch.cuda.CUDAGraph, torch.npu.NPUGraph)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hal import Backend


def recorded(
    backend: Backend,
    function: Callable[[], Any],
    graph: Any,
    recording: Callable[[Any], AbstractContextManager[object]],
) -> Callable[[], Any]:
    """`Backend.capture` with a new `graph`, which records inside of the context `recording(graph)`."""
    with backend.stream():  # what the first call allocates and compiles must not be part of the graph
        function()
    with recording(graph):
        result = function()

    def replay() -> Any:
        graph.replay()
        return result

    return replay
