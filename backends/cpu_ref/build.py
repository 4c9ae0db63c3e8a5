"""Compiles `kernels/*.c` into one extension module, once per machine, and loads it.

Guarantees: nothing is compiled at import; the key of the cached file covers everything that determines its content
(sources, compiler, flags, CPU, Python ABI); a file under its final name is always complete, even if processes crash or
build concurrently; and the module shares its OpenMP runtime with torch (which is therefore imported first).

Each kernel family declares its functions in `kernels/<family>_api.h` in plain C, which cffi parses as well. Addresses
are passed as `uintptr_t` (tensor.data_ptr()), which takes half the time of `ffi.cast`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import platform
import re
import subprocess
import sysconfig
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # noqa: F401  imported before the kernels, so that both use torch's libgomp

from hal import BackendUnavailable, backend_tools

from . import cpu

KERNELS = Path(__file__).resolve().parent / "kernels"
MODULE = "_hal_cpu_ref"
# With -std=c11 alone, a*b+c does not become an FMA; with errno and traps, sqrt and selections are not vectorised.
_BASE_FLAGS = ["-std=c11", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_JOBS = 8
"""At most this many compilers at a time; each needs up to 400 MB."""

_load_lock = threading.Lock()
_loaded: ModuleType | None = None
_refused: dict[Path, str] = {}
"""Path of a refused module -> the reason. Remembered because the libraries that it loaded stay in the process, so that
a second attempt could not detect them."""


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
    return backend_tools.find_compiler("C", "cpu_ref compiles its kernels on first use")


def ensure_built() -> Path:
    """The path of the compiled module for this machine; compiles it if it is not in the cache."""
    compiler, flags = find_compiler(), _wanted_flags()
    target = backend_tools.cache_directory("cpu_ref") / f"{MODULE}-{_key(compiler, flags)}.so"
    return backend_tools.build_once(target, lambda work: _build(compiler, flags, work))


def _sources() -> list[Path]:
    return sorted(KERNELS.glob("*.c"))


def _declarations() -> str:
    """The declarations for cffi: every *_api.h without its preprocessor lines."""
    headers = [path.read_text() for path in sorted(KERNELS.glob("*_api.h"))]
    return "\n".join(re.sub(r"(?m)^\s*#.*$", "", text) for text in headers)


def _wanted_flags() -> list[str]:
    sanitizers = os.environ.get("HAL_CPU_REF_SANITIZE", "")
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = [*_BASE_FLAGS, native]
    if "avx512f" in cpu.features():
        flags.append("-mprefer-vector-width=512")  # without this flag, compilers use 256-bit vectors
    if sanitizers:
        return [*flags, "-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    return [*flags, "-O3"]


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    import cffi

    version = backend_tools.compiler_version(list(compiler))
    digest = hashlib.sha256()
    for part in (*compiler, version, *flags, cpu.identity(), str(sysconfig.get_config_var("SOABI")), cffi.__version__):
        digest.update(part.encode() + b"\0")
    for path in sorted([*KERNELS.glob("*.c"), *KERNELS.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:24]


def _build(compiler: list[str], flags: list[str], work: Path) -> Path:
    """Compiles the module in the folder `work`; returns its path there."""
    import cffi

    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        raise BackendUnavailable(
            f"cpu_ref needs Python's C headers to compile its kernels and found no {include}/Python.h. "
            "Install them (Debian/Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)."
        )
    started = time.monotonic()
    sources = _sources()
    backend_tools.announce(
        f"compiling cpu_ref kernels ({len(sources)} files, {compiler[0]}), once for this machine ..."
    )
    ffi = cffi.FFI()
    ffi.cdef(_declarations())
    includes = "\n".join(f'#include "{path.name}"' for path in sorted(KERNELS.glob("*_api.h")))
    ffi.set_source(MODULE, f"#include <stdint.h>\n{includes}\n")
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints the name of a temporary file
        ffi.emit_c_code(str(work / f"{MODULE}.c"))
    # Not every compiler accepts -mprefer-vector-width.
    flags = [flag for flag in flags if not flag.startswith("-mprefer") or _accepts(compiler, flag, work)]

    def compile_one(source: Path) -> str:
        output = str(work / (source.stem + ".o"))
        _run([*compiler, *flags, f"-I{KERNELS}", f"-I{include}", "-c", str(source), "-o", output])
        return output

    files = [*sources, work / f"{MODULE}.c"]
    jobs = min(len(os.sched_getaffinity(0)), _JOBS)
    if jobs > 1:
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(compile_one, files))
    else:
        objects = [compile_one(file) for file in files]
    library = work / f"{MODULE}.so"
    _run([*compiler, *flags, "-shared", *objects, "-o", str(library), "-lm"])
    # Flushed before the rename; otherwise a power failure could leave a file with its final name and incomplete
    # contents.
    with open(library, "rb") as handle:
        os.fsync(handle.fileno())
    backend_tools.announce(f"compiled cpu_ref kernels in {time.monotonic() - started:.1f} s")
    return library


def _accepts(compiler: list[str], flag: str, work: Path) -> bool:
    empty = work / "empty.c"
    empty.write_text("int hal_empty;\n")
    command = [*compiler, "-Werror", flag, "-c", str(empty), "-o", str(work / "empty.o")]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    backend_tools.run_compiler(command, "cpu_ref's kernels")


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
            f"two OpenMP runtimes are loaded ({', '.join(sorted(gnu))}); their threads would compete for the cores. "
            "Import torch before any other library that brings its own libgomp."
        )
    if before and runtimes > before:  # a runtime that another library loaded earlier is idle and does no harm
        _refused[path] = (
            f"the kernels compiled by {find_compiler()[0]} load their own OpenMP runtime "
            f"({', '.join(sorted(runtimes - before))}) in addition to torch's ({', '.join(sorted(before))}); their "
            "threads would compete for the cores. Set CC to a compiler with torch's runtime: gcc for libgomp, clang "
            "for libomp."
        )
        raise BackendUnavailable(_refused[path])
    return module


def _openmp_runtimes() -> set[str]:
    """The OpenMP runtimes loaded in this process (GNU, LLVM, Intel); empty where the system does not list libraries."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if re.search(r"/lib(gomp|omp|iomp)[^/]*\.so", line)}
