"""Pages with one program in Python and commands of the shell: both work, in an empty folder, in the page's order."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


def run_program(page, fresh):
    (fresh.folder / "program.py").write_text("\n\n".join(blocks(page, "python")))
    done = fresh.run("python program.py")
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_commands(page, fresh):
    for block in blocks(page, "bash"):
        done = fresh.run(f"set -e\n{block}")
        assert done.returncode == 0 and "Traceback" not in done.stdout, f"{block}\n{done.stdout}"


@pytest.mark.slow
def test_the_landing_page(fresh):
    assert "flash_attention on backend 'cpu_ref'" in run_program("index", fresh)
    run_commands("index", fresh)


@pytest.mark.slow
def test_a_new_op_passes_the_kit(fresh):
    said = run_program("new-op", fresh)
    assert "mine/torch: chosen" in said and "pass" in said


@pytest.mark.nightly
def test_see_inside_a_run(fresh):
    assert "rms_norm" in run_program("profiling", fresh)
    run_commands("profiling", fresh)
    page = (fresh.folder / "report.html").read_text()
    assert "Memory by kind over time" in page and "Timeline of the ranks" in page
    table = {
        line.split("`")[1] for line in (DOCS / "profiling.md").read_text().splitlines() if line.startswith("| `rank-")
    }
    written = {path.name for path in (fresh.folder / "run" / "profile").iterdir()}
    assert {name.replace("N", "0") for name in table} - written == {"rank-0.torch.json.gz", "rank-0_..._ascend_pt"}


@pytest.mark.nightly
def test_read_a_report(fresh):
    run_commands("report", fresh)
    assert "Difference from the first run" in (fresh.folder / "report.html").read_text()


def test_the_options_of_a_page_exist():
    from hal.model.config.command_line import parser

    known = {flag for action in parser()._actions for flag in action.option_strings}
    for page in ("profiling", "report"):
        text = (DOCS / f"{page}.md").read_text()
        assert set(re.findall(r"(?<![\w`-])`?(--[a-z][a-z0-9-]+)", text)) - known <= {"--output"}, page
