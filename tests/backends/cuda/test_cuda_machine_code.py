"""Loops in machine code: the decoder on instructions made here, and the kernels of a training step against budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

import hal
from hal.backends.cuda import compile, machine_code
from hal.backends.cuda.machine_code import BALANCE, STREAMING, Loop, Streaming

FILE_OF = {kernel: path for path in compile.sources() for kernel in compile.exports(path)}


def load(board: int, size: int = 6) -> int:
    return 0x981 | size << 73 | board << 110


def wait(*boards: int) -> int:
    return 0x221 | 7 << 110 | sum(1 << board for board in boards) << 116


def branch(distance: int, architecture: str) -> int:
    """To the instruction at this distance from the next one."""
    if architecture == "sm_80":
        return 0x947 | (distance * 16 & (1 << 50) - 1) << 32
    words = distance * 4 & (1 << 56) - 1
    return 0x947 | (words >> 8) << 34 | (words & 0xFF) << 16


@pytest.mark.parametrize(
    "code, expected",
    [
        ([load(0), load(1), load(0), wait(0), wait(1)], Loop(5, 3, 0, 3)),
        ([load(0), wait(0), load(0), wait(0)], Loop(4, 2, 0, 1)),
        ([load(0), load(1), wait(1), load(2)], Loop(4, 3, 0, 2)),
        ([load(0, size=4), load(1, size=0), load(2)], Loop(3, 1, 2, 1)),
    ],
    ids=["staged", "serial", "partly", "small"],
)
def test_loads_are_in_flight_until_their_scoreboard_is_waited_for(code: list[int], expected: Loop) -> None:
    assert machine_code._loop(code) == expected


@pytest.mark.parametrize("architecture", BALANCE)
def test_loops_are_found_and_outer_ones_are_not(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    inner = [load(0), load(1), wait(0, 1), branch(-4, architecture)]
    outer = [load(0), branch(0, architecture), *inner, wait(), branch(-8, architecture)]
    monkeypatch.setattr(machine_code, "_instructions", lambda cubin, kernel: [wait(), *outer, wait()])
    assert machine_code.loops(b"", "k", architecture) == [Loop(4, 2, 0, 2)]


def test_a_budget_is_the_issue_slots_of_the_time_of_a_copy() -> None:
    """The figures of the reviews of these kernels: 249 instructions for the 32 bytes of an activation on an H200."""
    assert [round(BALANCE["sm_90"].budget * n) for n in (32, 48, 224)] == [249, 373, 1743]


def _compiled(source: Path, architecture: str) -> compile.Compiled:
    try:
        return compile.compiled(source, architecture)
    except hal.BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BALANCE)
@pytest.mark.parametrize("streaming", STREAMING, ids=lambda s: s.kernel)
def test_kernels_of_a_step_are_within_the_issue_budget_of_a_copy(streaming: Streaming, architecture: str) -> None:
    result = _compiled(FILE_OF[streaming.kernel], architecture)
    found = machine_code.cost(streaming, result.cubin, result.names[streaming.kernel], architecture)
    assert found.in_flight >= 4
    if architecture != "sm_100":  # whose memory is faster relative to its issue slots, see docs/cuda-kernels.md
        assert found.instructions < BALANCE[architecture].budget * streaming.bytes


@pytest.mark.slow
def test_a_loop_that_waits_for_each_load_is_found(tmp_path: Path) -> None:
    """The loops that these kernels had."""
    source = tmp_path / "serial.cu"
    source.write_text(
        '#include "common.h"\ntemplate <class T> __global__ void k(const T *x, T *y, i64 n) {\n'
        "    walk<Lanes<T>::count>(0, (int)n, [&](int j, auto w) {\n        float v[decltype(w)::count];\n"
        "        load(x + j, v);\n        store(y + j, v);\n    });\n}\nEXPORT(k<bf16>)\n"
    )
    result = _compiled(source, "sm_90")
    found = machine_code.cost(Streaming("k<bf16>", 32, (1,)), result.cubin, result.names["k<bf16>"], "sm_90")
    assert found.in_flight == 1
    with pytest.raises(hal.HalError, match="no kernel nothing"):
        machine_code.loops(result.cubin, "nothing", "sm_90")
