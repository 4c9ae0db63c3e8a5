"""Parts of a call for which the reference can be evaluated alone, because it would take too long for the whole call.

Each function of this module returns a function from a call's arguments to its `Block`s. Rows and columns are drawn at
random; the first and the last ones, and those at which 32-bit offsets or CUDA's grid limit of 65,535 would wrap, are
always among them.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.ops import alibi_bias
from hal.ops.layouts import sizes, to_bnsd
from hal.rng import Rng

RUN = 8
"""Adjacent rows or columns of one block."""

CHUNK = 1 << 24
"""Elements per tensor that the reference reads at a time when it sums over all rows."""

_OFFSET_LIMITS = (1 << 31, 1 << 32)
"""Where offsets of 32 bits wrap, signed and unsigned; counted in elements or in bytes."""

_GRID_LIMIT = 65_535

Pick = Callable[[Tensor], Tensor]
"""Selects the part of a tensor of the whole call that belongs to a block."""

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A call of the reference. upstream: selects its upstream gradient from that of the whole call."""

    arguments: Arguments
    upstream: Pick


@dataclass(frozen=True)
class Block:
    """What is compared of one part of a call. name: the part, for messages.

    Rows 8 to 15 of y = rms_norm(x, weight) and of dx are one block: a single part with x[8:16], whose upstream gradient
    is dy[8:16]; outputs {"the output": ("the output", rows 8 to 15)}, gradients {"x": rows 8 to 15}. The gradient of
    the weight is another: a part per chunk of rows, no outputs, gradients {"weight": all of it}.

    parts: the reference's calls, made one at a time because each may need much memory. outputs: label of an output of
    the part -> (label of the whole call's output, the part of it that must equal the reference's output); only for a
    block of one part. gradients: parameter -> the part of its gradient that must equal the sum of the gradients of all
    parts. summands: parameter -> the number of rows of which its gradient is the sum, if it is one. last_rows: parts
    that hold all of the last RUN rows (dimension 0 of every output), for upstream gradients that are 0 elsewhere.
    """

    name: str
    parts: Callable[[], Iterator[Part]]
    outputs: Mapping[str, tuple[str, Pick]]
    gradients: Mapping[str, Pick]
    summands: Mapping[str, int] = field(default_factory=dict)
    last_rows: Callable[[], Iterator[Part]] | None = None

    def of_last_rows(self) -> Block | None:
        """The same sums for upstream gradients that are 0 except in the last RUN rows; None without such parts.

        In a sum over 100,000 rows, the last ones disappear in the tolerance of a 16-bit dtype.
        """
        if self.last_rows is None:
            return None
        gradients = {name: pick for name, pick in self.gradients.items() if name in self.summands}
        name = f"{self.name}, of upstream gradients in the last {RUN} rows only"
        return Block(name, self.last_rows, {}, gradients)


Blocks = Callable[[Arguments, random.Random], Iterator[Block]]


def _one(make: Callable[..., Part], *arguments: Any) -> Callable[[], Iterator[Part]]:
    """The parts of a block that is one part, which `make` makes when it is asked for."""

    def parts() -> Iterator[Part]:
        yield make(*arguments)

    return parts


def _same(x: Tensor) -> Tensor:
    return x


def _rows_of(table: Tensor, x: Tensor) -> Tensor:
    """x[table], on x's device."""
    return x[table.to(x.device)]


def _narrow(dim: int, start: int, length: int) -> Pick:
    return lambda x: x.narrow(dim, start, length)


def cut_out(
    arguments: Arguments, picks: Mapping[str, Pick], drawn: tuple[str, int, int] | None = None
) -> dict[str, Any]:
    """The arguments on the CPU, those in `picks` replaced by copies of their parts.

    drawn: (parameter whose shape the op draws, dimension, start) if the block begins at `start` of that dimension.
    """
    parts = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            part = value.detach()
            # A part is cloned because in-place ops write to their arguments before the block is compared.
            parts[name] = picks[name](part).cpu().clone() if name in picks else part.cpu()
    if drawn is not None and arguments.get("rng") is not None:
        name, dim, start = drawn
        shape = arguments[name].shape
        first = [0] * len(shape)
        first[dim] = start
        parts["rng"] = _block_of_draw(arguments["rng"], shape, first)
    return parts


