"""The kernel build: one compilation for concurrent callers, no partial files, a key that covers every dependency.

A one-function kernel folder stands in for the real one, so that a build takes a fraction of a second.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hal import BackendUnavailable
from hal.backends.cpu_ref import CpuRef, build, cpu, openmp, prebuilt
from hal.testing.processes import run_processes


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "answer_api.h").write_text("// Twice x plus two.\n#pragma once\nint hal_answer(int x);\n")
    (folder / "answer.c").write_text('#include "answer_api.h"\nint hal_answer(int x) { return 2 * x + 2; }\n')
    monkeypatch.setattr(build, "KERNELS", folder)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def use(kernels: Path) -> int:
    """Compiles the kernels (or finds them in the cache) and uses them; stderr goes to a file beside their folder."""
    os.dup2(os.open(kernels.parent / f"stderr_{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    build.KERNELS = kernels
    answer: int = build.lib().hal_answer(20)
    return answer


def in_processes(kernels: Path, count: int = 1, function: Callable[[Path], Any] = use, **how: Any) -> list[Any]:
    """(what `function(kernels)` returned, what it wrote to stderr) of each of `count` new processes."""
    environment = {"HAL_CACHE_DIR": os.environ["HAL_CACHE_DIR"], **how.pop("environment", {})}
    answers = run_processes(count, function, kernels, environment=environment, **how)
    return [(answer, (kernels.parent / f"stderr_{rank}").read_text()) for rank, answer in enumerate(answers)]


def cached(kernels: Path) -> list[str]:
    return sorted(re.sub(r"-\w+", "", path.name) for path in (kernels.parent / "cache" / "cpu_ref").iterdir())


def test_processes_that_start_together_compile_once(kernels: Path) -> None:
    slow = kernels.parent / "cc"
    slow.write_text('#!/bin/sh\ncase "$*" in *-c*) sleep 0.5;; esac\nexec gcc "$@"\n')
    slow.chmod(0o755)
    outputs = in_processes(kernels, 2, environment={"CC": str(slow)})
    assert [answer for answer, _ in outputs] == [42, 42], outputs
    assert sum("compiling cpu_ref kernels" in err for _, err in outputs) == 1
    assert cached(kernels) == ["_hal_cpu_ref.so", "_hal_cpu_ref.so.sha256", "lock", "objects"]


def test_a_crash_half_way_leaves_no_library_and_the_next_build_cleans_up(kernels: Path) -> None:
    killer = kernels.parent / "cc"
    killer.write_text('#!/bin/sh\ncase "$*" in *-shared*) kill -9 $PPID; exit 1;; esac\nexec gcc "$@"\n')
    killer.chmod(0o755)
    ((answer, _),) = in_processes(kernels, environment={"CC": str(killer)}, expect_exit=[0])
    assert answer is None, "the process has ended"
    assert cached(kernels) == ["build", "lock", "objects"]
    ((answer, _),) = in_processes(kernels)
    assert answer == 42
    assert cached(kernels) == ["_hal_cpu_ref.so", "_hal_cpu_ref.so.sha256", "lock", "objects"]


def test_the_library_is_readable_by_its_owner_only_through_a_private_directory(kernels: Path) -> None:
    path = build.ensure_built()
    for directory in (path.parent, path.parent.parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert build.ensure_built() == path


@pytest.mark.parametrize("size", [0, 1000])
def test_a_library_that_was_cut_off_is_compiled_again(kernels: Path, size: int) -> None:
    """Mapping it would end the process with SIGBUS, and every later one."""
    os.truncate(build.ensure_built(), size)
    ((answer, err),) = in_processes(kernels)
    assert answer == 42 and "compiling cpu_ref kernels" in err


def test_only_files_that_changed_are_compiled_again(kernels: Path) -> None:
    """A header counts for the files that include it, also through a macro and through another header."""
    (kernels / "answer.c").write_text('#define SELF "twice.h"\n#include SELF\n#include "answer_api.h"\n')
    (kernels / "twice.h").write_text('#include "two.h"\nint hal_answer(int x) { return 2 * x + TWO; }\n')
    (kernels / "two.h").write_text("#define TWO 2\n")
    (kernels / "other.c").write_text("int hal_other;\n")

    def compiled() -> tuple[int, list[str]]:
        ((answer, err),) = in_processes(kernels)
        return answer, sorted(re.findall(r"files: (\w+\.c)", err))

    assert compiled() == (42, ["answer.c", "other.c"])
    (kernels / "unused.h").write_text("")
    assert compiled() == (42, [])
    (kernels / "two.h").write_text("#define TWO 3\n")
    assert compiled() == (43, ["answer.c"])


def test_the_key_changes_with_everything_that_changes_the_code(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc = build.find_compiler()

    def key(compiler: list[str] = gcc) -> str:
        return build._key(compiler, build._wanted_flags(), [*kernels.iterdir()])

    keys = [key()]
    assert key() == keys[0]
    keys.append(key([*gcc, "-m64"]))
    (kernels / "answer.c").write_text("int hal_answer(int x) { return x; }\n")
    keys.append(key())
    (kernels / "extra.h").write_text("// included by nobody yet\n")
    keys.append(key())
    monkeypatch.setattr(cpu, "identity", lambda: "another processor")
    keys.append(key())
    monkeypatch.setenv("HAL_CPU_REF_SANITIZE", "address")
    keys.append(key())
    updated = kernels.parent / "cc"  # same path and flags, different version
    for version in ("12", "13"):
        updated.write_text(f"#!/bin/sh\necho version {version}\n")
        updated.chmod(0o755)
        keys.append(key([str(updated)]))
    assert len(set(keys)) == len(keys)


def test_a_part_is_compiled_when_it_is_called_for_and_uses_the_core(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from a cache that was moved as a whole."""
    (kernels / "more_api.h").write_text("int hal_more(int x);\n")
    (kernels / "more.c").write_text('#include "answer_api.h"\nint hal_more(int x) { return 1 + hal_answer(x); }\n')
    monkeypatch.setattr(build, "PARTS", {"more": ("more",)})
    monkeypatch.setattr(build, "MODULE", "_hal_parts")
    monkeypatch.setattr(build, "_loaded", {})
    build.ensure_built()
    assert re.findall(r"files: (\w+\.c)", capsys.readouterr().err) == ["answer.c"]
    assert build.ensure_built("more").parent == build.ensure_built().parent
    assert re.findall(r"files: (\w+\.c)", capsys.readouterr().err) == ["more.c"]
    moved = kernels.parent / "moved"
    (kernels.parent / "cache").rename(moved)
    monkeypatch.setenv("HAL_CACHE_DIR", str(moved))
    assert build.lib("more").hal_more(20) == 43
    assert "compiling" not in capsys.readouterr().err
    monkeypatch.setattr(build, "PARTS", {"more": ("more",), "again": ("more",)})
    monkeypatch.setenv("HAL_CACHE_DIR", str(kernels.parent / "another"))
    assert build.ensure_built("again").parent == Path(build._loaded[build.CORE].__file__).parent, "with the loaded core"


