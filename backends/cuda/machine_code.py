"""Loops in the machine code of kernels: how many instructions they have, and how many loads they have in flight.

Instructions of sm_80 to sm_100 take 16 bytes. NVIDIA does not document their encoding; the fields read here were
compared with nvdisasm's output for all three architectures: the opcode in bits 0 to 11, the size of an access in bits
73 to 75, a branch's distance, and in bits 110 to 121 the scoreboards. A load sets one of six scoreboards, and an
instruction that needs its result waits for that scoreboard. So the loads that are issued before such a wait are those
that a thread has in flight.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import hal

BYTES = 16
"""Of an instruction."""

_LOAD, _BRANCHES = 0x981, (0x947, 0x547)
"""Opcodes of LDG, and of BRA with and without a uniform predicate."""
_SIXTEEN_BYTES = 6
"""The size field of an access of 16 bytes."""
_NO_SCOREBOARD = 7


@dataclass(frozen=True)
class Loop:
    """A loop that loads from global memory and contains no other such loop. loads: loads of 16 bytes; in_flight: the
    most of them that are issued before the result of one is waited for; small_loads: loads of fewer bytes."""

    instructions: int
    loads: int
    small_loads: int
    in_flight: int


@dataclass(frozen=True)
class Balance:
    """What decides whether instructions or memory limit a kernel on a GPU. hertz: of a multiprocessor; copy: the bytes
    per second that a copy reads and writes, estimated as 90 % of the memory's bandwidth."""

    name: str
    multiprocessors: int
    hertz: float
    copy: float

    @property
    def budget(self) -> float:
        """The instructions that a thread may issue per byte at the rate of a copy: each of four schedulers of a
        multiprocessor issues one per cycle, for 32 threads."""
        return self.multiprocessors * 4 * 32 * self.hertz / self.copy

    @property
    def in_flight(self) -> float:
        """The bytes that a multiprocessor must have under way at the rate of a copy, with a latency of 700 ns."""
        return self.copy / 2 * 700e-9 / self.multiprocessors


BALANCE = {
    "sm_80": Balance("A100 80 GB", 108, 1.41e9, 1.83e12),
    "sm_90": Balance("H200", 132, 1.98e9, 4.3e12),
    "sm_100": Balance("B200", 148, 1.965e9, 7.2e12),
}


@dataclass(frozen=True)
class Streaming:
    """A kernel that is meant to run at the rate of a copy. bytes: what it reads and writes per 8 elements; loads: for
    each pass over them, its 16-byte loads per 8 elements."""

    kernel: str
    bytes: int
    loads: tuple[int, ...]


STREAMING = (
    Streaming("adamw<bf16, bf16>", 224, (7,)),
    Streaming("sum_squares<bf16>", 16, (1,)),
    Streaming("unscale<bf16>", 32, (1,)),
    Streaming("norm_fwd_held<bf16, bf16, true>", 32, (3,)),
    Streaming("norm_fwd_held<bf16, bf16, false>", 32, (2,)),
    Streaming("norm_bwd_held<bf16, bf16, true, 2>", 48, (2,)),
    Streaming("norm_bwd_held<bf16, bf16, false, 2>", 48, (2,)),
    Streaming("norm_bwd_held<bf16, bf16, true, 4>", 48, (2,)),
    Streaming("norm_fwd<bf16, bf16, true>", 32, (1, 3)),
    Streaming("norm_fwd<bf16, bf16, false>", 32, (1, 2)),
    Streaming("norm_bwd<bf16, bf16, true>", 48, (3, 3)),
    Streaming("norm_bwd<bf16, bf16, false>", 48, (3, 3)),
    Streaming("activation_fwd<bf16, true, SILU>", 48, (2,)),
    Streaming("activation_bwd<bf16, true, SILU>", 80, (3,)),
    Streaming("activation_fwd<bf16, false, GELU_ERF>", 32, (1,)),
    Streaming("activation_bwd<bf16, false, GELU_ERF>", 48, (2,)),
    Streaming("activation_fwd<bf16, false, GELU_TANH>", 32, (1,)),
    Streaming("activation_bwd<bf16, false, GELU_TANH>", 48, (2,)),
    Streaming("dropout<bf16, bf16, false>", 32, (1,)),
    Streaming("dropout<bf16, bf16, true>", 48, (2,)),
    Streaming("dropout_bwd<bf16, bf16>", 32, (1,)),
    Streaming("softmax_fwd<bf16>", 32, (1, 1)),
    Streaming("softmax_bwd<bf16>", 48, (2, 2)),
    Streaming("cross_entropy_stats<bf16>", 16, (1,)),
    Streaming("cross_entropy_bwd<bf16>", 32, (1,)),
    Streaming("rotary<bf16, 8, false>", 32, (3,)),
)
"""The kernels of a training step in bfloat16, apart from attention and experts."""


