"""Compiles `kernels/*.c` into one extension module, once per machine, and loads it.

Guarantees: nothing is compiled at import; the key of the cached file covers everything that determines its content
(sources, compiler, flags, CPU, Python ABI); a source file is compiled again only if it or a header that it includes has
changed; a file under its final name is always complete, even if processes crash or
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
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    key = _key(compiler, flags, [*KERNELS.glob("*.c"), *KERNELS.glob("*.h"), Path(__file__)])
    target = backend_tools.cache_directory("cpu_ref") / f"{MODULE}-{key}.so"
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


def _included(source: Path) -> set[Path]:
    """A source file and the kernel files that it includes, directly or through others.

    Every kernel file whose name is quoted counts, because headers are also included through macros (HAL_SELF).
    """
    files, added = {source}, [source]
    while added:
        quoted = {KERNELS / name for name in re.findall(r'"(\w+\.[ch])"', added.pop().read_text())}
        new = {path for path in quoted - files if path.exists()}
        files |= new
        added += new
    return files


def _key(compiler: Sequence[str], flags: Sequence[str], files: Sequence[Path]) -> str:
    """A digest of everything that determines the result of compiling these files, with what they include."""
    import cffi

    version = backend_tools.compiler_version(list(compiler))
    digest = hashlib.sha256()
    for part in (*compiler, version, *flags, cpu.identity(), str(sysconfig.get_config_var("SOABI")), cffi.__version__):
        digest.update(part.encode() + b"\0")
    for path in sorted({included for file in files for included in _included(file)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
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
    ffi = cffi.FFI()
    ffi.cdef(_declarations())
    includes = "\n".join(f'#include "{path.name}"' for path in sorted(KERNELS.glob("*_api.h")))
    ffi.set_source(MODULE, f"#include <stdint.h>\n{includes}\n")
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints the name of a temporary file
        ffi.emit_c_code(str(work / f"{MODULE}.c"))
    # Not every compiler accepts -mprefer-vector-width.
    flags = [flag for flag in flags if not flag.startswith("-mprefer") or _accepts(compiler, flag, work)]

    stored = backend_tools.cache_directory("cpu_ref") / "objects"
    stored.mkdir(mode=0o700, exist_ok=True)

    def compile_one(source: Path) -> Path:
        part = work / (source.stem + ".o")
        _run([*compiler, *flags, f"-I{KERNELS}", f"-I{include}", "-c", str(source), "-o", str(part)])
        return part

    objects = {source: stored / f"{source.stem}-{_key(compiler, flags, [source])}.o" for source in _sources()}
    stale = [source for source, target in objects.items() if not backend_tools.intact(target)]
    backend_tools.announce(
        f"compiling cpu_ref kernels ({len(stale)} of {len(objects)} files, {compiler[0]}), once for this machine ..."
    )
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _JOBS)) as pool:
        glue = pool.submit(compile_one, work / f"{MODULE}.c")
        # The files that include most take longest, and no processor should be left with one of them at the end.
        pending = {
            pool.submit(compile_one, source): source
            for source in sorted(stale, key=lambda source: -sum(path.stat().st_size for path in _included(source)))
        }
        for count, done in enumerate(as_completed(pending), 1):
            backend_tools.place(done.result(), objects[pending[done]])
            seconds = time.monotonic() - started
            text = f"compiled {count} of {len(stale)} files: {pending[done].name} ({seconds:.0f} s)"
            backend_tools.announce(text, step=True)
    library = work / f"{MODULE}.so"
    parts = [glue.result(), *objects.values()]
    _run([*compiler, *flags, "-shared", *map(str, parts), "-o", str(library), "-lm"])
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
