"""Packing of examples into sequences: best fit decreasing, as TRL's default strategy.

The longest examples come first, and each goes into the sequence in which it leaves the least room, which fills
sequences nearly completely if some examples are short. The result depends on the lengths alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy

Sequences = list[list[int]]
"""The numbers of the examples in each sequence."""


def pack(lengths: numpy.ndarray, capacity: int) -> Sequences:
    """Sequences of at most `capacity` tokens in total. lengths: tokens of each example, from 1 to capacity."""
    sequences: Sequences = []
    with_room: dict[int, list[int]] = {}  # tokens that still fit -> sequences
    rooms: list[int] = []  # the keys of with_room, ascending
    for example in numpy.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            sequence, room = len(sequences), capacity
            sequences.append([])
        else:
            room = rooms[at]
            sequence = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        sequences[sequence].append(example)
        room -= length
        if room:
            if room not in with_room:
                with_room[room] = []
                insort(rooms, room)
            with_room[room].append(sequence)
    return sequences
