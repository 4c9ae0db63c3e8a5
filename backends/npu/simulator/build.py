"""Compiles the simulated libraries into the HAL cache, once per machine, and says where they are.

Guarantees: nothing is compiled at import; the directory is found by a key over everything that determines its content
(sources, compiler, flags, torch and torch_npu versions); a directory under its final name is complete, whatever crashed
or ran at the same time. Needs a C++17 compiler, torch's headers and the acl headers that the torch_npu wheel brings.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hal import BackendUnavailable

from .generate import TABLE, generate

SOURCES = Path(__file__).resolve().parent / "src"
LIBRARIES = {
    "ascendcl": ("runtime", "streams", "ascendcl", "refused"),
    "opapi": ("opapi", "kernels", "attention", "rules", "aclop", "operators"),  # operators is generated from the table
    "hccl": ("hccl", "shared_memory"),
    "acl_op_compiler": (),
    "ge_runner": (),
    "graph": (),
    "acl_tdt_channel": (),
}
"""Library -> its translation units. The empty ones answer for libascendcl, which holds what is looked up in them."""

_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-fvisibility=default"]
_JOBS = 2


def find_compiler() -> list[str]:
    """The C++ compiler's command: `$CXX`, else g++, clang++ or c++. Raises BackendUnavailable if there is none."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    tried = asked[0] if asked else "g++, clang++, c++"
    raise BackendUnavailable(
        f"the NPU simulator needs a C++ compiler and found none (tried {tried}). Install one (Debian/Ubuntu: "
        "apt install g++; Fedora: dnf install gcc-c++) or set CXX."
    )


def acl_headers() -> Path:
    """The acl and hccl headers inside the torch_npu wheel. Raises BackendUnavailable if they are not there."""
    spec = importlib.util.find_spec("torch_npu")
    root = Path(spec.origin).parent / "include" / "third_party" if spec and spec.origin else None
    if root is None or not (root / "acl" / "inc" / "acl" / "acl.h").exists():
        raise BackendUnavailable("the NPU simulator needs the headers of the torch-npu wheel: pip install torch-npu")
    return root


def cache_directory() -> Path:
    """`$HAL_CACHE_DIR`, else `$XDG_CACHE_HOME/hal`, else `~/.cache/hal`, + /npu_simulator; mode 0700.

    Raises BackendUnavailable for a directory that another user could have written to: loading from it would run
    their code.
    """
    asked = os.environ.get("HAL_CACHE_DIR")
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hal"
    hint = "Set HAL_CACHE_DIR to a directory that only you can write to."
    for directory in (base, base / "npu_simulator"):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = directory.stat()
        except OSError as error:
            raise BackendUnavailable(f"cannot use the cache directory {directory}: {error}. {hint}") from error
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise BackendUnavailable(f"the cache directory {directory} can be written by others. {hint}")
    return base / "npu_simulator"


def ensure_built() -> Path:
    """The directory that holds every library of LIBRARIES; compiles them if the cache does not have them."""
    compiler, headers = find_compiler(), acl_headers()
    cache = cache_directory()
    target = cache / _key(compiler)
    if not target.exists():
        with _locked(cache / "lock"):
            if not target.exists():  # another process may have built it while this one waited
                for leftover in cache.glob("build-*"):  # of a crash: only the holder of the lock builds
                    shutil.rmtree(leftover, ignore_errors=True)
                _build(compiler, headers, target, cache / f"build-{target.name}")
    return target


def _key(compiler: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], check=False, capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for part in (*compiler, version, *_FLAGS, torch.__version__, importlib.metadata.version("torch_npu")):
        digest.update(part.encode() + b"\0")
    for path in (*sorted(SOURCES.iterdir()), TABLE, TABLE.with_name("generate.py"), Path(__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel when the holder dies
        yield


def _build(compiler: list[str], headers: Path, target: Path, work: Path) -> None:
    started = time.monotonic()
    units = [unit for sources in LIBRARIES.values() for unit in sources]
    _say(f"compiling the NPU simulator ({len(units)} files, {compiler[0]}), once for this machine ...")
    root = Path(torch.__file__).parent
    includes = [f"-I{SOURCES}", f"-I{headers / 'acl' / 'inc'}", f"-I{headers / 'hccl' / 'inc'}", f"-I{headers.parent}"]
    system = ["-isystem", str(root / "include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    work.mkdir(mode=0o700)
    try:
        (work / "operators.cpp").write_text(generate())
        (work / "empty.cpp").touch()

        def compile_one(unit: str) -> None:
            source = SOURCES / f"{unit}.cpp" if (SOURCES / f"{unit}.cpp").exists() else work / f"{unit}.cpp"
            _run([*compiler, *_FLAGS, abi, *includes, *system, "-c", str(source), "-o", str(work / f"{unit}.o")])

        with ThreadPoolExecutor(_JOBS) as pool:
            slow_first = sorted([*units, "empty"], key=lambda unit: unit != "operators")
            list(pool.map(compile_one, slow_first))
        (work / "lib").mkdir()
        for name, sources in LIBRARIES.items():
            objects = [str(work / f"{unit}.o") for unit in sources or ("empty",)]
            needs = [] if name == "ascendcl" else ["-Wl,--no-as-needed", f"-L{work / 'lib'}", "-lascendcl"]
            if name == "opapi":
                needs += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
            soname = f"-Wl,-soname,lib{name}.so"
            output = str(work / "lib" / f"lib{name}.so")
            _run([*compiler, "-shared", *objects, soname, "-Wl,-z,defs", "-o", output, *needs, "-lpthread", "-lrt"])
        os.rename(work / "lib", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"compiled the NPU simulator in {time.monotonic() - started:.0f} s")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BackendUnavailable(
            f"the C++ compiler failed (exit {done.returncode}) on the NPU simulator.\n"
            f"{shlex.join(command)}\n{done.stderr[-4000:]}"
        )


def _say(text: str) -> None:
    print(f"hal: {text}", file=sys.stderr, flush=True)
