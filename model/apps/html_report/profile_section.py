"""The section of the report on a run's profile: the timeline of the ranks, the time of each, ops, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hal import HalError, pages

from ...checkpoint.saved_config import saved_options
from ...config.parallel_layout import make_parallel_layout
from ...config.schema import resolve
from ..planning.memory import Memory, memory
from .profile import Profile
from .record import Run

_PHASES = {"data": "#8a8a00", "forward": "#0072b2", "backward": "#56b4e9", "optimizer": "#009e73"}
_BLOCKED = "#d55e00"
_KINDS = {"weights": "#0072b2", "optimizer": "#009e73", "gradients": "#e69f00"}
_REST = "#cc79a7"


@dataclass(frozen=True)
class ProfileSection:
    """What the page shows of the profile of run number `run`. memory: rank -> chart; planned: rows (kind, measured
    bytes, planned bytes); plan_note: why there is no plan."""

    run: int
    profiles: Sequence[Profile]
    timeline: Markup | None
    colours: Mapping[str, str]
    memory: Markup | None
    memory_colours: Mapping[str, str]
    planned: Sequence[tuple[str, float | None, float | None]]
    plan_note: str


def profile_section(number: int, run: Run) -> ProfileSection | None:
    """The section of a run, None if it was not profiled."""
    if not run.profiles:
        return None
    measured = next((p for p in run.profiles if p.memory is not None), None)
    plan, note = _plan(run) if measured is not None else (None, "")
    rows = [] if measured is None or measured.memory is None else _rows(measured.memory[2], plan)
    return ProfileSection(
        number,
        run.profiles,
        _timeline(run.profiles),
        {**_PHASES, "blocked by a collective": _BLOCKED},
        None if measured is None else _memory_chart(measured),
        {**_KINDS, "activations and temporary": _REST},
        rows,
        note,
    )


def _timeline(profiles: Sequence[Profile]) -> Markup | None:
    """One bar per rank: its phases, and above them the times in which collectives blocked it."""
    if not any(p.spans for p in profiles):
        return None

    def draw(axes: Any) -> None:
        for row, p in enumerate(profiles):
            for phase, colour in _PHASES.items():
                bars = [(1e3 * b, 1e3 * (e - b)) for kind, name, b, e in p.spans if (kind, name) == ("phase", phase)]
                axes.broken_barh(bars, (row - 0.4, 0.5), facecolors=colour)
            blocked = [(1e3 * b, 1e3 * (e - b)) for kind, _, b, e in p.spans if kind == "communication"]
            axes.broken_barh(blocked, (row + 0.14, 0.26), facecolors=_BLOCKED)
        axes.set(xlabel="milliseconds", yticks=range(len(profiles)), yticklabels=[f"rank {p.rank}" for p in profiles])
        axes.set_ylim(len(profiles) - 0.4, -0.6)

    return pages.chart(draw, inches=(9.0, 0.9 + 0.45 * len(profiles)))


def _memory_chart(profile: Profile) -> Markup | None:
    assert profile.memory is not None
    times, curves, _ = profile.memory
    if not times:
        return None
    kinds = [k for k in _KINDS if k in curves] + [k for k in curves if k not in _KINDS]

    def draw(axes: Any) -> None:
        colours = [_KINDS.get(kind, _REST) for kind in kinds]
        heights = [[size / 2**20 for size in curves[kind]] for kind in kinds]
        axes.stackplot([1e3 * t for t in times], *heights, colors=colours, step="post", linewidth=0)
        axes.set(xlabel="milliseconds", ylabel="MiB of tensors")
        axes.margins(x=0.01)

    return pages.chart(draw)


def _plan(run: Run) -> tuple[Memory | None, str]:
    """`hal plan`'s estimate for the run's options and layout, or why there is none."""
    try:
        stored = {name: value for name, value in run.config.items() if value is not None}
        config = resolve(saved_options({"config": stored}, Path(run.name)))
        padded = run.config.get("padded_vocab_size")
        if isinstance(padded, int) and padded > 0:
            config.padded_vocab_size = padded
        return memory(config, make_parallel_layout(config, run.profiles[0].world)), ""
    except (HalError, ValueError, TypeError, ArithmeticError, LookupError) as error:
        return None, f"There is no estimate of hal plan: {error}"


def _rows(peak: Mapping[str, float], plan: Memory | None) -> list[tuple[str, float | None, float | None]]:
    """Measured and planned bytes by kind. What the planner counts as activations, buffers and working memory is one
    kind of tensors here."""
    rest = sum(size for kind, size in peak.items() if kind not in _KINDS)
    planned: dict[str, float | None] = dict.fromkeys([*_KINDS, "rest"])
    if plan is not None:
        named = {f.name: getattr(plan, f.name) for f in fields(plan)}
        planned = {kind: named.pop(kind) for kind in _KINDS}
        planned["rest"] = sum(named.values())
    rows = [(kind, peak.get(kind, 0.0), planned[kind]) for kind in _KINDS]
    rows.append(("activations and temporary", rest, planned["rest"]))
    total = None if plan is None else plan.total
    return [*rows, ("together", sum(peak.values()), total)]