def test_amx_is_used_only_where_the_system_permits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "processor_facts", lambda: {"flags": "avx512f avx512_bf16 amx_bf16 amx_tile amx_int8"})
    monkeypatch.setattr(cpu, "_tiles_permitted", lambda: True)
    assert "-DHAL_AMX" in build._wanted_flags()
    monkeypatch.setattr(cpu, "_tiles_permitted", lambda: False)
    assert "-DHAL_AMX" not in build._wanted_flags()
    assert cpu.features() == {"avx512f", "avx512_bf16"}


@pytest.mark.skipif(not {"avx2", "fma"} <= cpu.features(), reason="builds for x86-64-v3")
def test_prebuilt_parts_are_loaded_without_a_compiler(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernels / "more_api.h").write_text("int hal_more(int x);\n")
    (kernels / "more.c").write_text('#include "answer_api.h"\nint hal_more(int x) { return 1 + hal_answer(x); }\n')
    monkeypatch.setattr(build, "PARTS", {"more": ("more",)})
    monkeypatch.setattr(build, "MODULE", "_hal_prebuilt_parts")
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(prebuilt, "FOLDER", kernels.parent / "prebuilt")
    monkeypatch.delenv("HAL_CPU_REF_SANITIZE", raising=False)
    v3 = next(variant for variant in prebuilt.VARIANTS if variant.name == "x86-64-v3")
    build.build_variant(v3, build.find_compiler(), prebuilt.FOLDER / v3.name)
    assert len(list((prebuilt.FOLDER / v3.name).iterdir())) == 2
    monkeypatch.setenv("PATH", str(kernels))
    monkeypatch.setenv("HAL_CACHE_DIR", str(kernels.parent / "unused"))
    assert build.lib("more").hal_more(20) == 43
    assert not (kernels.parent / "unused").exists()


def test_every_kernel_file_of_a_part_exists() -> None:
    assert {stem for stems in build.PARTS.values() for stem in stems} <= {
        path.stem for path in build.KERNELS.glob("*.c")
    }


def test_without_a_compiler_the_error_says_what_to_install(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BackendUnavailable, match=r"(?s)no-such-compiler.*apt install gcc"):
        build.ensure_built()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(kernels))
    with pytest.raises(BackendUnavailable, match=r"tried gcc, clang, cc"):
        build.ensure_built()
    probe = CpuRef().probe()
    assert not probe.ok and "apt install gcc" in probe.reason


def test_a_compile_error_shows_the_compilers_message_and_leaves_nothing(kernels: Path) -> None:
    (kernels / "answer.c").write_text("int hal_answer(int x) { return y; }\n")
    with pytest.raises(BackendUnavailable, match=r"(?s)answer\.c.*(.y. undeclared|undeclared identifier .y.)"):
        build.ensure_built()
    assert cached(kernels) == ["lock", "objects"]


