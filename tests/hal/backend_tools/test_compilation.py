"""The cache of compiled kernels, compilers, and the processor's description."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hal
from hal import backend_tools


def test_the_first_processor_is_described_by_lower_case_names() -> None:
    facts = backend_tools.processor_facts()
    assert all(name == name.strip().lower() and value == value.strip() for name, value in facts.items())
    if Path("/proc/cpuinfo").exists():
        assert facts.get("processor") == "0"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert backend_tools.cache_directory("mine") == tmp_path / "xdg" / "hal" / "mine"
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "asked"))
    assert backend_tools.cache_directory("mine") == tmp_path / "asked" / "mine"
    for directory in (tmp_path / "asked", tmp_path / "asked" / "mine"):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_others_can_write_to_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(hal.BackendUnavailable, match=r"writable by others \(mode 0o777\).*HAL_CACHE_DIR"):
        backend_tools.cache_directory("mine")
    cache.chmod(0o700)
    backend_tools.cache_directory("mine").chmod(0o770)
    with pytest.raises(hal.BackendUnavailable, match="writable by others"):
        backend_tools.cache_directory("mine")
    (cache / "mine").chmod(0o700)
    if os.geteuid() == 0:  # root is trusted
        os.chown(cache / "mine", 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(hal.BackendUnavailable, match="belongs to user"):
        backend_tools.cache_directory("mine")


def test_a_cache_that_cannot_be_made_is_an_error_of_hal(cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(hal.BackendUnavailable, match="cannot use the cache directory"):
        backend_tools.cache_directory("mine")


def test_threads_that_start_together_build_once(cache: Path) -> None:
    target, builds = backend_tools.cache_directory("mine") / "result.so", []

    def build(work: Path) -> Path:
        builds.append(work)
        assert list(work.iterdir()) == []
        (work / "out").write_text("done")
        return work / "out"

    threads = [threading.Thread(target=backend_tools.build_once, args=(target, build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and target.read_text() == "done"
    assert sorted(p.name for p in target.parent.iterdir()) == ["lock", "result.so", "result.so.sha256"]


def test_a_failed_build_leaves_nothing_and_the_next_one_removes_what_a_crash_left(cache: Path) -> None:
    target = backend_tools.cache_directory("mine") / "result.so"

    def fails(work: Path) -> Path:
        (work / "half").write_text("")
        raise hal.BackendUnavailable("no")

    with pytest.raises(hal.BackendUnavailable):
        backend_tools.build_once(target, fails)
    assert [p.name for p in target.parent.iterdir()] == ["lock"]
    (target.parent / "build-crashed").mkdir()
    (target.parent / "build-crashed" / "half").write_text("")

    def works(work: Path) -> Path:
        (work / "folder").mkdir()
        return work / "folder"

    assert backend_tools.build_once(target, works).is_dir()
    assert sorted(p.name for p in target.parent.iterdir()) == ["lock", "result.so", "result.so.sha256"]


@pytest.mark.parametrize(
    "how", ["cut off", "empty", "a changed byte", "another mode", "no digest", "another's digest", "damaged digest"]
)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_damaged_result_is_built_again(cache: Path, how: str, kind: str) -> None:
    target, builds = backend_tools.cache_directory("mine") / "result.so", []

    def build(work: Path) -> Path:
        builds.append(work)
        (work / "lib").mkdir()
        file = work / "lib" / "out.so"
        file.write_bytes(b"0123456789")
        return file if kind == "file" else work / "lib"

    backend_tools.build_once(target, build)
    backend_tools.build_once(target, build)
    assert len(builds) == 1
    file = target if kind == "file" else target / "out.so"
    digest = target.with_name("result.so.sha256")
    if how == "cut off":
        os.truncate(file, 5)
    elif how == "empty":
        os.truncate(file, 0)
    elif how == "a changed byte":
        file.write_bytes(b"0123456799")
    elif how == "another mode":
        file.chmod(0o777)
    elif how == "no digest":
        digest.unlink()
    else:
        digest.write_bytes((b"0" if how == "another's digest" else b"\xff") * 64)
    assert not backend_tools.intact(target)
    backend_tools.build_once(target, build)
    assert len(builds) == 2 and file.read_bytes() == b"0123456789" and backend_tools.intact(target)


def test_a_result_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = backend_tools.cache_directory("mine") / "result.so"
    target.with_name("new").write_text("x")
    backend_tools.place(target.with_name("new"), target)
    assert backend_tools.intact(target)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not backend_tools.intact(target)


def test_a_folder_above_the_cache_that_others_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "open" / "cache"))
    with pytest.raises(hal.BackendUnavailable, match=r"open is writable by others \(mode 0o777\)"):
        backend_tools.cache_directory("mine")
    (tmp_path / "open").chmod(0o1777)
    assert backend_tools.cache_directory("mine").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    (tmp_path / "open").chmod(0o770)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "link"))
    with pytest.raises(hal.BackendUnavailable, match="open is writable by others"):
        backend_tools.cache_directory("mine")


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\nfrom hal.backend_tools import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=False)
    assert done.returncode == -9
    with backend_tools.locked(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("language, variable, hint", [("C", "CC", "apt install gcc"), ("C++", "CXX", "apt install g")])
def test_a_missing_compiler_is_named_with_what_to_install(
    language: str, variable: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, "no-such-compiler -m64")
    with pytest.raises(hal.BackendUnavailable, match=rf"we need one .*\${variable}=no-such-compiler -m64.*{hint}"):
        backend_tools.find_compiler(language, "we need one")
    monkeypatch.setenv(variable, f"{sys.executable} -x")
    assert backend_tools.find_compiler(language, "we need one") == [sys.executable, "-x"]
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hal.BackendUnavailable, match=r"tried g(cc|\+\+), clang"):
        backend_tools.find_compiler(language, "we need one")


def test_a_compiler_that_fails_is_quoted() -> None:
    python = [sys.executable, "-c"]
    backend_tools.run_compiler([*python, "pass"], "nothing")
    with pytest.raises(hal.BackendUnavailable, match=r"(?s)failed \(exit 3\) on the kernels.*import sys.*it is broken"):
        backend_tools.run_compiler(
            [*python, "import sys; sys.stderr.write('it is broken'); sys.exit(3)"], "the kernels"
        )
    assert backend_tools.compiler_version([sys.executable]).startswith("Python 3")


def test_announcements_leave_stdout_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    backend_tools.announce("compiling")
    assert capsys.readouterr() == ("", "hal: compiling\n")
