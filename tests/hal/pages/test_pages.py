"""Pages and charts for reports: escaped, self-contained, and with clear errors for missing packages."""

import sys

import jinja2
import pytest
from markupsafe import Markup

import hal
from hal import pages


@pytest.fixture
def page(tmp_path):
    template = tmp_path / "own.html.j2"
    template.write_text(
        '{% extends "page.html.j2" %}{% block body %}{{ value }} {{ number | number(".1f") }}{% endblock %}'
    )
    return lambda **values: pages.render(template, **values)


def test_values_are_escaped_and_missing_numbers_are_dashes(page):
    text = page(value="<b>&", number=None)
    assert "&lt;b&gt;&amp; –" in text and "default-src 'none'" in text
    assert "<b> 2.5" in page(value=Markup("<b>"), number=2.46)
    with pytest.raises(jinja2.UndefinedError, match="'value' is undefined"):
        page(number=1)


def test_a_chart_takes_the_colour_of_the_page_and_equal_charts_are_equal():
    first, second = (pages.chart(lambda axes: axes.set_title("a < b")) for _ in range(2))
    assert first == second and first.startswith("<svg") and "a &lt; b" in first
    assert "currentColor" in first and "#010203" not in first


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(hal.HalError, match=r"pip install 'torch-hal\[train\]'"):
        pages.chart(lambda axes: None)
