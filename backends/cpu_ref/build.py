"""Compiles `kernels/*.c` into extension modules, once per machine, and loads them.

The kernels that a dense float32 model needs are one module, "core". What other runs need is compiled when it is first
called for (PARTS), so that a first run does not wait for it. The modules of parts are linked with that of the core.
A wheel may bring all of them (prebuilt.py).

Guarantees: nothing is compiled at import; the key of a cached file covers everything that determines its content
(sources, compiler, flags, CPU, Python ABI); a source file is compiled again only if it or a header that it includes has
changed; a file under its final name is always complete, even if processes crash or
build concurrently; and the modules share their OpenMP runtime with torch (which is therefore imported first).

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
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # imported before the kernels, so that both use torch's libgomp

from hal import BackendUnavailable, backend_tools

from . import cpu, openmp, prebuilt

KERNELS = Path(__file__).resolve().parent / "kernels"
MODULE = "_hal_cpu_ref"
CORE = "core"
PARTS = {
    "attention_bf16": ("flash_attention_bf16",),
    "attention_f64": ("flash_attention_f64",),
    "dtypes": ("norm_others", "activation_others", "cross_entropy_others", "softmax_others"),
    "moe": (
        *("moe_permute", "moe_router", "grouped_swiglu"),
        *("grouped_linear", "grouped_linear_f32", "grouped_linear_bf16"),
    ),
}
"""Part -> the names of its source files. All other files are the core."""
# With -std=c11 alone, a*b+c does not become an FMA; with errno and traps, sqrt and selections are not vectorised.
_BASE_FLAGS = ["-std=c11", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_JOBS = 8
"""At most this many compilers at a time; each needs up to 400 MB."""

_load_lock = threading.Lock()
_loaded: dict[str, ModuleType] = {}
"""Part -> its module."""
_refused: dict[Path, str] = {}
"""Path of a refused module -> the reason. Remembered because the libraries that it loaded stay in the process, so that
a second attempt could not detect them."""


def lib(part: str = CORE) -> Any:
    """The compiled kernels of a part (cffi `lib`); compiles them on the first use on a machine.

    Raises BackendUnavailable when there is no compiler, when it fails, or when the cache directory is not safe to use.
    """
    module = _loaded.get(part)
    if module is None:
        with _load_lock:
            for name in dict.fromkeys((CORE, part)):  # a part uses functions of the core
                if name not in _loaded:
                    _loaded[name] = _load(_name(name), ensure_built(name))
            module = _loaded[part]
    return module.lib


def lib_for(dtype: torch.dtype) -> Any:
    """The compiled kernels for tensors of a dtype, of the families that are divided by it (kernels/*_others.c)."""
    return lib() if dtype == torch.float32 else lib("dtypes")


def ffi() -> Any:
    """cffi's `ffi` of the core, for structs that are passed by address."""
    lib()
    return _loaded[CORE].ffi


def find_compiler() -> list[str]:
    """The C compiler's command: `$CC`, else gcc, clang or cc. Raises BackendUnavailable if there is none."""
    return backend_tools.find_compiler("C", "cpu_ref compiles its kernels on first use")


def ensure_built(part: str = CORE) -> Path:
    """The path of a part's module for this machine: prebuilt, or in the cache, where it is compiled if need be."""
    variant = prebuilt.variant()
    if variant is not None:
        return prebuilt.FOLDER / variant.name / f"{_name(part)}.so"
    compiler, flags = find_compiler(), _wanted_flags()
    files = [*KERNELS.glob("*.c"), *KERNELS.glob("*.h")] if part == CORE else _sources(part)
    # The name of a part's module includes the core's key, because it is linked with this one core: the one that this
    # process uses, which is not always that of the present cache directory.
    core = None if part == CORE else _loaded_core() or ensure_built()
    runtime = openmp.renamed()
    linked = [Path(path).name for path in (core, runtime) if path is not None]
    key = _key(compiler, [*flags, *linked], [*files, Path(__file__)])
    # A part looks for the core in its own folder.
    folder = backend_tools.cache_directory("cpu_ref") if core is None else core.parent
    target = folder / f"{_name(part)}-{key}.so"
    return backend_tools.build_once(target, lambda work: _build(part, core, compiler, flags, work, runtime))


def _loaded_core() -> Path | None:
    """The path of the core that this process uses; None before its first use."""
    module = _loaded.get(CORE)
    return None if module is None or module.__file__ is None else Path(module.__file__)


def _name(part: str) -> str:
    return MODULE if part == CORE else f"{MODULE}_{part}"


def _sources(part: str) -> list[Path]:
    elsewhere = {stem for stems in PARTS.values() for stem in stems}
    return sorted(
        path
        for path in KERNELS.glob("*.c")
        if (path.stem not in elsewhere if part == CORE else path.stem in PARTS[part])
    )


def _headers(part: str) -> list[Path]:
    """The headers that declare a part's functions: <family>_api.h of its source files."""
    paths = (KERNELS / f"{source.stem.removesuffix('_others')}_api.h" for source in _sources(part))
    return [path for path in paths if path.exists()]


def _declarations(part: str) -> str:
    """The declarations for cffi: a part's headers without their preprocessor lines."""
    return "\n".join(re.sub(r"(?m)^\s*#.*$", "", path.read_text()) for path in _headers(part))


def build_variant(variant: prebuilt.Variant, compiler: list[str], folder: Path) -> None:
    """Compiles the modules of all parts for a variant into `folder`, which is to be its folder in prebuilt.FOLDER."""
    flags = [*_BASE_FLAGS, "-O3", *variant.flags]
    if "avx512f" in variant.features:
        flags.append("-mprefer-vector-width=512")
    core = None
    for part in (CORE, *PARTS):
        work = folder / "work"
        work.mkdir(parents=True)
        target = folder / f"{_name(part)}.so"
        _build(part, core, compiler, flags, work).rename(target)
        shutil.rmtree(work)
        core = core or target


def _wanted_flags() -> list[str]:
    sanitizers = os.environ.get("HAL_CPU_REF_SANITIZE", "")
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = [*_BASE_FLAGS, native]
    if "avx512f" in cpu.features():
        flags.append("-mprefer-vector-width=512")  # without this flag, compilers use 256-bit vectors
    if "amx_bf16" in cpu.features():
        flags.append("-DHAL_AMX")  # that compilers know AMX does not mean that the system permits it
    if cpu.vendor() == "GenuineIntel":
        # Measured on a Xeon with 2 MiB of L2. Norms of 3 MiB are 1.15 to 1.2 times as fast when their results are
        # streamed, and, forward, 1.06 to 1.16 times when short rows are prefetched; rows of 16 KiB are slower then.
        flags += [f"-DHAL_STREAM_MIN={2 << 20}", f"-DHAL_FETCHED_ROW={4 << 10}"]
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


def _build(
    part: str, core: Path | None, compiler: list[str], flags: list[str], work: Path, runtime: str | None = None
) -> Path:
    """Compiles a part's module in the folder `work`, linked with that of the core; returns its path there.

    runtime: the OpenMP runtime to link with instead of the compiler's.
    """
    import cffi

    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        raise BackendUnavailable(
            f"cpu_ref needs Python's C headers to compile its kernels and found no {include}/Python.h. "
            "Install them (Debian/Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)."
        )
    started = time.monotonic()
    ffi = cffi.FFI()
    name = _name(part)
    ffi.cdef(_declarations(part))
    includes = "\n".join(f'#include "{path.name}"' for path in _headers(part))
    ffi.set_source(name, f"#include <stdint.h>\n{includes}\n")
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints the name of a temporary file
        ffi.emit_c_code(str(work / f"{name}.c"))
    # Not every compiler accepts -mprefer-vector-width.
    flags = [flag for flag in flags if not flag.startswith("-mprefer") or _accepts(compiler, flag, work)]

    stored = backend_tools.cache_directory("cpu_ref") / "objects"
    stored.mkdir(mode=0o700, exist_ok=True)

    def compile_one(source: Path) -> Path:
        compiled = work / (source.stem + ".o")
        _run([*compiler, *flags, f"-I{KERNELS}", f"-I{include}", "-c", str(source), "-o", str(compiled)])
        return compiled

    objects = {source: stored / f"{source.stem}-{_key(compiler, flags, [source])}.o" for source in _sources(part)}
    stale = [source for source, target in objects.items() if not backend_tools.intact(target)]
    backend_tools.announce(
        f"compiling cpu_ref kernels, {part} ({len(stale)} of {len(objects)} files, {compiler[0]}), once for this "
        "machine ..."
    )
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _JOBS)) as pool:
        glue = pool.submit(compile_one, work / f"{name}.c")
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
    library = work / f"{name}.so"
    inputs = [str(path) for path in (glue.result(), *objects.values())]
    # The core is found beside the part, also in a cache that was moved.
    linked = [] if core is None else [f"-L{core.parent}", f"-l:{core.name}", "-Wl,-rpath,$ORIGIN"]
    if runtime is not None:
        flags = [flag for flag in flags if flag != "-fopenmp"]  # it would link the compiler's runtime, too
        linked.append(runtime)
    _run([*compiler, *flags, "-shared", *inputs, "-o", str(library), *linked, "-lm"])
    # Flushed before the rename; otherwise a power failure could leave a file with its final name and incomplete
    # contents.
    with open(library, "rb") as handle:
        os.fsync(handle.fileno())
    backend_tools.announce(f"compiled cpu_ref kernels, {part}, in {time.monotonic() - started:.1f} s")
    return library


def _accepts(compiler: list[str], flag: str, work: Path) -> bool:
    empty = work / "empty.c"
    empty.write_text("int hal_empty;\n")
    command = [*compiler, "-Werror", flag, "-c", str(empty), "-o", str(work / "empty.o")]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    backend_tools.run_compiler(command, "cpu_ref's kernels")


def _load(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    if path in _refused:
        raise BackendUnavailable(_refused[path])
    before = openmp.runtimes()
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    runtimes = openmp.runtimes()
    gnu = {runtime for runtime in runtimes if "/libgomp" in runtime}
    if len(gnu) > 1:
        raise BackendUnavailable(
            f"two OpenMP runtimes are loaded ({', '.join(sorted(gnu))}); their threads would compete for the cores. "
            "Import torch before any other library that brings its own libgomp."
        )
    origin = "" if prebuilt.FOLDER in path.parents else f" (compiled by {find_compiler()[0]})"
    if before and runtimes > before:  # a runtime that another library loaded earlier is idle and does no harm
        _refused[path] = (
            f"the kernels {path}{origin} load their own OpenMP runtime "
            f"({', '.join(sorted(runtimes - before))}) in addition to torch's ({', '.join(sorted(before))}); their "
            "threads would compete for the cores. Set CC to a compiler with torch's runtime: gcc for libgomp, clang "
            "for libomp."
        )
        raise BackendUnavailable(_refused[path])
    return module
