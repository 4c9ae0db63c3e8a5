"""pytest --pyargs hal.testing --backend NAME, as a third party runs it: in another folder and a separate process."""

import os
import signal
import subprocess
import sys

import host_backend
import pytest

PACKAGE = f"""{host_backend.SOURCE}from hal import ops

class Acme(HostBackend):
    name, api = "acme", 2
    def __init__(self, simulate=False):
        self.simulate = self.simulated = simulate

@Acme.impl(ops.rms_norm, id="acme/right")
def rms_norm(x, weight, eps=1e-5):
    return ops.rms_norm.reference(x, weight, eps)

@Acme.impl(ops.l2norm, id="acme/wrong")
def l2norm(tensors):
    return ops.l2norm.reference(tensors) + 1e-3
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that looks like an installed backend package (as pip would write it)."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "hal_acme.py").write_text(PACKAGE)
    info = folder / "hal_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hal-acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hal.backends]\nacme = hal_acme:Acme\n")
    return folder


def pytest_run(site, *argv):
    """Runs pytest in an empty folder, with the package on the path."""
    empty = site / "empty"
    empty.mkdir(exist_ok=True)
    environment = {
        "PYTHONPATH": str(site),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HOME": str(site),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *argv]
    return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_every_implementation_is_a_test_and_the_wrong_one_fails_with_its_code(site):
    ops = [f"--op={name}" for name in ("rms_norm", "l2norm", "adamw")]
    result = pytest_run(site, "--pyargs", "hal.testing", "--backend", "acme", "--max-examples", "2", *ops)
    assert result.returncode == 1
    assert "test_conformance[rms_norm-acme/right] PASSED" in result.stdout
    assert "test_conformance[l2norm-acme/wrong] FAILED" in result.stdout
    assert "test_conformance[adamw] SKIPPED (no implementation)" in result.stdout
    assert "replay(ops.l2norm, sample, torch.float32, implementation='acme/wrong')" in result.stdout
    assert "acme: 6 pass, 1 declined, 3 fail\nno implementation of: adamw" in result.stdout


@pytest.mark.slow
def test_simulate_reaches_the_backend(site):
    argv = ("--backend=acme", "--simulate", "--op", "rms_norm", "--max-examples", "0")
    result = pytest_run(site, "--pyargs", "hal.testing", *argv)
    assert result.returncode == 0
    assert "acme (simulated): 5 pass" in result.stdout


def test_without_a_backend_it_says_what_to_give(site):
    result = pytest_run(site, "--pyargs", "hal.testing")
    assert result.returncode == 4
    assert "no backend was named; give --backend NAME, one of: cpu_ref, cuda, npu, acme" in result.stderr


def test_other_peoples_sessions_and_options_are_left_alone(site):
    tests = site / "empty" / "theirs"
    tests.mkdir(parents=True, exist_ok=True)
    (tests / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--backend')\n")
    (tests / "test_theirs.py").write_text(
        "def test_it(request):\n    assert request.config.getoption('--backend') == 'x'\n"
    )
    result = pytest_run(site, str(tests), "--backend", "x")
    assert result.returncode == 0, result.stdout + result.stderr


def test_another_folder_of_that_name_is_not_the_kit(site):
    folder = site / "mine" / "hal" / "testing"
    folder.mkdir(parents=True)
    (folder / "test_mine.py").write_text("def test_mine():\n    pass\n")
    done = pytest_run(site, str(folder))
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


CRASH = f"""{host_backend.SOURCE}import ctypes
from hal import ops

class Crash(HostBackend):
    name, api = "crash", 2

@Crash.impl(ops.l2norm, id="crash/wild")
def l2norm(tensors):
    ctypes.string_at(0)
"""


def test_a_crash_of_a_kernel_names_the_row(tmp_path):
    (tmp_path / "hal_crash.py").write_text(CRASH)
    info = tmp_path / "hal_crash-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hal-crash\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hal.backends]\ncrash = hal_crash:Crash\n")
    command = [sys.executable, "-m", "hal", "parity", "--backend", "crash", "--op", "l2norm", "--dtype", "float32"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGSEGV
    assert result.stderr.splitlines()[-1] == "running l2norm float32 crash/wild"
