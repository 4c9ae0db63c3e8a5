"""Compiles the simulated libraries into the HAL cache, once per machine.

Guarantees: nothing is compiled at import; the key of the directory covers everything that determines its content
(sources, compiler, flags, torch and torch_npu versions); a directory under its final name is complete, even if
processes crash or build concurrently. Needs a C++17 compiler, torch's headers and the acl headers in the torch_npu
wheel.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hal import BackendUnavailable, backend_tools

from .generate import LIMITS, TABLE, generate, generate_limits

SOURCES = Path(__file__).resolve().parent / "src"
LIBRARIES = {
    "ascendcl": ("runtime", "streams", "capture", "ascendcl", "refused"),
    "hccl": ("hccl", "shared_memory"),
    "opapi": (
        "opapi",
        "kernels",
        "moe",
        "mc2",
        "attention",
        "rules",
        "aclop",
        "operators",
    ),  # operators is generated from the table
    "hcomm": (),
    "acl_op_compiler": (),
    "ge_runner": (),
    "graph": ("graph",),
    "acl_tdt_channel": (),
}
"""Library -> its translation units. The empty libraries only depend on libascendcl, and libhcomm on libhccl, which
contain their symbols."""

_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-fvisibility=default"]
_JOBS = 2


def find_compiler() -> list[str]:
    """The C++ compiler's command: `$CXX`, else g++, clang++ or c++. Raises BackendUnavailable if there is none."""
    return backend_tools.find_compiler("C++", "the NPU simulator compiles its libraries on first use")


def acl_headers() -> Path:
    """The acl and hccl headers inside the torch_npu wheel. Raises BackendUnavailable if they are missing."""
    spec = importlib.util.find_spec("torch_npu")
    root = Path(spec.origin).parent / "include" / "third_party" if spec and spec.origin else None
    if root is None or not (root / "acl" / "inc" / "acl" / "acl.h").exists():
        raise BackendUnavailable("the NPU simulator needs the headers of the torch-npu wheel: pip install torch-npu")
    return root


def ensure_built() -> Path:
    """The directory that holds every library of LIBRARIES; compiles them if the cache does not have them."""
    compiler, headers = find_compiler(), acl_headers()
    target = backend_tools.cache_directory("npu_simulator") / _key(compiler)
    return backend_tools.build_once(target, lambda work: _build(compiler, headers, work))


def _key(compiler: list[str]) -> str:
    version = backend_tools.compiler_version(compiler)
    digest = hashlib.sha256()
    for part in (*compiler, version, *_FLAGS, torch.__version__, importlib.metadata.version("torch_npu")):
        digest.update(part.encode() + b"\0")
    for path in (*sorted(SOURCES.iterdir()), TABLE, LIMITS, TABLE.with_name("generate.py"), Path(__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _build(compiler: list[str], headers: Path, work: Path) -> Path:
    """Compiles all libraries in the folder `work`; returns the folder that holds them."""
    started = time.monotonic()
    units = [unit for sources in LIBRARIES.values() for unit in sources]
    backend_tools.announce(
        f"compiling the NPU simulator ({len(units)} files, {compiler[0]}), once for this machine ..."
    )
    root = Path(torch.__file__).parent
    includes = [
        f"-I{SOURCES}",
        f"-I{work}",
        f"-I{headers / 'acl' / 'inc'}",
        f"-I{headers / 'hccl' / 'inc'}",
        f"-I{headers.parent}",
    ]
    system = ["-isystem", str(root / "include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    (work / "operators.cpp").write_text(generate())
    (work / "constraints.h").write_text(generate_limits())
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
        if name == "hcomm":
            needs.append("-lhccl")
        if name == "opapi":
            needs += ["-lhccl", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        soname = f"-Wl,-soname,lib{name}.so"
        output = str(work / "lib" / f"lib{name}.so")
        _run([*compiler, "-shared", *objects, soname, "-Wl,-z,defs", "-o", output, *needs, "-lpthread", "-lrt"])
    backend_tools.announce(f"compiled the NPU simulator in {time.monotonic() - started:.0f} s")
    return work / "lib"


def _run(command: list[str]) -> None:
    backend_tools.run_compiler(command, "the NPU simulator")
