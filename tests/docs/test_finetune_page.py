"""docs/finetune.md: its commands work, one after the other, in an empty folder."""

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "finetune.md"


@pytest.mark.nightly
def test_the_commands_of_the_page_work(fresh):
    pytest.importorskip("transformers", reason="needs transformers (extra: transformers)")
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        done = fresh.run(f"set -e\n{block}")
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        assert "Traceback" not in done.stdout
    first, second = (
        [loss for _, loss in json.loads((fresh.folder / run / "run.json").read_text())["losses"]]
        for run in ("run", "run-longer")
    )
    assert first[-1] < first[0] / 4 and second[0] < first[0] / 4, "it learns, and goes on from what it has learnt"
