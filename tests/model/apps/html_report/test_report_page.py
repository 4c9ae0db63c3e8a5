"""The page shows the content of the files as escaped text, without markup from them, and loads nothing."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.cli.report import main
from hal.model.apps.html_report.chart import COLOURS, curves, running_mean, style
from hal.model.apps.html_report.page import build_page
from hal.model.apps.html_report.record import read_parity, read_runs
from hal.model.config.schema import ConfigError

RECORD: dict[str, Any] = {
    "config": {"hidden_size": 32, "lr": 0.01, "global_batch_size": 4, "seq_length": 16, "backend": "cpu_ref"},
    "versions": {"torch": "2.13.0"},
    "device": {"backend": "cpu_ref", "simulated": False, "facts": {"cpu": "some"}},
    "fallbacks": {},
    "losses": [[n, 5.0 - 0.01 * n] for n in range(1, 201)],
    "grad_norms": [[n, None if n == 3 else 1.0] for n in range(1, 201)],
    "evaluations": [[100, 4.5], [200, 3.5]],
    "step_seconds": [[n, 0.5] for n in range(1, 201)],
    "tokens_per_second": 128.0,
    "model_flops_per_second": 3e9,
    "peak_memory_bytes": 3 * 2**20,
}
PARITY = [
    {"op": "rms_norm", "dtype": "float32", "backend": "npu", "simulated": True, "status": "pass", "samples": 9},
    {"op": "linear", "dtype": "float16", "backend": "npu", "status": "waived", "reasons": ["its <kernel> rounds"]},
]


def written(folder: Path, name: str, **change: Any) -> Path:
    path = folder / name / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**copy.deepcopy(RECORD), **change}))
    return path.parent


class Reader(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(tmp_path: Path, *changes: dict[str, Any], parity: Any = None) -> str:
    runs = read_runs([written(tmp_path, f"run{n}", **change) for n, change in enumerate(changes)])
    if parity is None:
        return build_page(runs)
    (tmp_path / "parity.json").write_text(json.dumps(parity))
    return build_page(runs, [read_parity(tmp_path / "parity.json")])


def test_one_run(tmp_path: Path) -> None:
    text = Reader(page_of(tmp_path, {})).text
    for words in ("run0 cpu_ref 200 3.0450 3.5000 128 3.0 0", "hidden_size 32", "peak, MiB", "3.0"):
        assert words in text
    assert "No call ran the reference" in text and "Difference from the first run" not in text


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    other = {
        "losses": [[n, y + (0.25 if n == 7 else 0.0)] for n, y in RECORD["losses"]],
        "config": {**RECORD["config"], "lr": 0.02, "new_option": True},
        "device": {"backend": "npu", "simulated": True},
        "fallbacks": {"swiglu": 12},
        "peak_memory_bytes": 6 * 2**20,
    }
    text = Reader(page_of(tmp_path, {}, other, parity=PARITY)).text
    assert "run1 npu (simulated) 200" in text
    assert "run1 200 199 2.50e-01" in text  # iterations in common, bit-equal, largest difference
    assert "lr 0.01 0.02" in text and "new_option – true" in text and "hidden_size" not in text
    assert "run1 swiglu 12" in text and "run1 6.0" in text
    assert "parity.json: 1 pass, 1 waived" in text and "rms_norm float32 npu (simulated) pass 9 –" in text
    assert "linear float16 npu waived – its <kernel> rounds" in text


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"


def test_nothing_in_a_file_becomes_markup(tmp_path: Path) -> None:
    record = {
        "config": {HOSTILE: HOSTILE, "lr": [HOSTILE]},
        "versions": {HOSTILE: HOSTILE},
        "device": {"backend": HOSTILE, "facts": {HOSTILE: HOSTILE}},
        "fallbacks": {HOSTILE: 3},
    }
    parity = [{"op": HOSTILE, "dtype": HOSTILE, "backend": HOSTILE, "status": HOSTILE, "reasons": [HOSTILE]}]
    folder = written(tmp_path, "<b>x<", **record)
    (tmp_path / "p<i>.json").write_text(json.dumps(parity))
    page = build_page(read_runs([folder]), [read_parity(tmp_path / "p<i>.json")], HOSTILE)
    plain = Reader(
        page_of(tmp_path, {}, parity=[{**parity[0], **dict.fromkeys(("op", "dtype", "backend", "status"), "x")}])
    )
    read = Reader(page)
    assert {t for t, _ in read.tags} <= {t for t, _ in plain.tags}
    assert not any(t in ("script", "img") for t, _ in read.tags)
    assert not [a for _, attributes in read.tags for a in attributes if a.startswith("on")]
    assert "alert(1)" in read.text and "<b>x<" in read.text  # as text


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, {}, {})
    read = Reader(page)
    assert not [t for t, _ in read.tags if t in ("script", "link", "img", "iframe", "object")]
    links = [v for _, a in read.tags for name, v in a.items() if re.search("href|src|action", name)]
    assert all(v and v.startswith("#") for v in links)
    # The names of SVG's XML namespaces look like addresses, but nothing is loaded from there.
    assert set(re.findall(r"https?:[^\"\s]*", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"url\((?!#)|@import", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[1]", "holds no JSON object"),
        ('{"config": 3}', "config is not a table"),
        ('{"losses": 3}', "losses should be a list"),
        ('{"losses": [[1, 2, 3]]}', "losses should be a list"),
        ('{"losses": [["1", 2]]}', "losses should be a list"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        read_runs([tmp_path])
    with pytest.raises(ConfigError, match=r"is no result of `hal parity --json`|cannot be read"):
        read_parity(tmp_path / "run.json")
    with pytest.raises(ConfigError, match="give the folder of a run"):
        read_runs([tmp_path / "nothing"])


def test_odd_values_are_gaps_and_an_empty_record_is_a_page(tmp_path: Path) -> None:
    odd = '{"losses": [[2, 1.5], [1, NaN], [3, Infinity], [4, "x"], [5, 1e308]], "tokens_per_second": "fast"}'
    (tmp_path / "run.json").write_text(odd)
    (run,) = read_runs([tmp_path])
    assert run.losses == [(2, 1.5)] and run.tokens_per_second is None and run.throughput == []
    assert "nothing was recorded" in build_page([run])


def test_names_are_as_short_as_tells_them_apart(tmp_path: Path) -> None:
    folders = [written(tmp_path, "a/one"), written(tmp_path, "b/one")]
    assert [r.name for r in read_runs(folders)] == ["a/one", "b/one"]
    assert [r.name for r in read_runs(folders[:1])] == ["one"]
    with pytest.raises(ConfigError, match="given twice"):
        read_runs([folders[0], folders[0]])


ROWS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000).map(lambda ys: list(enumerate(ys)))


@given(ROWS, st.integers(1, 50))
def test_running_means_stay_between_the_extremes(rows: Any, window: int) -> None:
    means = running_mean(rows, window)
    low, high = min(y for _, y in rows), max(y for _, y in rows)
    assert [n for n, _ in means] == [n for n, _ in rows]
    assert all(low - 1e-6 <= y <= high + 1e-6 for _, y in means)
    assert running_mean([(1, 1.0), (2, 4.0), (3, 4.0)], 3) == [(1, 2.5), (2, 3.0), (3, 4.0)]


def curve_points(svg: Any, colour: str) -> list[list[tuple[float, float]]]:
    """The points of every curve of a colour, in the chart's coordinates."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]*style="fill: none; stroke[^"]*: {colour}', str(svg))
    return [[(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", path)] for path in paths]


def test_a_chart_draws_each_run_in_its_own_way() -> None:
    svg = curves([[(1, 1.0), (2, 0.0), (3, 10.0)], [(1, 2.0), (3, 4.0)]], "loss & more")
    assert [len(curve_points(svg, colour)[0]) for colour in COLOURS[:2]] == [3, 2]
    assert "iteration" in svg and "loss &amp; more" in svg and "currentColor" in svg
    # A logarithmic axis omits the value 0.
    assert len(curve_points(curves([[(1, 1.0), (2, 0.0), (3, 10.0)]], "y", log=True), COLOURS[0])[0]) == 2
    assert curves([[(1, 0.0)]], "y", log=True) is None and curves([[], []], "y") is None
    assert len({style(n) for n in range(24)}) == 24
    assert curves([[(1, 1.0), (2, 3.0)]], "y") == curves([[(1, 1.0), (2, 3.0)]], "y")


def test_a_spike_of_a_long_run_stays_and_the_page_stays_small() -> None:
    rows = [(n, 1.0 + 0.01 * (n % 7) + (9.0 if n == 31_111 else 0.0)) for n in range(100_000)]
    svg = curves([rows], "loss", smooth=False)
    (curve,) = curve_points(svg, COLOURS[0])
    top, usual = min(y for _, y in curve), max(y for _, y in curve)  # SVG's y grows downwards
    assert usual - top > 150 and len(curve) < 20_000


def test_the_values_behind_a_chart_are_in_a_table(tmp_path: Path) -> None:
    text = Reader(page_of(tmp_path, {}, {"losses": [[1, 4.75], [200, 2.5]]})).text
    assert "values iteration run0 run1 1 4.9900 4.7500 11 4.8900 –" in text and "200 3.0000 2.5000" in text
    assert text.count("values iteration") == 4  # loss, difference, gradient norm, throughput


def test_the_command_writes_the_page(tmp_path: Path, capsys: Any) -> None:
    folders = [str(written(tmp_path, name)) for name in ("one", "two")]
    out = tmp_path / "page.html"
    assert main([*folders, "--output", str(out), "--title", "Two"]) == 0
    assert "shows 2 runs" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>") and not list(tmp_path.glob(".*"))


ABSURD = st.sampled_from(
    [0, -1, 1, 2**53, 2**63, 10**400, -(10**400), 1e308, -1e308, 5e-324, 1e-300, float("nan"), float("inf"), True, "x"]
)
PLACES = ["losses", "grad_norms", "evaluations", "step_seconds", "config", *list(RECORD)[-3:]]


@settings(max_examples=60, derandomize=True)
@given(place=st.sampled_from(PLACES), first=ABSURD, second=ABSURD, third=ABSURD)
def test_absurd_numbers_are_shown_or_refused(
    place: str, first: Any, second: Any, third: Any, tmp_path_factory: Any
) -> None:
    # Other charts are skipped, because drawing each chart takes a tenth of a second.
    chart_key = "step_seconds" if place == "config" else place
    record = {k: copy.deepcopy(v) if k == chart_key or not isinstance(v, list) else [] for k, v in RECORD.items()}
    if place == "config":
        record["config"] |= {"global_batch_size": first, "seq_length": second, "hidden_size": third}
    elif isinstance(record[place], list):
        record[place] += [[first, second], [300, third]]
    else:
        record[place] = first
    path = tmp_path_factory.mktemp("absurd") / "run.json"
    path.write_text(json.dumps(record))
    with contextlib.suppress(ConfigError):
        Reader(build_page(read_runs([path]), [], "Runs"))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"losses": [[10**400, 1.0]]}, "losses has an iteration of 1329 bits"),
        ({"losses": [[-1, 1.0]]}, "losses has an iteration -1"),
        ({"step_seconds": [[2**53, 1.0]]}, "step_seconds has an iteration 9007199254740992"),
    ],
)
def test_a_record_of_absurd_numbers_is_named(change: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"run\.json is not the record of a run: {words}"):
        read_runs([written(tmp_path, "one", **change)])


