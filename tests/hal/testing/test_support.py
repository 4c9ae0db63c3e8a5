"""The parity report for readers: several results side by side, as HTML and Markdown, checked in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import hal
from hal.cli import main
from hal.core import registry
from hal.testing.parity_rows import NO_IMPLEMENTATION, Row, write_json
from hal.testing.support import absent_row, read, table
from hal.testing.support_pages import heat, html, markdown, shown

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def row(op, dtype, backend="one", status="pass", worst=0.1, reasons=(), implementation="one/k", **more):
    samples = 0 if worst is None else 3
    result = Row(
        op, dtype, backend, more.pop("simulated", False), status, samples, worst, list(reasons), implementation
    )
    vars(result).update(more)
    return result


ONE = [
    row("probe", "-", worst=None, implementation=None, facts={"torch": "2.13", "probe": "an <anvil>"}),
    row("softmax", "float32", worst=0.30),
    row("softmax", "float32", worst=0.80, implementation="one/slow", reasons=["3 dimensions (the kernel has 2)"]),
    row("softmax", "float16", "one", "declined", None, ["float16 (the kernel has float32)"]),
    row("softmax", "float32", implementation="hal.lower", worst=None),
    row("golden_loss", "float32", implementation="model/gpt2", worst=0.01),
]
TWO = [
    row("probe", "-", "two", worst=None, implementation=None, simulated=True),
    row("norm", "float32", "two", "waived", 4.3, ["waiver x10: a scalar in float32"], "two/n", simulated=True),
    row("softmax", "float32", "two", "declined", None, [NO_IMPLEMENTATION], None, simulated=True),
    row(
        "swiglu", "float32", "two", "fail", 7.0, (), "two/s", simulated=True, message="error of 7 <b>", code="replay()"
    ),
    row("linear", "float32", "two", "pass", 0.0, ["stand-in: a reference"], "two/l", simulated=True),
]


@pytest.fixture
def support():
    return table([ONE, TWO, [absent_row("three", "no such card; plug one in")]])


def test_a_cell_shows_the_worst_of_all_implementations(support):
    cell = support.cell(("softmax", "float32"), 0)
    assert (cell.status, cell.worst, shown(cell), heat(cell)) == ("pass", 0.8, "0.8", "h3")
    assert [r.implementation for r in cell.rows] == ["one/k", "one/slow", "hal.lower"]


@pytest.mark.parametrize(
    "line, column, text, look",
    [
        (("softmax", "float16"), 0, "declined", "declined"),
        (("softmax", "float32"), 1, "-", "none"),
        (("norm", "float32"), 1, "4.3 waived", "waived"),
        (("swiglu", "float32"), 1, "FAIL 7", "fail"),
        (("linear", "float32"), 1, "0 stand-in", "h0"),
        (("norm", "float32"), 0, "", "empty"),
        (("norm", "float32"), 2, "", "empty"),
    ],
)
def test_what_a_cell_says(support, line, column, text, look):
    cell = support.cell(line, column)
    assert (shown(cell), heat(cell)) == (text, look)


def test_columns_tell_device_simulator_and_absence_apart(support):
    assert [(c.backend, c.where) for c in support.columns] == [
        ("one", "device"),
        ("two", "simulator"),
        ("three", "not run"),
    ]
    assert support.lines[-1] == ("golden_loss", "float32")


def test_reasons_are_kept_by_kind(support):
    assert support.declines(0) == [
        ("softmax one/slow (float32)", "3 dimensions (the kernel has 2)"),
        ("softmax one/k (float16)", "float16 (the kernel has float32)"),
    ]
    assert support.waivers(1) == [("norm two/n (float32)", "waiver x10: a scalar in float32")]
    assert support.stand_ins(1) == [("linear two/l (float32)", "stand-in: a reference")]
    assert support.missing(1) == ["softmax"]
    assert support.declines(1) == []


def test_a_failed_probe_is_a_line_of_its_own():
    bad = row("probe", "-", status="fail", worst=None, implementation=None, message="not pure")
    report = table([[bad, ONE[1]]])
    assert report.failures(0) == [("probe -", "not pure")]


def test_two_results_about_one_backend_are_refused():
    with pytest.raises(hal.ContractError, match="two results are about one on its device; give one of them"):
        table([ONE, ONE])


def test_markdown_says_it_all_and_marks_nothing_up_by_accident(support):
    text = markdown(support)
    assert "| op | dtype | one (device) | two (simulator) | three (not run) |" in text
    assert "| swiglu | float32 |  | **FAIL 7** |  |" in text
    assert "an \\<anvil\\>" in text
    assert "Not run: no such card; plug one in" in text
    assert "error of 7 \\<b\\>" in text
    assert text == markdown(support)


def test_html_is_one_file_and_escapes_what_it_shows(support):
    page = html(support)
    assert not re.search(r"<script|<link|<img|url\(|https?:", page)
    assert "an &lt;anvil&gt;" in page
    assert "error of 7 &lt;b&gt;" in page
    targets = re.findall(r'href="#([^"]+)"', page)
    assert targets
    assert set(targets) <= set(re.findall(r'id="([^"]+)"', page))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_lays_it_out(support, tmp_path):
    probe = (
        "<script>window.onload = () => { const box = s => document.querySelector(s).getBoundingClientRect(),"
        "colour = s => getComputedStyle(document.querySelector(s)).backgroundColor;"
        "document.title = JSON.stringify({fail: colour('td.fail'), pass: colour('td.h3'), none: colour('td.none'),"
        "wide: document.documentElement.scrollWidth <= innerWidth, height: box('table').height,"
        "columns: document.querySelectorAll('thead')[0].querySelectorAll('th').length}) }</script>"
    )
    # The page's policy forbids all scripts, including the one that takes the measurements here.
    measured = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", html(support))
    (tmp_path / "page.html").write_text(measured.replace("</body>", probe + "</body>"))
    result = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--dump-dom",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=900,800",
         f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    layout = json.loads(re.search(r"<title>(.*?)</title>", result.stdout)[1])
    assert len({layout["fail"], layout["pass"], layout["none"]}) == 3
    assert layout["wide"], "the page is wider than its window"
    assert layout["height"] > 100
    assert layout["columns"] == 5


# The command.


def test_results_of_other_environments_are_merged(tmp_path, capsys):
    write_json(tmp_path / "one.json", ONE)
    write_json(tmp_path / "two.json", [r for r in TWO if r.status != "fail"])
    page = tmp_path / "page.html"
    argv = ["parity", "--merge", str(tmp_path / "one.json"), str(tmp_path / "two.json"), "--html", str(page)]
    assert main(argv) == 0
    assert "2 backends, 0 failures" in capsys.readouterr().out
    assert "waiver x10" in page.read_text()
    write_json(tmp_path / "two.json", TWO)
    assert main(argv) == 1
    assert "FAIL     swiglu" in capsys.readouterr().out


@pytest.mark.slow
def test_backends_run_in_processes_of_their_own_and_absent_ones_say_why(tmp_path, capfd):
    out = tmp_path / "support.md"
    argv = ["parity", "--backends", "cpu_ref,npu,cuda", "--op", "l2norm", "--max-examples", "0"]
    write_json(tmp_path / "npu.json", [row("l2norm", "float32", "npu", worst=0.2)])
    assert main([*argv, "--merge", str(tmp_path / "npu.json"), "--markdown", str(out)]) == 0
    console = capfd.readouterr().out
    assert "pass     l2norm" in console
    assert "--backend npu" not in console, "what is merged is not run"
    head = next(line for line in out.read_text().splitlines() if line.startswith("| op"))
    assert "npu (device) | cpu_ref (device) | cuda (" in head


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--backends", "cpu_ref,nobody", "--html", "x"], "no backend is called 'nobody'"),
        (["--backends", "cpu_ref", "--json", "x"], "--json, --collectives and --todo are about one --backend"),
        (["--merge", "absent.json"], "absent.json"),
        (["--backend", "cpu_ref", "--todo", "--html", "x"], "--html and --markdown show the ops' results"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, capsys, argv, text):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["parity", *argv])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', '[{"op": "x"}]', b"\xff\xfe"])
def test_a_file_with_something_else_is_refused(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(hal.ContractError, match="does not hold rows of `hal parity --json`"):
        read(path)


# docs/support: kept up to date.

DOCS = Path(hal.__file__).resolve().parents[1] / "docs" / "support"
RESULTS = sorted((DOCS / "results").glob("*.json"))
STALE = "docs/support is out of date: run `make support`"


def registered(name):
    """(op, dtype, implementation) -> waiver, of a backend as currently registered. Needs no device."""
    waivers = {}
    # An instance, whose options decide which implementations it has.
    backend = registry.make(name, {})
    for op in hal.OPS.values():
        impls = backend.implementations(op)
        for dtype in op.tol:
            short = str(dtype).removeprefix("torch.")
            for impl in impls:
                factor, reason = impl.waivers.get(dtype, (1.0, ""))
                waivers[op.name, short, impl.id] = f"waiver x{factor:g}: {reason}" if factor != 1.0 else ""
            if not impls:
                waivers[op.name, short, None] = ""
    return waivers


def test_there_is_a_result_of_every_in_tree_backend():
    assert set(registry.IN_TREE) <= {read(path)[0].backend for path in RESULTS}


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_a_result_is_about_the_implementations_there_are(path):
    rows = read(path)
    name = rows[0].backend
    if name not in hal.backend_names():
        pytest.skip(f"the backend {name} is not installed here")
    recorded = {
        (r.op, r.dtype, r.implementation): next((x for x in r.reasons if x.startswith("waiver")), "")
        for r in rows
        if r.op in hal.OPS and r.implementation != "hal.lower"
    }
    missing = {k: v for k, v in registered(name).items() if not (k in recorded and recorded[k] == v)}
    gone = set(recorded) - set(registered(name))
    assert (missing, gone) == ({}, set()), STALE
    assert [r for r in rows if r.status == "fail"] == []


def test_the_page_is_made_of_the_results():
    assert (DOCS / "README.md").read_text() == markdown(table([read(path) for path in RESULTS])), STALE
