"""Compiles HAL's AscendC kernels and what launches them into the HAL cache, once per machine.

On a device, CANN's own CMake functions build the kernels for the chip that is there. On the simulator, the same source
is compiled for the CPU with a header that stands in for AscendC (simulator/ascendc/). The launcher puts a kernel into
torch_npu's queue of operators and is the same for both.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from hal import BackendUnavailable, backend_tools

from .. import cann, environment
from ..simulator import build as simulator_build

KERNELS = Path(__file__).resolve().parent
STAND_IN = KERNELS.parent / "simulator" / "ascendc"
NAMES = ("philox", "adamw")
_SOURCES = tuple(KERNELS / f"{name}.cpp" for name in NAMES)
_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-Wall")


def launcher() -> Path:
    """The library with `hal_launch_<kernel>`. Raises BackendUnavailable."""
    compiler = backend_tools.find_compiler("C++", "the npu backend compiles its launcher on first use")
    headers = simulator_build.acl_headers()
    wheel, root = headers.parents[1], Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    includes = [f"-I{wheel / 'include'}", f"-I{headers / 'acl' / 'inc'}", f"-I{headers / 'hccl' / 'inc'}"]
    system = [x for part in ("", "torch/csrc/api/include") for x in ("-isystem", str(root / "include" / part))]
    # The libraries are loaded already, with what they need; the linker is not to look for CANN.
    libraries = [f"-L{wheel / 'lib'}", "-ltorch_npu", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    libraries.append("-Wl,--unresolved-symbols=ignore-in-shared-libs")
    command = [*compiler, *_FLAGS, "-O1", abi, *includes, *system, str(KERNELS / "launch.cpp")]
    versions = (torch.__version__, importlib.metadata.version("torch_npu"))
    return _built("launcher", (KERNELS / "launch.cpp",), (*_identity(compiler), *versions), [*command, *libraries])


def simulated() -> Path:
    """The library with `aclrtlaunch_<kernel>` for the CPU. Raises BackendUnavailable."""
    compiler = backend_tools.find_compiler("C++", "the NPU simulator compiles the kernels on first use")
    headers, root = simulator_build.acl_headers(), Path(torch.__file__).parent
    runtime = simulator_build.SOURCES
    includes = [f"-I{folder}" for folder in (STAND_IN, KERNELS, runtime, headers / "acl" / "inc")]
    # The stand-in counts on signed shifts and reads the unified buffer under several types.
    flags = (*_FLAGS, "-O2", "-ftree-vectorize", "-fno-strict-aliasing")
    command = [
        *compiler,
        *flags,
        *includes,
        "-isystem",
        str(root / "include"),
        *(str(STAND_IN / f"launch_{name}.cpp") for name in NAMES),
    ]
    sources = (*sorted(STAND_IN.iterdir()), *_SOURCES, runtime / "runtime.h")
    return _built(
        "simulated", sources, (*_identity(compiler), torch.__version__), [*command, f"-L{root / 'lib'}", "-lc10"]
    )


def for_device(chip: str) -> Path:
    """The library with `aclrtlaunch_<kernel>` for this chip ("Ascend910B3"), built by CANN.

    Raises BackendUnavailable with the reason, which is kept: a build that failed is not repeated in every process.
    """
    libraries = environment.cann_libraries()
    if libraries is None:
        raise BackendUnavailable("CANN was not found (no libascendcl.so under ASCEND_HOME_PATH or LD_LIBRARY_PATH)")
    root = Path(libraries).parent
    sources = (*_SOURCES, KERNELS / "CMakeLists.txt")
    target = _target("device", sources, (str(root), cann.release_of(libraries) or "", chip), ".so")
    failed = target.with_suffix(".failed")
    if failed.exists():
        raise BackendUnavailable(f"{failed.read_text().strip()} (delete {failed} to try again)")

    def build(work: Path) -> Path:
        backend_tools.announce(f"compiling HAL's AscendC kernels for {chip}, once for this machine ...")
        definitions = {"SOC_VERSION": chip, "ASCEND_CANN_PACKAGE_PATH": root, "RUN_MODE": "npu"}
        options = [f"-D{name}={value}" for name, value in definitions.items()]
        _run(["cmake", "-S", str(KERNELS), "-B", str(work / "build"), *options])
        _run(["cmake", "--build", str(work / "build")])
        found = sorted(work.rglob("libhal_kernels.so"))
        if not found:
            raise BackendUnavailable("CANN's build wrote no libhal_kernels.so")
        return found[0].rename(work / target.name)

    try:
        return backend_tools.build_once(target, build)
    except BackendUnavailable as error:
        failed.write_text(f"the AscendC kernels could not be built: {error}\n")
        raise


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise BackendUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        end = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise BackendUnavailable(f"{' '.join(command[:3])} failed (exit {done.returncode}): " + " | ".join(end))


def _identity(compiler: Sequence[str]) -> tuple[str, ...]:
    return (*compiler, backend_tools.compiler_version(list(compiler)))


def _target(name: str, sources: Sequence[Path], parts: Sequence[str], suffix: str) -> Path:
    """The place in the cache of what is built from these sources and whatever `parts` says."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in (*sources, Path(__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return backend_tools.cache_directory("npu_kernels") / f"{name}-{digest.hexdigest()[:24]}{suffix}"


def _built(name: str, sources: Sequence[Path], parts: Sequence[str], command: Sequence[str]) -> Path:
    target = _target(name, sources, parts, ".so")

    def build(work: Path) -> Path:
        backend_tools.announce(f"compiling the npu backend's {name} library, once for this machine ...")
        backend_tools.run_compiler([*command, "-o", str(work / target.name)], "the npu backend's kernels")
        return work / target.name

    return backend_tools.build_once(target, build)