def _block_of_draw(rng: Rng, shape: Sequence[int], start: Sequence[int]) -> Rng:
    """The block that begins at `start` of a draw of `shape` from `rng`, which may itself be a block of a larger one."""
    if rng.full_shape is None or rng.start is None:
        return rng.block(shape, start)
    return rng.block(rng.full_shape, [a + b for a, b in zip(rng.start, start)])


def _starts(x: Tensor, dim: int, draw: random.Random, *, run: int = RUN, drawn: int = 4) -> list[int]:
    """Where blocks of `run` rows begin among the rows of x, which is contiguous, in dimension `dim`."""
    count, width = x.shape[dim], max(1, math.prod(x.shape[dim + 1 :]))
    last = max(0, count - run)
    limits = {limit // width for limit in _OFFSET_LIMITS}
    limits |= {limit // (width * x.element_size()) for limit in _OFFSET_LIMITS} | {_GRID_LIMIT}
    # A block that straddles a limit has rows on both sides of it.
    at_limits = {limit - run // 2 for limit in limits}
    return sorted({0, last} | {at for at in at_limits if 0 < at < last} | {draw.randint(0, last) for _ in range(drawn)})


def _labels(outputs: int) -> list[str]:
    return ["the output"] if outputs == 1 else [f"output {i}" for i in range(outputs)]


def along(*names: str, dim: int = 0, run: int = RUN, drawn: int = 4, outputs: int = 1) -> Blocks:
    """Blocks of `run` adjacent rows, for an op whose rows do not depend on each other.

    names: the parameters that have the rows in dimension `dim`, as the outputs have; the op draws the first one's
    shape. outputs: their number; the op returns a tuple of them if there are several.
    """

    def blocks(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
        count = arguments[names[0]].shape[dim]
        for start in _starts(arguments[names[0]], dim, draw, run=run, drawn=drawn):
            pick = _narrow(dim, start, min(run, count - start))
            present = {name: pick for name in names if arguments[name] is not None}

            # Defaults bind the loop's variables now; the part is made later, when the loop has moved on.
            def part(pick: Pick = pick, picks: Mapping[str, Pick] = present, start: int = start) -> Part:
                return Part(cut_out(arguments, picks, (names[0], dim, start)), pick)

            yield Block(
                f"rows {start} to {start + min(run, count - start) - 1} of {count}",
                _one(part),
                {label: (label, pick) for label in _labels(outputs)},
                present,
            )

    return blocks


def queries(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """merge_attention: adjacent queries, dimension 0 of the results and dimension 2 of the log-sum-exps."""
    count = arguments["out"].shape[0]
    for start in _starts(arguments["out"], 0, draw, run=RUN, drawn=4):
        length = min(RUN, count - start)
        rows, statistics = _narrow(0, start, length), _narrow(2, start, length)
        picks = {"out": rows, "part": rows, "lse": statistics, "part_lse": statistics}

        def part(rows: Pick = rows, picks: Mapping[str, Pick] = picks) -> Part:
            return Part(cut_out(arguments, picks), rows)

        compared = {label: (label, pick) for label, pick in zip(_labels(2), (rows, statistics))}
        yield Block(f"queries {start} to {start + length - 1} of {count}", _one(part), compared, picks)


def columns(*, gated: bool = False, **dims: int) -> Blocks:
    """Blocks of adjacent columns, for an op whose columns do not depend on each other.

    dims: parameter -> its dimension of columns; the output has them last, and the op draws the first one's shape
    [rows, columns]. gated: column c of the output depends on columns c and c + h of the parameters, which have 2 h.
    """

    def blocks(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
        present = {name: dim for name, dim in dims.items() if arguments[name] is not None}
        first, dim = next(iter(present.items()))
        count = arguments[first].shape[dim] // (2 if gated else 1)
        rows = math.prod(arguments["x"].shape[:-1])
        for start in sorted({0, max(0, count - RUN), draw.randint(0, max(0, count - RUN))}):
            length = min(RUN, count - start)

            def both(x: Tensor, dim: int, start: int = start, length: int = length) -> Tensor:
                halves = (start, start + count) if gated else (start,)
                return torch.cat([x.narrow(dim, at, length) for at in halves], dim)

            picks: dict[str, Pick] = {name: functools.partial(both, dim=dim) for name, dim in present.items()}
            pick = _narrow(-1, start, length)
            summed = [name for name in ("weight", "bias") if name in present]

            def part(pick: Pick = pick, picks: Mapping[str, Pick] = picks, start: int = start) -> Part:
                return Part(cut_out(arguments, picks, (first, arguments[first].ndim - 1, start)), pick)

            yield Block(
                f"columns {start} to {start + length - 1} of {count}",
                _one(part),
                {"the output": ("the output", pick)},
                picks,
                dict.fromkeys(summed, rows),
                _one(part) if summed else None,
            )

    return blocks


def sums(*names: str, over: Sequence[str]) -> Blocks:
    """The gradients of the parameters `names`, which are sums over the rows (dimension 0) of the parameters `over`."""

    def blocks(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
        x = arguments[over[0]]
        step = max(1, CHUNK // max(1, x[0].numel()))

        def parts(first: int = 0) -> Iterator[Part]:
            for start in range(first, x.shape[0], step):
                pick = _narrow(0, start, min(step, x.shape[0] - start))
                yield Part(cut_out(arguments, dict.fromkeys(over, pick), (over[0], 0, start)), pick)

        last_rows = functools.partial(parts, max(0, x.shape[0] - RUN))
        summands = dict.fromkeys(names, x.shape[0])
        yield Block("all rows", parts, {}, dict.fromkeys(names, _same), summands, last_rows)

    return blocks


def every(*functions: Blocks) -> Blocks:
    """The blocks of each of the functions."""
    return lambda arguments, draw: (block for blocks in functions for block in blocks(arguments, draw))


def in_place(*writes: str, reads: Sequence[str] = (), by_column: Sequence[str] = ()) -> Blocks:
    """Rows (dimension 0) of parameters that the op writes.

    The parameters `reads` have the same rows, those in `by_column` have them as columns. Of lists of tensors, the last
    tensor is compared. The parts are copied before the call.
    """

    def blocks(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
        writes_present = [name for name in writes if arguments[name] is not None]
        last = {n: arguments[n][-1] for n in (*writes, *reads) if isinstance(arguments[n], list)}
        plain = {**arguments, **last}
        count = plain[writes[0]].shape[0]
        for start in _starts(plain[writes[0]], 0, draw):
            length = min(RUN, count - start)
            pick = _narrow(0, start, length)
            picks = dict.fromkeys((*writes_present, *reads), pick)
            picks |= {name: _narrow(-1, start, length) for name in by_column}
            cut = cut_out(plain, picks)
            outputs = {}
            for name in writes_present:
                here, there = (f"{name}[0]", f"{name}[{len(arguments[name]) - 1}]") if name in last else (name, name)
                outputs[f"{here}, written in place"] = (f"{there}, written in place", pick)
            cut |= {name: [cut[name]] for name in last if cut[name] is not None}
            yield Block(
                f"rows {start} to {start + length - 1} of {count}",
                _one(Part, cut, _same),
                outputs,
                {},
            )

    return blocks


def overflow(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """unscale_and_check: the flag, which the last elements decide."""
    tensor = arguments["grads"][-1]
    part = Part({**arguments, "grads": [tensor[-RUN:].cpu().clone()]}, _same)
    yield Block("the flag", _one(lambda: part), {"the output": ("the output", _same)}, {})


def table_rows(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """embedding: some ids with the rows of the table that they name, and for some rows all ids that name them."""
    weight, ids = arguments["weight"], arguments["ids"].cpu().flatten()
    count = len(ids)

    def flat(y: Tensor) -> Tensor:
        """[ids..., h] as [number of ids, h]."""
        return y.reshape(-1, y.shape[-1])

    def part(positions: Tensor, table: Tensor) -> Part:
        """positions [n]: of ids; table [t], ascending: numbers of rows of the weight, all that the ids name."""
        cut = {**arguments, "weight": weight.detach()[table.to(weight.device)].cpu()}
        cut["ids"] = torch.searchsorted(table, ids[positions])
        return Part(cut, lambda dy: _rows_of(positions, flat(dy)))

    for start in _starts(ids, 0, draw):
        positions = torch.arange(start, min(start + RUN, count))

        def pick(y: Tensor, positions: Tensor = positions) -> Tensor:
            return _rows_of(positions, flat(y))

        yield Block(
            f"ids {start} to {start + len(positions) - 1} of {count}",
            _one(part, positions, ids[positions].unique()),
            {"the output": ("the output", pick)},
            {},
        )
    tables = {
        "the last rows that ids name": ids.unique()[-RUN:],
        "the last rows of the table": torch.arange(max(0, weight.shape[0] - RUN), weight.shape[0]),
    }
    for name, table in tables.items():
        # A row's gradient is the sum over all ids that name it, so the part needs every one of them.
        positions = torch.isin(ids, table).nonzero().flatten()
        yield Block(
            name,
            _one(part, positions, table),
            {},
            {"weight": functools.partial(_rows_of, table)},
        )


def attention(arguments: Arguments, draw: random.Random, lse: bool = False) -> Iterator[Block]:
    """flash_attention of a dense layout: some queries of a key/value head's group, and that head's keys and values.

    The blocks are calls of layout BNSD. A window is aligned with the last query, so it is shifted for earlier ones.
    ALiBi becomes a bias, which has no alignment. The gradients of bias and sinks, sums over the whole call, are not
    compared. lse: whether the call also returns the log-sum-exp [b, n, sq].
    """
    layout = arguments["layout"]
    batch, n, sq, _ = sizes(arguments["q"], layout, arguments["num_heads"])
    kv_heads = arguments["num_kv_heads"] or (n if layout in ("SBH", "BSH") else arguments["k"].shape[layout.index("N")])
    skv, group = arguments["k"].shape[layout.index("S")], n // kv_heads
    heads = {"q": n, "k": kv_heads, "v": kv_heads}
    before, after = arguments["pre_tokens"], arguments["next_tokens"]
    offset = skv - sq
    # The reference aligns a window with the last query, so one that is aligned with the first is moved by the offset.
    if arguments["top_left"]:
        before, after = None if before is None else before + offset, None if after is None else after - offset
        offset = 0

    def of_head(name: str, b: int, g: int, first: int = 0, length: int = skv) -> Pick:
        """[b, heads, tokens, d] of q (and the output) or of k and v, which belong to key/value head `g`."""
        count = group if name == "q" else 1

        def pick(x: Tensor) -> Tensor:
            dense = to_bnsd(x, layout, heads[name])
            return dense[b : b + 1, g * count : (g + 1) * count, first : first + length]

        return pick

    def part(b: int, g: int, first: int, length: int) -> Part:
        own = slice(g * group, (g + 1) * group)
        picks = {"q": of_head("q", b, g, first, length), "k": of_head("k", b, g), "v": of_head("v", b, g)}
        picks["sinks"] = lambda x: x[own]
        picks["alibi_slopes"] = lambda x: x[..., own] if x.ndim == 1 else x[b : b + 1, own]

        def of_bias(x: Tensor) -> Tensor:
            x = x[(None,) * (4 - x.ndim)]
            at = (slice(b, b + 1), own, slice(first, first + length))
            return x[tuple(i if n > 1 else slice(None) for i, n in zip(at, x.shape))]

        cut = cut_out(arguments, {**picks, "bias": of_bias, "mask": of_bias})
        slopes, cut["alibi_slopes"], cut["top_left"] = cut["alibi_slopes"], None, False
        if slopes is not None:
            alibi = alibi_bias(slopes, length, skv, first + offset)
            cut["bias"] = alibi if cut["bias"] is None else alibi + cut["bias"]
        if arguments["rng"] is not None:
            cut["rng"] = _block_of_draw(arguments["rng"], (batch, n, sq, skv), (b, g * group, first, 0))
        # The block's last query takes the place of the call's last one: with n queries after it, it sees n keys more to
        # the left of the new alignment and n fewer to the right.
        queries_after = sq - (first + length)
        cut["pre_tokens"] = None if before is None else before + queries_after
        cut["next_tokens"] = None if after is None else after - queries_after
        return Part({**cut, "layout": "BNSD", "num_heads": None, "num_kv_heads": None}, picks["q"])

    # The first and the last queries are compared in the last head, where offsets are largest, and the first ones also
    # in the first head, where they are 0, and behind a head whose last rows may have been written over them.
    last, end = max(0, sq - RUN), (batch - 1, kv_heads - 1)
    inner = [(draw.randint(0, last), draw.randrange(batch), draw.randrange(kv_heads)) for _ in range(2)]
    for start, b, g in dict.fromkeys([*inner, (0, 0, 0), (0, *end), (last, *end)]):
        length = min(RUN, sq - start)
        pick = of_head("q", b, g, start, length)
        labels = {"the output": ("the output", pick)}
        if lse:
            rows = _block_of_lse(b, g * group, group, start, length)
            labels = {"output 0": ("output 0", pick), "output 1": ("output 1", rows)}
        yield Block(
            f"queries {start} to {start + length - 1} of {sq}, batch entry {b}, key/value head {g}",
            _one(part, b, g, start, length),
            labels,
            {"q": pick},
        )
    step = max(1, CHUNK // (skv * group))

    def all_queries(b: int, g: int) -> Iterator[Part]:
        return (part(b, g, at, min(step, sq - at)) for at in range(0, sq, step))

    for b, g in {(batch - 1, kv_heads - 1), (0, draw.randrange(kv_heads))}:
        yield Block(
            f"all keys of batch entry {b}, key/value head {g}",
            functools.partial(all_queries, b, g),
            {},
            {"k": of_head("k", b, g), "v": of_head("v", b, g)},
        )


def _block_of_lse(b: int, head: int, heads: int, first: int, length: int) -> Pick:
    return lambda x: x[b : b + 1, head : head + heads, first : first + length]


def _block_of(first: int, end: int, head: int, head_end: int) -> Pick:
    return lambda x: x[first:end, head:head_end]


def packed_attention(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """flash_attention of layout TND: each sequence with one key/value head's group."""
    ends = arguments["cu_seqlens_q"].tolist(), arguments["cu_seqlens_k"].tolist()
    kv_heads = arguments["k"].shape[1]
    group = arguments["q"].shape[1] // kv_heads
    for number in range(len(ends[0]) - 1):
        g = draw.randrange(kv_heads)
        (q0, q1), (k0, k1) = ((e[number], e[number + 1]) for e in ends)
        picks = {"q": _block_of(q0, q1, g * group, (g + 1) * group)}
        picks |= dict.fromkeys(("k", "v"), _block_of(k0, k1, g, g + 1))

        def part(picks: Mapping[str, Pick] = picks, lengths: tuple[int, int] = (q1 - q0, k1 - k0)) -> Part:
            cut = cut_out(arguments, picks)
            starts = (torch.tensor([0, length], dtype=torch.int32) for length in lengths)
            return Part({**cut, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts))}, picks["q"])

        yield Block(
            f"sequence {number}, key/value head {g}",
            _one(part),
            {"the output": ("the output", picks["q"])},
            picks,
        )


def whole(*gradients: str, outputs: int = 1) -> Blocks:
    """All of a call, for an op whose reference is quick enough. outputs: as of `along`."""

    def blocks(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
        compared = {label: (label, _same) for label in _labels(outputs)}
        yield Block("everything", _one(Part, arguments, _same), compared, dict.fromkeys(gradients, _same))

    return blocks


def tokens_of_rows(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """unpermute: some tokens, with the rows that they sum."""
    row_map, probs = arguments["row_map"], arguments["probs"]
    count = len(row_map)
    for start in _starts(row_map, 0, draw):
        pick = _narrow(0, start, min(RUN, count - start))
        local = pick(row_map).cpu()
        table = local[local >= 0]
        rows = functools.partial(_rows_of, table)

        def part(pick: Pick = pick, local: Tensor = local, rows: Pick = rows) -> Part:
            # The part holds the rows in the order in which the tokens name them, so their numbers count upwards.
            numbers = torch.where(local >= 0, (local >= 0).flatten().cumsum(0).view(local.shape) - 1, -1)
            cut = cut_out(arguments, {"rows": rows, "probs": pick})
            return Part({**cut, "row_map": numbers}, pick)

        yield Block(
            f"tokens {start} to {start + min(RUN, count - start) - 1} of {count}",
            _one(part),
            {"the output": ("the output", pick)},
            {"rows": rows} if probs is None else {"rows": rows, "probs": pick},
        )


def groups(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """grouped_linear and grouped_linear_wgrad: of every expert, some rows and some columns of its product."""
    sizes: list[int] = arguments["group_sizes"].tolist()
    in_place_ = "main_grad" in arguments
    for expert, size in enumerate(sizes):
        first = sum(sizes[:expert])
        matrix = arguments["main_grad" if in_place_ else "weight"][expert]
        column = draw.choice([0, max(0, len(matrix) - RUN), draw.randint(0, max(0, len(matrix) - RUN))])
        columns = min(RUN, len(matrix) - column)
        of_group, of_weight = _narrow(0, first, size), _block_of(expert, expert + 1, column, column + columns)
        of_product = _block_of(first, first + size, column, column + columns)
        alone = torch.tensor([size])
        name = f"columns {column} to {column + columns - 1} of expert {expert} ({size} rows)"
        if in_place_:
            cut = cut_out(arguments, {"x": of_group, "dy": of_product, "main_grad": of_weight})
            label = "main_grad, written in place"
            yield Block(name, _one(Part, {**cut, "group_sizes": alone}, _same), {label: (label, of_weight)}, {})
            continue
        cut = cut_out(arguments, {"x": of_group, "weight": of_weight})
        yield Block(
            name,
            _one(Part, {**cut, "group_sizes": alone}, of_product),
            {"the output": ("the output", of_product)},
            {"weight": of_weight},
            {"weight": size},
        )
        start = first + draw.choice([0, max(0, size - RUN)])
        length = min(RUN, size)
        rows = _narrow(0, start, length)
        cut = cut_out(arguments, {"x": rows, "weight": _narrow(0, expert, 1)})
        yield Block(
            f"rows {start} to {start + length - 1}, of expert {expert}",
            _one(Part, {**cut, "group_sizes": torch.tensor([length])}, rows),
            {"the output": ("the output", rows)},
            {"x": rows},
        )


def draws(arguments: Arguments, draw: random.Random) -> Iterator[Block]:
    """philox_uniform: rows of a draw."""
    shape, rng = tuple(arguments["shape"]), arguments["rng"]
    for start in _starts(torch.empty(shape, device="meta"), 0, draw):
        length = min(RUN, shape[0] - start)
        part_of = _block_of_draw(rng, shape, (start, *[0] * (len(shape) - 1)))
        cut = {**arguments, "shape": (length, *shape[1:]), "rng": part_of}
        yield Block(
            f"rows {start} to {start + length - 1} of {shape[0]}",
            _one(Part, {**cut, "device": torch.device("cpu")}, _same),
            {"the output": ("the output", _narrow(0, start, length))},
            {},
        )
