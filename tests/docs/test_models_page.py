"""docs/models.md: its commands work, one after the other, in an empty folder, and it names every family."""

import re
from pathlib import Path

import pytest

from hal.model.apps.convert.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_names_the_families():
    table = "\n".join(line for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    table = table.replace("| `model_type` |", "|")
    assert set(re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines()))) == set(FAMILIES)


@pytest.mark.nightly
def test_the_commands_of_the_page_work(fresh):
    pytest.importorskip("transformers", reason="needs transformers (extra: convert)")
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        done = fresh.run(f"set -e\n{block}")
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        assert "Traceback" not in done.stdout
