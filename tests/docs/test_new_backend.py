"""hal new-backend: the new package installs, is listed, passes the kit and the style checks; no file is overwritten."""

import subprocess
import sys
from pathlib import Path

import pytest

from hal.cli import main, new_backend
from hal.cli.new_backend import FILES
from hal.testing.purity import backend_rule, check_tree

TEMPLATES = Path(new_backend.__file__).parent / "template"


def files(root):
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_the_package_installs_and_passes_the_kit(fresh):
    result = fresh.run("hal new-backend my_chip")
    assert result.returncode == 0, result.stdout
    assert 'cd hal-my-chip\n  python -m pip install -e ".[test]"\n' in result.stdout
    install = fresh.run('cd hal-my-chip && python -m pip install -q -e ".[test]"')
    assert install.returncode == 0, install.stdout
    info = fresh.run("hal info")
    assert "my_chip (hal-my-chip 0.1.0): 1 device" in info.stdout
    parity = fresh.run("hal parity --backend my_chip --op rms_norm --op swiglu --max-examples 3")
    assert parity.returncode == 0, parity.stdout
    assert "no implementation of: swiglu" in parity.stdout
    tests = fresh.run("cd hal-my-chip && python -m pytest")
    assert tests.returncode == 0, tests.stdout
    assert "3 passed" in tests.stdout


def test_it_is_written_where_asked_and_never_over_something(tmp_path, capsys):
    assert main(["new-backend", "acme", "--dir", str(tmp_path / "new")]) == 0
    root = tmp_path / "new" / "hal-acme"
    assert files(root) == set(FILES)
    assert "$" not in (root / "hal_acme/device.py").read_text()
    (root / "hal_acme/device.py").write_text("mine")
    assert main(["new-backend", "acme", "--dir", str(tmp_path / "new")]) == 2
    assert "hal-acme exists and is not overwritten" in capsys.readouterr().err
    assert (root / "hal_acme/device.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["Acme", "1st", "a-b", "a b", "a__b", "_a", "a_", "class", "../x", "", "ümlaut"])
def test_a_name_that_cannot_be_one_is_refused(tmp_path, capsys, name):
    assert main(["new-backend", name, "--dir", str(tmp_path)]) == 2
    assert "cannot name a backend: use lower-case letters" in capsys.readouterr().err
    assert files(tmp_path) == set()


@pytest.mark.parametrize("name", ["cuda", "cpu_ref", "reference"])
def test_a_name_that_is_taken_is_refused(tmp_path, capsys, name):
    assert main(["new-backend", name, "--dir", str(tmp_path)]) == 2
    assert f"a backend called '{name}' exists already" in capsys.readouterr().err
    assert files(tmp_path) == set()


def test_every_template_is_used():
    assert {p.name.removesuffix(".template") for p in TEMPLATES.iterdir()} == set(FILES.values())


def test_what_is_written_meets_the_house_rules(tmp_path):
    main(["new-backend", "acme", "--dir", str(tmp_path)])
    root = tmp_path / "hal-acme"
    assert check_tree(root / "hal_acme", backend_rule("hal_acme"), package="hal_acme") == []
    for check in (["format", "--check"], ["check", "--select", "E,F,W,I,B,UP"]):
        ruff = [sys.executable, "-m", "ruff", *check, "--line-length", "120", "."]
        result = subprocess.run(ruff, cwd=root, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
