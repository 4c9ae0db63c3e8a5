"""The table of ops: sums, and the share of the roofline."""

import pytest

from hal.profiling.ceilings import Ceilings
from hal.profiling.summary import blocked_seconds, rows
from hal.spans import Span


def op(name, seconds, flops, size, dtype="float32", impl="x/a", direction="forward"):
    facts = {"impl": impl, "direction": direction, "dtype": dtype, "flops": flops, "bytes": size}
    return Span("op", name, 0, int(seconds * 1e9), 1, facts)


CEILINGS = Ceilings(copy=100.0, products={"float32": 1000.0})


def test_a_call_is_bound_by_the_longer_of_its_two_times():
    spans = [op("linear", 4.0, 2000.0, 50), op("linear", 4.0, 2000.0, 50), op("norm", 1.0, 0.0, 25)]
    product, norm = rows(spans, {("norm", "x/a"): {"x/b": "no"}}, CEILINGS)
    assert (product["op"], product["calls"], product["seconds"], product["bound"]) == ("linear", 2, 8.0, "products")
    assert product["roofline"] == pytest.approx(0.5)  # 2 s of products in 4 s
    assert (norm["bound"], norm["roofline"], norm["refused"]) == ("memory", pytest.approx(0.25), {"x/b": "no"})


def test_a_dtype_without_a_measured_rate_has_no_share():
    (row,) = rows([op("linear", 1.0, 5.0, 1, dtype="float64")], {}, CEILINGS)
    assert row["roofline"] is None


def test_the_start_of_a_collective_does_not_block():
    parts = [("start", 1.0), ("wait", 2.0), ("blocking", 4.0)]
    spans = [Span("communication", "all_reduce", 0, int(s * 1e9), 1, {"part": part}) for part, s in parts]
    assert blocked_seconds(spans) == 6.0