@pytest.mark.slow
def test_a_browser_shows_it(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs chromium to render the page")
    image = pytest.importorskip("PIL.Image", reason="needs Pillow to read the screenshot")
    whole = page_of(tmp_path, {}, {"losses": [[n, 4.0] for n in range(1, 201)]})
    # The same page without its charts: the marks beside the runs' names have the same colours.
    emptied = re.sub("<figure.*?</figure>", "", whole, flags=re.S)
    assert emptied != whole

    def pixels(name: str, page: str) -> dict[str, int]:
        (tmp_path / f"{name}.html").write_text(page)
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        flags += "--disable-component-update --disable-sync --force-prefers-reduced-motion --window-size=1100,3000"
        profile, picture = f"--user-data-dir={tmp_path / 'profile'}", tmp_path / f"{name}.png"
        command = [browser, *flags.split(), profile, f"--screenshot={picture}", str(tmp_path / f"{name}.html")]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        colours = image.open(picture).convert("RGB").getcolors(1 << 24)
        counts = {"#{:02x}{:02x}{:02x}".format(*rgb): count for count, rgb in colours}
        return {colour: counts.get(colour, 0) for colour in COLOURS[:2]}

    full, empty = pixels("whole", whole), pixels("emptied", emptied)
    assert all(full[colour] - empty[colour] > 500 for colour in COLOURS[:2]), (full, empty)
