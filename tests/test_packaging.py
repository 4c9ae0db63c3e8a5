"""The wheel contains hal/ and nothing else, and works from any directory."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORT = "import hal, hal.ops, hal.backends, hal.model; print(hal.__file__); print(hal.ops.layer_norm.name)"


def run(*command, cwd, **env):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HAL_BACKEND")}
    return subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    # A copy, because a build leaves folders beside its sources.
    source = out / "source"
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.split("\n")
    if not any(files):
        pytest.skip("the project is not a git checkout, so its list of files is unknown")
    for name in filter(None, files):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    build = run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)),
        cwd=out,
        GITHUB_SERVER_URL="https://forge.example",
        GITHUB_REPOSITORY="someone/hal",
    )
    assert build.returncode == 0, build.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    install = run(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel), cwd=target
    )
    assert install.returncode == 0, install.stderr
    return target


def test_the_wheel_ships_every_file_of_the_packages(wheel):
    folders = ("hal", "model", "ops", "backends", "benchmarks")
    files = [Path(f) for f in run("git", "ls-files", *folders, cwd=ROOT).stdout.split() if not (ROOT / f).is_symlink()]
    packaged = {n.split("/")[-1] for n in zipfile.ZipFile(wheel).namelist()}
    assert len(files) > 300 and [str(f) for f in files if f.name not in packaged] == []


def test_the_metadata_names_the_repository_that_built_it(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    urls = [line for line in metadata.splitlines() if line.startswith("Project-URL: ")]
    assert urls == [
        "Project-URL: Source, https://forge.example/someone/hal",
        "Project-URL: Documentation, https://forge.example/someone/hal/tree/main/docs",
        "Project-URL: Issues, https://forge.example/someone/hal/issues",
        "Project-URL: Changelog, https://forge.example/someone/hal/blob/main/CHANGELOG.md",
    ]


def test_the_wheel_ships_only_hal(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"hal"}
    for needed in (
        "hal/ops/attention.py",
        "hal/backends/cpu_ref/kernels/common.h",
        "hal/model/gpt/model.py",
        "hal/py.typed",
        "hal/model/config/presets/llama-70b.yaml",
        "hal/model/config/formats/mindspeed.yaml",
        "hal/model/apps/html_report/report.html.j2",
        "hal/pages/page.html.j2",
        "hal/bench/harness/report.html.j2",
    ):
        assert needed in names
    assert not [n for n in names if n.startswith("hal/tests")]


@pytest.mark.parametrize("where", ["elsewhere", "checkout"])
def test_the_installed_wheel_is_what_is_imported(site, tmp_path, where):
    cwd = tmp_path if where == "elsewhere" else ROOT
    # A checkout as the working directory comes first on sys.path, which must have no effect.
    result = run(sys.executable, "-c", IMPORT, cwd=cwd, PYTHONPATH=str(site))
    assert result.returncode == 0, result.stderr
    path, op = result.stdout.split()
    expected = ROOT if where == "checkout" else site
    assert op == "layer_norm"
    assert Path(path).is_relative_to(expected)


@pytest.mark.nightly
def test_pip_installs_and_removes_it_with_a_log_that_others_cannot_read(wheel, tmp_path):
    """`pip install --log` and `pip uninstall --log` under umask 027, in an environment of its own."""
    environment, log = tmp_path / "environment", tmp_path / "pip.log"
    assert run(sys.executable, "-m", "venv", str(environment), cwd=tmp_path).returncode == 0
    python = str(environment / "bin" / "python")
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))  # torch and what else HAL needs
    pip = f"umask 027; {python} -m pip --log {log} "
    installed = run("bash", "-c", f"{pip} install -q --no-deps --ignore-installed {wheel}", cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    where = run(python, "-c", IMPORT, cwd=tmp_path)
    assert where.stdout.startswith(str(environment)), where.stdout + where.stderr
    assert log.stat().st_mode & 0o777 == 0o640
    before = log.stat().st_size
    assert run("bash", "-c", f"{pip} uninstall -q -y torch-hal", cwd=tmp_path).returncode == 0
    assert log.stat().st_size > before and not list(environment.rglob("hal/__init__.py"))
    # Nothing of torch is patched by an installed HAL, so nothing has to be restored.
    check = "import torch; print(torch.ones(2).sum().item(), torch.Tensor.to.__qualname__)"
    assert run(python, "-c", check, cwd=tmp_path).stdout.split()[0] == "2.0"


@pytest.mark.parametrize("folder", ["ops", "backends", "model"])
def test_the_folders_refuse_to_be_imported_under_their_bare_names(folder):
    result = run(sys.executable, "-c", f"import {folder}", cwd=ROOT)
    assert result.returncode == 1
    assert f"import this package as 'hal.{folder}'" in result.stderr