def test_a_cache_that_others_can_write_to_is_refused(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("HAL_CACHE_DIR", str(open_to_all))
    with pytest.raises(BackendUnavailable, match=r"writable by others \(mode 0o777\).*HAL_CACHE_DIR"):
        build.ensure_built()


def test_probing_and_importing_compile_nothing(kernels: Path) -> None:
    probe = CpuRef().probe()
    assert probe.ok and probe.count == 1 and probe.facts["compiler"]
    assert not (kernels.parent / "cache").exists()


def test_kernels_share_torchs_openmp_runtime() -> None:
    build.lib()
    torch.ones(1 << 20).sum()
    assert len([name for name in openmp.runtimes() if "/libgomp" in name]) <= 1


RENAMED = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("openmp", sys.argv[1])
openmp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openmp)
assert openmp.renamed() is None
runtime = ctypes.CDLL(sys.argv[2])
print(openmp.renamed())
"""


def test_kernels_are_linked_with_a_runtime_that_has_another_name(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch's wheels for aarch64; without this, the compiler's own runtime would be loaded, too."""
    runtime = kernels.parent / "libgomp-98df74fd.so.1.0.0"
    (kernels.parent / "runtime.c").write_text("void GOMP_parallel(void) {}\n")
    command = ["gcc", "-shared", "-fPIC", str(kernels.parent / "runtime.c"), f"-Wl,-soname,{runtime.name}"]
    subprocess.run([*command, "-o", str(runtime)], check=True)
    command = [sys.executable, "-c", RENAMED, openmp.__file__, str(runtime)]  # without torch's runtime
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == str(runtime)

    (kernels / "answer.c").write_text(
        '#include "answer_api.h"\nint hal_answer(int x) {\n#pragma omp parallel\n  hal_answer(x);\n  return x;\n}\n'
    )
    usual = build.ensure_built()
    monkeypatch.setattr(openmp, "renamed", lambda: str(runtime))
    linked = build.ensure_built()
    needed = [re.findall(rb"libgomp[-.\w]*", path.read_bytes()) for path in (usual, linked)]
    assert needed[0] and runtime.name.encode() not in needed[0]
    assert set(needed[1]) == {runtime.name.encode()}
    monkeypatch.setattr(prebuilt, "FOLDER", kernels)
    (kernels / "every processor").mkdir()
    everywhere = prebuilt.Variant("every processor", platform.machine(), (), frozenset())
    monkeypatch.setattr(prebuilt, "VARIANTS", (everywhere,))
    assert prebuilt.variant() is None
    monkeypatch.setattr(openmp, "renamed", lambda: None)
    assert prebuilt.variant() is everywhere


def refused_twice(kernels: Path) -> list[str]:
    """The messages of two attempts to use the kernels."""
    messages = []
    for _ in range(2):
        with pytest.raises(BackendUnavailable) as caught:
            use(kernels)
        messages.append(str(caught.value))
    return messages


def test_a_compiler_with_an_openmp_runtime_of_its_own_is_refused(kernels: Path) -> None:
    """clang links its own OpenMP runtime although torch was built with gcc's; a stub library stands in for it here."""
    folder = kernels.parent
    (folder / "runtime.c").write_text("int hal_runtime(void) { return 0; }\n")
    runtime = folder / "libomp.so.5"
    subprocess.run(["gcc", "-shared", "-fPIC", str(folder / "runtime.c"), "-o", str(runtime)], check=True)
    other = folder / "cc"
    other.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) set -- "$@" -Wl,--no-as-needed {runtime};; esac\nexec gcc "$@"\n'
    )
    other.chmod(0o755)
    (((first, second), _),) = in_processes(kernels, function=refused_twice, environment={"CC": str(other)})
    assert first == second
    assert re.search(rf"{other}.*{runtime}.*in addition to torch's.*libgomp.*gcc for libgomp", first, re.DOTALL)


@pytest.mark.parametrize("source", sorted(build.KERNELS.glob("*.c")), ids=lambda path: path.name)
def test_kernels_compile_without_warnings(source: Path) -> None:
    flags = [flag for flag in build._wanted_flags() if not flag.startswith(("-fsanitize", "-fno-sanitize"))]
    command = [*build.find_compiler(), *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_intels_processors_have_limits_of_their_own_for_streams_and_prefetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' limits for non-temporal stores and for prefetched rows are set by flags there, and only there."""
    limits = [f"-DHAL_STREAM_MIN={2 << 20}", f"-DHAL_FETCHED_ROW={4 << 10}"]
    for vendor, expected in (("GenuineIntel", limits), ("AuthenticAMD", [])):
        monkeypatch.setattr(cpu, "processor_facts", lambda vendor=vendor: {"vendor_id": vendor})
        flags = build._wanted_flags()
        assert [flag for flag in flags if "HAL_STREAM_MIN" in flag or "HAL_FETCHED_ROW" in flag] == expected
