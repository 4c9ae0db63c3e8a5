"""Compiles `kernels/*.c` into one extension module, once per machine, and loads it.

Guarantees: nothing is compiled at import; the cached file is found by a key over everything that determines its
content (sources, compiler, flags, CPU, Python ABI); a file under its final name is always complete, whatever crashed or
ran at the same time; and the module shares its OpenMP runtime with torch (which is therefore imported first).

Each kernel family declares its functions in `kernels/<family>_api.h` in plain C, which cffi reads too. Addresses are
passed as `uintptr_t` (tensor.data_ptr()), which costs half of what `ffi.cast` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # noqa: F401  before the kernels: both then use the libgomp that torch brings

from hal import BackendUnavailable

from . import cpu

KERNELS = Path(__file__).resolve().parent / "kernels"
MODULE = "_hal_cpu_ref"
# -std=c11 alone forbids a*b+c from becoming one FMA; errno and traps would forbid vectorising sqrt and selections.
_BASE_FLAGS = ["-std=c11", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_JOBS = 2

_load_lock = threading.Lock()
_loaded: ModuleType | None = None
_refused: dict[Path, str] = {}
"""Why a file is not used, by path: what it brought into the process stays, and a second try would not see it come."""


def lib() -> Any:
    """The compiled kernels (cffi `lib`); compiles them on the first use on a machine.

    Raises BackendUnavailable when there is no compiler, when it fails, or when the cache directory is not safe to use.
    """
    global _loaded
    if _loaded is None:
        with _load_lock:
            if _loaded is None:
                _loaded = _load(ensure_built())
    return _loaded.lib


def ffi() -> Any:
    """cffi's `ffi` of the compiled kernels, for structs that are passed by address."""
    lib()
    assert _loaded is not None
    return _loaded.ffi


def find_compiler() -> list[str]:
    """The C compiler's command: `$CC`, else gcc, clang or cc. Raises BackendUnavailable if there is none."""
    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [["gcc"], ["clang"], ["cc"]]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    raise BackendUnavailable(
        f"cpu_ref compiles its kernels on first use and found no C compiler "
        f"(tried {'$CC=' + shlex.join(asked) if asked else 'gcc, clang, cc'}). "
        "Install one (Debian/Ubuntu: apt install gcc; Fedora: dnf install gcc) or point CC at one."
    )


def cache_directory() -> Path:
    """Where compiled kernels are kept: `$HAL_CACHE_DIR`, else `$XDG_CACHE_HOME/hal`, else `~/.cache/hal`, + /cpu_ref.

    Created with mode 0700. Raises BackendUnavailable for a directory that another user could have written to: loading a
    library from there would run their code.
    """
    asked = os.environ.get("HAL_CACHE_DIR")
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hal"
    hint = "Set HAL_CACHE_DIR to a directory that only you can write to."
    for directory in (base, base / "cpu_ref"):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = directory.stat()
        except OSError as error:
            raise BackendUnavailable(f"cpu_ref cannot use the cache directory {directory}: {error}. {hint}") from error
        if info.st_uid != os.geteuid():
            raise BackendUnavailable(
                f"the cache directory {directory} belongs to user {info.st_uid}, not to you. {hint}"
            )
        if info.st_mode & 0o022:
            mode = oct(info.st_mode & 0o777)
            raise BackendUnavailable(f"the cache directory {directory} is writable by others (mode {mode}). {hint}")
    return base / "cpu_ref"


def ensure_built() -> Path:
    """The path of the compiled module for this machine; compiles it if it is not in the cache."""
    compiler, flags = find_compiler(), _wanted_flags()
    key = _key(compiler, flags)
    cache = cache_directory()
    target = cache / f"{MODULE}-{key}.so"
    if not target.exists():
        with _locked(cache / "lock"):
            if not target.exists():  # another process may have built it while this one waited
                for leftover in cache.glob("build-*"):  # of a crash: only the holder of the lock builds
                    shutil.rmtree(leftover, ignore_errors=True)
                _build(compiler, flags, target, cache / f"build-{key}")
    return target


def _sources() -> list[Path]:
    return sorted(KERNELS.glob("*.c"))


def _declarations() -> str:
    """What cffi parses: every *_api.h without its preprocessor lines."""
    headers = [path.read_text() for path in sorted(KERNELS.glob("*_api.h"))]
    return "\n".join(re.sub(r"(?m)^\s*#.*$", "", text) for text in headers)