@dataclass(frozen=True)
class Cost:
    """instructions: per 8 elements and thread, of all passes; in_flight: 16-byte loads per thread, of the pass with the
    fewest."""

    instructions: float
    in_flight: int


def cost(streaming: Streaming, cubin: bytes, name: str, architecture: str) -> Cost:
    """What the loops of a kernel cost (its name in the cubin). Branches in a loop count as if all were taken.

    Raises HalError if the code does not have a loop for each pass.
    """
    # The loops over single elements and over masked scores have at least as many small loads (a loop over rows has few,
    # of statistics), and remainders have fewer loads.
    main = [loop for loop in loops(cubin, name, architecture) if loop.small_loads < loop.loads]
    main = sorted(main, key=lambda loop: -loop.loads)[: len(streaming.loads)]
    if len(main) < len(streaming.loads):
        raise hal.HalError(f"{streaming.kernel} for {architecture} has {len(main)} loops of vectors")
    passes = zip(main, sorted(streaming.loads, reverse=True))
    return Cost(
        sum(loop.instructions * loads / loop.loads for loop, loads in passes), min(loop.in_flight for loop in main)
    )


def loops(cubin: bytes, kernel: str, architecture: str) -> list[Loop]:
    """The loops of a kernel (its name in the cubin) that load 16 bytes at a time and contain no other loop with loads,
    in the order of the code.

    Raises HalError if the cubin has no such kernel.
    """
    code = _instructions(cubin, kernel)
    # A loop is what lies between a branch and its target before it; several branches may go back to one target.
    ends: dict[int, int] = {}
    for i, word in enumerate(code):
        if word & 0xFFF in _BRANCHES:
            target = i + 1 + _distance(word, architecture)
            if target <= i:
                ends[target] = i
    loading = {a: b for a, b in sorted(ends.items()) if any(word & 0xFFF == _LOAD for word in code[a : b + 1])}
    innermost = [(a, b) for a, b in loading.items() if not any(a < other <= b for other in loading)]
    found = [_loop(code[a : b + 1]) for a, b in innermost]
    return [loop for loop in found if loop.loads]


def _loop(code: list[int]) -> Loop:
    loads, small, most = 0, 0, 0
    outstanding: list[int] = []
    for word in code:
        waits = _bits(word, 116, 6)
        outstanding = [board for board in outstanding if not waits >> board & 1]
        if word & 0xFFF != _LOAD:
            continue
        if _bits(word, 73, 3) != _SIXTEEN_BYTES:
            small += 1
            continue
        loads += 1
        board = _bits(word, 110, 3)
        if board != _NO_SCOREBOARD:
            outstanding.append(board)
        most = max(most, len(outstanding))
    return Loop(len(code), loads, small, most)


def _bits(word: int, first: int, count: int) -> int:
    return word >> first & ((1 << count) - 1)


def _distance(word: int, architecture: str) -> int:
    """The distance of a branch from the next instruction, in instructions."""
    if architecture == "sm_80":
        return _signed(_bits(word, 32, 50), 50) // BYTES
    return _signed(_bits(word, 34, 48) << 8 | _bits(word, 16, 8), 56) * 4 // BYTES


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def _instructions(cubin: bytes, kernel: str) -> list[int]:
    """The code of a kernel, one number per instruction."""
    for name, data in _sections(cubin):
        if name == f".text.{kernel}":
            return [int.from_bytes(data[i : i + BYTES], "little") for i in range(0, len(data), BYTES)]
    raise hal.HalError(f"this cubin has no kernel {kernel}")


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    texts = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = texts + name
        yield cubin[start : cubin.index(b"\0", start)].decode(), cubin[offset : offset + length]
