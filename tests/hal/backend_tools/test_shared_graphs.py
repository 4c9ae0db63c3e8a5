"""What `recorded` does with a graph object, in order."""

from __future__ import annotations

import contextlib

from host_backend import HostBackend

from hal.backend_tools import recorded


def test_a_call_on_a_side_stream_comes_before_the_recording_and_is_not_part_of_it():
    done = []

    @contextlib.contextmanager
    def noted(what):
        done.append(f"{what} begins")
        yield
        done.append(f"{what} ends")

    class Streams(HostBackend):
        name = "streams"

        def stream(self):
            return noted("stream")

    class Graph:
        def replay(self):
            done.append("replay")

    def function():
        done.append("function")
        return len(done)

    replay = recorded(Streams(), function, Graph(), lambda graph: noted(type(graph).__name__))
    assert done == ["stream begins", "function", "stream ends", "Graph begins", "function", "Graph ends"]
    assert replay() == replay() == 5, "the result of the recorded call"
    assert done[6:] == ["replay"] * 2
