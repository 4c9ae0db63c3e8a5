"""Spans reach those who listen, also those of a block that raises; without a listener nothing is measured."""

import time

import pytest

from hal import spans
from hal.spans import Span, listening, span


def test_a_span_is_delivered_when_it_ends():
    heard: list[Span] = []
    with listening(heard.append), span("phase", "outer", microbatch=3):
        with span("phase", "inner"):
            assert heard == []
        assert [s.name for s in heard] == ["inner"]
    inner, outer = heard
    assert outer.begin <= inner.begin <= inner.end <= outer.end and outer.facts == {"microbatch": 3}
    assert outer.seconds == (outer.end - outer.begin) * 1e-9


def test_a_block_that_raises_has_a_span_too():
    heard: list[Span] = []
    with listening(heard.append), pytest.raises(ValueError), span("phase", "failing"):
        raise ValueError
    assert [s.name for s in heard] == ["failing"] and not spans.listeners


def test_nothing_is_measured_without_a_listener(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", lambda: pytest.fail("measured"))
    with span("phase", "unheard"):
        pass