def _wanted_flags() -> list[str]:
    sanitizers = os.environ.get("HAL_CPU_REF_SANITIZE", "")
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = [*_BASE_FLAGS, native]
    if "avx512f" in cpu.features():
        flags.append("-mprefer-vector-width=512")  # compilers default to 256 bits even where 512 cost nothing
    if sanitizers:
        return [*flags, "-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    return [*flags, "-O3"]


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    import cffi

    version = subprocess.run([*compiler, "--version"], check=False, capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for part in (*compiler, version, *flags, cpu.identity(), str(sysconfig.get_config_var("SOABI")), cffi.__version__):
        digest.update(part.encode() + b"\0")
    for path in sorted([*KERNELS.glob("*.c"), *KERNELS.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel when the holder dies
        yield


def _build(compiler: list[str], flags: list[str], target: Path, work: Path) -> None:
    import cffi

    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        raise BackendUnavailable(
            f"cpu_ref needs Python's C headers to compile its kernels and found no {include}/Python.h. "
            "Install them (Debian/Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)."
        )
    started = time.monotonic()
    sources = _sources()
    _say(f"compiling cpu_ref kernels ({len(sources)} files, {compiler[0]}), once for this machine ...")
    work.mkdir(mode=0o700)
    try:
        ffi = cffi.FFI()
        ffi.cdef(_declarations())
        includes = "\n".join(f'#include "{path.name}"' for path in sorted(KERNELS.glob("*_api.h")))
        ffi.set_source(MODULE, f"#include <stdint.h>\n{includes}\n")
        with contextlib.redirect_stdout(io.StringIO()):  # it announces the temporary file
            ffi.emit_c_code(str(work / f"{MODULE}.c"))
        flags = [flag for flag in flags if not flag.startswith("-mprefer") or _accepts(compiler, flag, work)]

        def compile_one(source: Path) -> str:
            output = str(work / (source.stem + ".o"))
            _run([*compiler, *flags, f"-I{KERNELS}", f"-I{include}", "-c", str(source), "-o", output])
            return output

        with ThreadPoolExecutor(_JOBS) as pool:
            objects = list(pool.map(compile_one, [*sources, work / f"{MODULE}.c"]))
        library = work / target.name
        _run([*compiler, *flags, "-shared", *objects, "-o", str(library), "-lm"])
        with open(library, "rb") as handle:
            os.fsync(handle.fileno())
        os.rename(library, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"compiled cpu_ref kernels in {time.monotonic() - started:.1f} s")


def _accepts(compiler: list[str], flag: str, work: Path) -> bool:
    empty = work / "empty.c"
    empty.write_text("int hal_empty;\n")
    command = [*compiler, "-Werror", flag, "-c", str(empty), "-o", str(work / "empty.o")]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BackendUnavailable(
            f"the C compiler failed (exit {done.returncode}) on cpu_ref's kernels.\n"
            f"{shlex.join(command)}\n{done.stderr}"
        )


def _say(text: str) -> None:
    print(f"hal: {text}", file=sys.stderr, flush=True)


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    if path in _refused:
        raise BackendUnavailable(_refused[path])
    before = _openmp_runtimes()
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    runtimes = _openmp_runtimes()
    gnu = {runtime for runtime in runtimes if "/libgomp" in runtime}
    if len(gnu) > 1:
        raise BackendUnavailable(
            f"two OpenMP runtimes are loaded ({', '.join(sorted(gnu))}); their threads would fight for the cores. "
            "Import torch before any other library that brings its own libgomp."
        )
    if before and runtimes > before:  # others that a library loaded and that stand idle do no harm
        _refused[path] = (
            f"the kernels that {find_compiler()[0]} compiled bring an OpenMP runtime of their own "
            f"({', '.join(sorted(runtimes - before))}) beside torch's ({', '.join(sorted(before))}); their threads "
            "would fight for the cores. Set CC to a compiler with torch's runtime: gcc for libgomp, clang for libomp."
        )
        raise BackendUnavailable(_refused[path])
    return module


def _openmp_runtimes() -> set[str]:
    """The OpenMP runtimes of this process (GNU's, LLVM's, Intel's), empty where the system does not list them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if re.search(r"/lib(gomp|omp|iomp)[^/]*\.so", line)}
