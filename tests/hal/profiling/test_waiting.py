"""The time that each rank waits for the others, from real communicators and from made-up spans."""

import time

import torch

from hal.comm.threads import run_threads
from hal.profiling.trace import chrome_trace, in_flight, title
from hal.profiling.waiting import clock_offset, collectives, waiting
from hal.spans import Span, listening


def comm(name, part, begin, end, group="dp", size=8):
    facts = {"part": part, "group": group, "ranks": 2, "bytes": size}
    return Span("communication", name, begin, end, 1, facts)


def test_a_rank_waits_until_the_last_one_arrives():
    early = [comm("all_reduce", "blocking", 10, 100), comm("all_gather", "blocking", 200, 230)]
    late = [comm("all_reduce", "blocking", 70, 100), comm("all_gather", "blocking", 190, 230)]
    rows = waiting({0: collectives(early), 1: collectives(late)})
    assert [round(1e9 * s) for _, s in rows[0]] == [60, 0]
    assert [round(1e9 * s) for _, s in rows[1]] == [0, 10]


def test_clocks_are_shifted_before_they_are_compared():
    early, late = [comm("all_reduce", "blocking", 10, 100)], [comm("all_reduce", "blocking", 1070, 1100)]
    rows = waiting({0: collectives(early), 1: collectives(late, offset=-1000)})
    assert round(1e9 * rows[0][0][1]) == 60


def test_an_asynchronous_collective_arrives_at_its_start_and_blocks_while_it_is_waited_for():
    own = [comm("all_reduce", "start", 0, 1), comm("all_reduce", "start", 2, 3)]
    own += [comm("all_reduce", "wait", 50, 60), comm("all_reduce", "wait", 61, 62)]
    other = [comm("all_reduce", "blocking", 55, 60), comm("all_reduce", "blocking", 61, 70)]
    first, second = collectives(own)
    assert (first.number, first.arrived, first.blocked) == (0, 0, (50, 60)) and second.number == 1
    rows = waiting({0: [first, second], 1: collectives(other)})
    assert [round(1e9 * s) for _, s in rows[0]] == [5, 0]
    assert in_flight(own) == [(own[0], own[2]), (own[1], own[3])]


def test_communicators_make_spans_of_every_collective():
    heard = []

    def rank(comm):
        comm.all_reduce(torch.ones(4))
        comm.start("all_gather", torch.ones(2)).wait()
        time.sleep(0.03 * comm.rank)
        comm.barrier()
        return clock_offset(comm)

    with listening(heard.append):
        offsets = run_threads(2, rank)
    threads = {span.thread for span in heard}
    assert len(threads) == 2 and offsets[0] == 0 and abs(offsets[1]) < 50_000_000
    of = {t: [s for s in heard if s.thread == t] for t in threads}
    for spans in of.values():
        parts = [(s.name, s.facts["part"]) for s in spans[:4]]
        expected = [
            ("all_reduce", "blocking"),
            ("all_gather", "start"),
            ("all_gather", "wait"),
            ("barrier", "blocking"),
        ]
        assert parts == expected and spans[0].facts["bytes"] == 16
    rows = waiting({n: collectives(spans[:4]) for n, spans in enumerate(of.values())})
    waits = [sum(s for c, s in row if c.name == "barrier") for row in rows.values()]
    assert max(waits) >= 0.02 and min(waits) < max(waits)


def test_the_trace_has_one_event_per_span_and_one_per_collective_in_flight():
    facts = {"impl": "cpu_ref/c", "direction": "backward"}
    spans = [Span("op", "linear", 5_000, 9_000, 7, facts), comm("all_reduce", "start", 0, 1_000)]
    spans.append(comm("all_reduce", "wait", 2_000, 4_000))
    events = chrome_trace(spans, rank=3, offset=1_000)["traceEvents"]
    (op,) = (e for e in events if e.get("cat") == "op")
    assert (op["name"], op["ts"], op["dur"], op["pid"]) == ("linear (cpu_ref/c), backward", 6.0, 4.0, 3)
    begin, end = (e for e in events if e.get("cat") == "in flight")
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 1.0, "e", 5.0) and begin["id"] == end["id"]
    assert title(spans[1]) == "all_reduce, start"


def test_collectives_are_numbered_in_the_order_in_which_they_began():
    """A span is recorded when it ends: one that another thread starts meanwhile ends first."""
    spans = [
        comm("broadcast", "start", 20, 21),
        comm("all_reduce", "blocking", 10, 90),
        comm("broadcast", "wait", 91, 95),
    ]
    assert [(c.name, c.number) for c in collectives(spans)] == [("all_reduce", 0), ("broadcast", 1)]
