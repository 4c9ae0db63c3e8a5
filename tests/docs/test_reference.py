"""The reference pages have every public name, and say what the source says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hal
from hal import backend_tools, ops, testing

ROOT = Path(hal.__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"


@pytest.mark.parametrize("module", [hal, ops, testing, backend_tools], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module):
    text = (FOLDER / f"{module.__name__.split('.')[-1]}.md").read_text()
    there = re.findall(r"^### (\w+)$|^## Module `[\w.]+\.(\w+)`$", text, re.MULTILINE)
    assert set(module.__all__) <= {name for names in there for name in names}


def test_the_pages_are_those_of_the_source(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, FOLDER / "write.py", "--check"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
