"""The documentation as a site: it builds with every link checked."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import hal

ROOT = Path(hal.__file__).resolve().parents[1]
MKDOCS = shutil.which("mkdocs") or shutil.which(ROOT / ".venv-docs" / "bin" / "mkdocs")
pytestmark = pytest.mark.skipif(MKDOCS is None, reason="mkdocs is not installed: `make docs` installs it in .venv-docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [MKDOCS, "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site):
    page = (site / "index.html").read_text()
    assert not re.search(r'(src|href)="https?://[^"]+\.(js|css|woff2?)"', page)


def test_every_error_has_its_anchor(site):
    page = (site / "errors" / "index.html").read_text()
    for kind in hal.__all__:
        thing = getattr(hal, kind)
        if isinstance(thing, type) and issubclass(thing, hal.HalError):
            assert f'id="{kind.lower()}"' in page


def test_every_decision_is_in_the_navigation():
    listed = re.findall(r"adr/(\S+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert listed == sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
