"""Which prebuilt kernels an installed wheel uses, and that they need no compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hal.backends.cpu_ref import CpuRef, build, cpu, prebuilt

V3, V4 = prebuilt._V3, prebuilt._V4


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel's kernels for all variants of x86-64."""
    for variant in prebuilt.VARIANTS[:3]:
        (tmp_path / variant.name).mkdir()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("HAL_CPU_REF_SANITIZE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (V4 | {"avx512_bf16", "amx_tile"}, "x86-64-v4-bf16"),
        (V4, "x86-64-v4"),
        (V4 - {"avx512vl"}, "x86-64-v3"),
        (V3, "x86-64-v3"),
        (V3 - {"fma"}, None),
        (frozenset(), None),
    ],
)
def test_the_best_variant_that_runs_here_is_used(
    installed: Path, monkeypatch: pytest.MonkeyPatch, features: frozenset[str], name: str | None
) -> None:
    monkeypatch.setattr(cpu, "features", lambda: features)
    variant = prebuilt.variant()
    assert (variant and variant.name) == name
    if name is not None:
        assert build.ensure_built("moe") == installed / name / "_hal_cpu_ref_moe.so"


def test_a_variant_of_another_architecture_or_one_that_is_not_wanted_is_not_used(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "features", lambda: V4)
    (installed / "x86-64-v4").rmdir()
    assert prebuilt.variant() is prebuilt.VARIANTS[2]
    monkeypatch.setenv("HAL_CPU_REF_NATIVE", "1")
    assert prebuilt.variant() is None
    monkeypatch.delenv("HAL_CPU_REF_NATIVE")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert prebuilt.variant() is None


def test_with_prebuilt_kernels_no_compiler_is_needed(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "features", lambda: V4)
    monkeypatch.setenv("PATH", str(installed))
    monkeypatch.delenv("CC", raising=False)
    probe = CpuRef().probe()
    assert probe.ok and probe.facts["compiler"] == "none needed: prebuilt for x86-64-v4"


WHEEL = Path(__file__).resolve().parents[3] / ".ci" / "wheel.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of x86-64."""
    if platform.machine() != "x86_64":
        pytest.skip("builds the wheel of x86-64")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, str(WHEEL), str(folder)], check=True)
    (built,) = folder.glob("torch_hal-*-py3-none-manylinux_*_x86_64.whl")
    return built


@pytest.mark.nightly
def test_an_installed_wheel_trains_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True)
    nothing = tmp_path / "empty"
    nothing.mkdir()
    (tmp_path / "text.txt").write_text("a short text, many times over. " * 400)
    small = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --train-iters 3 --lr 1e-3"
    for precision in ("", "--bf16"):
        words = f"-m hal train --backend cpu_ref {small} {precision} --micro-batch-size 2 --sample-tokens 4"
        environ = {**os.environ, "PYTHONPATH": str(target), "PATH": str(nothing), "HAL_CACHE_DIR": str(tmp_path / "c")}
        environ.pop("CC", None)
        command = [sys.executable, *words.split(), "--text-file", "text.txt", "--run-dir", f"run{precision}"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "iteration        1/" in done.stdout and "compiling" not in done.stderr


LOAD = """
import importlib.util, pathlib, subprocess, sys
import hal

assert "torch" not in sys.modules
for module in (pathlib.Path(hal.__file__).parent / "backends/cpu_ref/prebuilt/x86-64-v3").glob("*.so"):
    spec = importlib.util.spec_from_file_location(module.name.split(".")[0], module)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    print(module.name, len(dir(loaded.lib)))
subprocess.run([sys.executable, "-m", "hal", "--help"], check=True)
"""


def interpreter(version: str) -> str | None:
    """The path of a Python of this version, in PATH or among those of pyenv."""
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    # First those of pyenv, whose commands in PATH exist for versions that are not chosen, too.
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_other_pythons_install_the_wheel_and_load_its_kernels(wheel: Path, tmp_path: Path, version: str) -> None:
    """Without torch, of which there may be no build for the CPU."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"needs Python {version}")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    inside = str(tmp_path / "venv" / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    if subprocess.run([*pip, "cffi"], check=False).returncode:
        pytest.skip("needs cffi from a package index")
    # Outside of the checkout, so that the installed package is imported.
    done = subprocess.run([inside, "-c", LOAD], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count(".so ") == 5 and "usage: hal COMMAND" in done.stdout
