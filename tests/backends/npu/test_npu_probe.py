"""The probe names exactly what is missing, and neither it nor an import loads torch_npu."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hal
from hal import cli
from hal.backends.npu import Npu, cann, environment, simulator


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Simulates an installed torch_npu of this version (None: not installed)."""

    def install(version: str | None) -> None:
        def metadata(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", metadata)

    return install


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any sign of CANN."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "_devices", list)


MATCHING = ".".join(torch.__version__.split("+")[0].split(".")[:2]) + ".7"


def test_no_wheel(wheel: Callable[[str | None], None]) -> None:
    wheel(None)
    probe = Npu().probe()
    assert not probe.ok and "torch_npu is not installed" in probe.reason and "pip install" in probe.reason


def test_a_wheel_for_another_torch(wheel: Callable[[str | None], None]) -> None:
    wheel("2.1.0")
    probe = Npu().probe()
    assert not probe.ok and "torch_npu 2.1.0 is for torch 2.1" in probe.reason and torch.__version__ in probe.reason


def test_no_cann(wheel: Callable[[str | None], None], bare: None) -> None:
    wheel(MATCHING)
    probe = Npu().probe()
    assert not probe.ok and "CANN was not found" in probe.reason and "simulate=True" in probe.reason


@pytest.mark.parametrize(
    "driver, devices, ok, says",
    [
        (False, 0, False, "no Ascend driver"),
        (True, 0, False, "the Ascend driver is present but shows no device"),
        (True, 2, True, "2 NPUs"),
    ],
)
def test_cann_with_and_without_driver_and_devices(
    wheel: Callable[[str | None], None],
    bare: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    driver: bool,
    devices: int,
    ok: bool,
    says: str,
) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    wheel(MATCHING)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(environment, "_driver", lambda: driver)
    monkeypatch.setattr(environment, "_devices", lambda: [f"/dev/davinci{i}" for i in range(devices)])
    probe = Npu().probe()
    assert (probe.ok, probe.count) == (ok, devices) and says in probe.reason


@pytest.mark.parametrize(
    "version, release, says",
    [
        ("2.11.0", "9.1.0", ""),
        ("2.13.0", "9.9.0", ""),  # newer than the table, which cannot exclude it
        ("2.7.1.post2", "8.5.0", ""),
        ("2.8.0", "8.3.RC1.alpha003", ""),
        ("2.11.0", "8.3.RC1", "torch_npu 2.11.0 needs CANN 9.1.0, and CANN 8.3.RC1 is installed; with CANN 8.3.RC1"),
        ("2.8.0", "8.5.0", "install torch-npu 2.9.0 or 2.8.0.post2 or 2.7.1.post2 or 2.6.0.post5"),
        ("2.7.1.post9", "9.0.0", "torch_npu 2.7.1.post9 is not for CANN"),
        ("2.6.0", "9.1.0", "torch_npu 2.6.0 needs CANN 8.2.RC1"),
    ],
)
def test_the_probe_refuses_the_pairs_that_the_vendors_table_excludes(
    wheel: Callable[[str | None], None],
    bare: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    version: str,
    release: str,
    says: str,
) -> None:
    """The release is in a file of the processor's folder, beside the lib64 that set_env.sh puts on the path."""
    processor = tmp_path / f"{platform.machine()}-linux"
    (processor / "lib64").mkdir(parents=True)
    (processor / "lib64" / "libascendcl.so").touch()
    (tmp_path / "lib64").symlink_to(processor / "lib64")
    (processor / "ascend_toolkit_install.info").write_text(f"package_name=Ascend-cann-toolkit\nversion={release}\n")
    wheel(version)
    monkeypatch.setattr(torch, "__version__", ".".join(version.split(".")[:2]) + ".0")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(environment, "_driver", lambda: True)
    monkeypatch.setattr(environment, "_devices", lambda: ["/dev/davinci0"])
    probe = Npu().probe()
    assert probe.facts["cann release"] == release
    assert probe.ok == (not says) and says in probe.reason, probe.reason


def test_every_pair_of_the_table_is_accepted() -> None:
    for version, release in cann.pairs():
        assert cann.mismatch(version, release) == "", (version, release)


def test_simulation_needs_a_compiler(wheel: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(MATCHING)
    monkeypatch.setenv("CXX", "no-such-compiler")
    probe = Npu(simulate=True).probe()
    assert not probe.ok and "no-such-compiler" in probe.reason


@pytest.mark.parametrize("name", ["HCCL_EXEC_TIMEOUT", "COMBINED_ENABLE", "JIT_COMPILE", "INF_NAN_MODE_FORCE_DISABLE"])
def test_the_environment_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "77")
    assert environment.variables()[name] == "77"
    assert cli.main(["info", "--backend", "npu"]) == 0
    assert f"environment {name}: 77" in capsys.readouterr().out


def test_the_limits_that_ascends_scripts_raise_are_reported() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = Npu(simulate=True).probe().facts
    assert facts["limit of open files"] == f"{soft} of {hard}" and "limit of core files" in facts


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")
@pytest.mark.parametrize("value", ["True", "False"])
def test_jit_compile_sets_the_mode_of_torch_npu(value: str) -> None:
    code = "import hal; hal.use('npu', simulate=True); import torch; print(torch.npu.is_jit_compile_false())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "JIT_COMPILE": value}
    )
    assert done.stdout.split()[-1] == str(value == "False"), done.stderr


def test_another_value_of_jit_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JIT_COMPILE", "maybe")
    with pytest.raises(hal.HalError, match="must be True or False"):
        environment.compiles_operators()


def test_options_of_the_simulator_need_it() -> None:
    with pytest.raises(hal.HalError, match="simulate=True"):
        Npu(simulate=False, poison=True)


def test_hal_simulate_turns_the_simulator_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SIMULATE", "1")
    assert Npu().simulated and not Npu(simulate=False).simulated


def test_imports_and_probe_leave_torch_npu_alone() -> None:
    code = (
        "import sys, hal, hal.backends.npu as npu\n"
        "print(npu.Npu().probe().reason, npu.Npu(simulate=True).probe().reason)\n"
        "assert 'torch_npu' not in sys.modules\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_unknown_settings_and_faults_are_refused(machine: simulator.Simulator) -> None:
    with pytest.raises(hal.HalError, match="no setting 'colour'"):
        machine.set("colour", 1)
    with pytest.raises(hal.HalError, match="no fault 'fire'"):
        machine.inject("fire")


def test_hal_doctor_finds_the_simulator_healthy(simulated: Npu) -> None:
    code = "import sys; from hal.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "doctor", "--backend", "npu", "--simulate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["PASS", "device"] in lines and not [line for line in lines if line[:1] == ["FAIL"]], done.stdout
    ran = {line[1] for line in lines if line[:1] == ["ran"]}
    assert ran == set(hal.OPS) - {"scaled_linear"} and ["PASS", "torch"] in lines  # the device stores no float8
