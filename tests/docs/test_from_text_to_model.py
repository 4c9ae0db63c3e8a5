"""docs/from-text-to-model.md: its commands work, one after the other, in an empty folder."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "from-text-to-model.md"


@pytest.mark.nightly
def test_the_commands_of_the_page_work_in_their_order(fresh):
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 7
    for block in blocks:
        done = fresh.run(f"set -e\n{block}")
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        assert "Traceback" not in done.stdout
    files = {p.name for p in fresh.folder.iterdir()}
    assert {"corpus_text_document.idx", "my-bert_doc_sentence.idx", "some_text_document.idx"} <= files
    assert not [name for name in files if name.endswith(".tmp")]
