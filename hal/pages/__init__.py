"""HTML reports as single files: a page from a jinja2 template, with charts that matplotlib draws as SVG.

A page is self-contained: it has no script, and its Content-Security-Policy forbids it to load anything. Every value is
escaped, so a file that a report shows cannot inject markup into the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hal.errors import HalError

_INK = "#010203"
"""Stands for `currentColor`, which matplotlib cannot write: the colour of the page's text, light or dark."""

_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    "font.size": 9,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "svg.fonttype": "none",  # text elements can be selected, and use the page's font
    "svg.hashsalt": "hal",  # identical charts have identical bytes
}


def render(template: Path, **values: Any) -> str:
    """The page of a template that extends page.html.j2. Values are escaped unless they are `Markup`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = lambda value, form: "–" if value is None else format(value, form)
    return environment.get_template(template.name).render(**values)


def chart(draw: Callable[[Any], None], *, inches: tuple[float, float] = (9.0, 3.4)) -> Markup:
    """The <svg> of what `draw` adds to empty matplotlib axes. Raises HalError if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HalError(f"charts need matplotlib ({error}); pip install 'torch-hal[train]'") from None
    drawn = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=inches, layout="tight")
        draw(figure.add_subplot())
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=no_metadata)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]  # the XML declaration is not allowed inside HTML
    # matplotlib uses the same group ids in every figure, but ids must be unique within a page. Nothing refers to them.
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    return Markup(svg.replace(_INK, "currentColor"))
