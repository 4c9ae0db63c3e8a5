"""The pages of the tasks around a model: their commands work, one after the other, in an empty folder.

docs/serve.md is run by tests/hal/integrations/transformers/test_serving_command.py, docs/models.md by
test_models_page.py.
"""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.nightly
@pytest.mark.parametrize("page", ["convert", "generate", "evaluate"])
def test_the_commands_of_the_page_work(fresh, page):
    pytest.importorskip("transformers", reason="needs transformers (extra: convert)")
    blocks = re.findall(r"^```bash\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    for block in blocks:
        if "lm-eval" in block and importlib.util.find_spec("lm_eval") is None:
            continue
        done = fresh.run(f"set -e\n{block}")
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        assert "Traceback" not in done.stdout
