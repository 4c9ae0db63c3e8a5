"""Draws the pictures of the documentation from the records of runs: python docs/images/draw.py RUN [TWO_RANKS]

RUN: the folder of `make train`. TWO_RANKS: that of a run on two ranks with --profile --profile-ranks 0 1. The colour of
text and axes is a grey that can be read on light and on dark pages.
"""

import sys
from pathlib import Path

from hal import pages
from hal.model.apps.html_report.chart import COLOURS, running_mean
from hal.model.apps.html_report.profile_section import profile_section
from hal.model.apps.html_report.record import Run, read_runs

FOLDER, INK = Path(__file__).parent, "#808080"


def save(name: str, svg: str) -> None:
    """Writes a chart of a page as a file of its own."""
    (FOLDER / name).write_text(svg.replace("currentColor", INK) + "\n")


def draw_loss(run: Run) -> None:
    """The loss of every iteration, its running mean, and the validation loss."""

    def draw(axes: object) -> None:
        axes.plot(*zip(*run.losses), color=COLOURS[0], linewidth=1.0, alpha=0.3)
        axes.plot(*zip(*running_mean(run.losses, 9)), color=COLOURS[0], linewidth=1.4)
        axes.plot(*zip(*run.evaluations), "o", color=COLOURS[1], markersize=5)
        axes.set(xlabel="iteration", ylabel="nats per byte (dots: validation)")
        axes.margins(x=0.01)

    save("loss.svg", pages.chart(draw))


if __name__ == "__main__":
    first, *others = read_runs([Path(argument) for argument in sys.argv[1:]])
    draw_loss(first)
    for run in others:
        save("timeline.svg", profile_section(0, run).timeline)
