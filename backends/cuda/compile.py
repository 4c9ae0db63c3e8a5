"""Compiles the kernels with NVRTC, through CuPy, for one architecture; needs no driver and no GPU.

`compiled` caches cubins in the HAL cache; `report` returns ptxas's figures per kernel: registers, static shared memory,
stack and spills. The kernel files list their instantiations in EXPORT(...).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hal
from hal.backend_tools import cache_directory, intact, locked, place

KERNELS = Path(__file__).resolve().parent / "kernels"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""The architectures of the report: Ampere, Hopper, Blackwell. Others from sm_80 on are compiled on first use."""

# Without -default-device, NVRTC 13.0 treats the generic lambdas in kernels as host functions.
_FLAGS = ("-std=c++17", "-default-device", "--ptxas-options=-v", "-fmad=true")


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel on one architecture; in bytes except for registers."""

    kernel: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Compiled:
    """One kernel file compiled for one architecture: `names` maps EXPORT names to the cubin's."""

    cubin: bytes
    names: dict[str, str]
    usage: tuple[Usage, ...]


def missing() -> str:
    """The reason why the kernels cannot be compiled here ("" if they can), without importing CuPy."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (it compiles and launches the kernels): pip install cupy-cuda13x"
    return ""


def nvrtc() -> Any:
    """CuPy's NVRTC bindings. Raises BackendUnavailable if CuPy or the NVRTC library is missing."""
    if missing():
        raise hal.BackendUnavailable(missing())
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # the exception for a missing library depends on how CuPy searches for it
        raise hal.BackendUnavailable(
            f"NVRTC cannot be loaded ({type(error).__name__}: {error}); pip install nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


def sources() -> list[Path]:
    """The kernel files."""
    return sorted(KERNELS.glob("*.cu"))


def exports(source: Path) -> list[str]:
    """The kernels a file instantiates."""
    return re.findall(r"(?m)^EXPORT\((.*)\)\s*$", source.read_text())


def compile_file(source: Path, architecture: str, *, strict: bool = True) -> Compiled:
    """Compiles one file. Raises HalError with NVRTC's log; with strict also for warnings, and if `usage` is unknown.

    (Warnings are searched for in the log, because the NVRTC of CUDA 13.0, which torch ships, has no option -Werror.)
    """
    library = nvrtc()
    program = library.createProgram(
        source.read_text(), source.name, [p.read_bytes() for p in _headers()], [p.name.encode() for p in _headers()]
    )
    try:
        names = exports(source)
        for name in names:
            library.addNameExpression(program, name)
        try:
            library.compileProgram(program, (f"-arch={architecture}", *_FLAGS))
        except Exception as error:
            raise hal.HalError(
                f"NVRTC does not compile {source.name} for {architecture}:\n{library.getProgramLog(program)}"
            ) from error
        log = library.getProgramLog(program)
        if strict and re.search(r"\bwarning\b", log):
            raise hal.HalError(f"NVRTC warns about {source.name} for {architecture}:\n{log}")
        lowered = {name: library.getLoweredName(program, name) for name in names}
        usage = _usage_or_nothing(log, {v: k for k, v in lowered.items()}, architecture, strict)
        # CuPy treats the cubin as a string and drops its last byte, a zero.
        return Compiled(library.getCUBIN(program) + b"\0", lowered, usage)
    finally:
        library.destroyProgram(program)


def _headers() -> list[Path]:
    return sorted(KERNELS.glob("*.h"))


def _usage_or_nothing(log: str, names: dict[str, str], architecture: str, strict: bool) -> tuple[Usage, ...]:
    """`_usage`; without `strict`, () if parsing fails, because kernels can run without these figures."""
    try:
        return tuple(_usage(log, names, architecture))
    except hal.HalError:
        if strict:
            raise
        return ()


def _usage(log: str, names: dict[str, str], architecture: str) -> Iterator[Usage]:
    """Parses the output of `ptxas -v`. names: name in the cubin -> kernel. Raises HalError if a kernel is missing in
    it."""
    missing = set(names)
    for entry in re.split(r"Compiling entry function ", log)[1:]:
        mangled = re.match(r"'([^']+)'", entry)
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        if not (mangled and mangled[1] in names and spills and registers):
            raise hal.HalError(f"ptxas reports no registers and spills here; its log has changed:\n{entry}")
        missing.discard(mangled[1])
        shared = re.search(r"(\d+) bytes smem", entry)
        stack, stores, loads = (int(n) for n in spills.groups())
        yield Usage(
            names[mangled[1]], architecture, int(registers[1]), int(shared[1]) if shared else 0, stack, stores, loads
        )
    if missing:
        raise hal.HalError(f"ptxas reports nothing about {', '.join(sorted(missing))}; its log has changed:\n{log}")


def compiled(source: Path, architecture: str) -> Compiled:
    """`compile_file` with its result cached in the HAL cache."""
    # The key covers everything that determines the cubin and its metadata, including this file.
    digest = hashlib.sha256(repr((architecture, _FLAGS, nvrtc().getVersion(), source.name)).encode())
    for path in [source, *_headers(), Path(__file__)]:
        digest.update(path.read_bytes() + b"\0")
    cache = cache_directory("cuda")
    target = cache / f"{source.stem}-{architecture}-{digest.hexdigest()[:24]}"
    if not _is_kept(target):
        with locked(cache / f"{source.stem}-{architecture}.lock"):
            if not _is_kept(target):
                _keep(compile_file(source, architecture, strict=False), target)
    about = json.loads(target.with_suffix(".json").read_text())
    return Compiled(
        target.with_suffix(".cubin").read_bytes(), about["names"], tuple(Usage(**u) for u in about["usage"])
    )


def _keep(result: Compiled, target: Path) -> None:
    about = json.dumps({"names": result.names, "usage": [asdict(u) for u in result.usage]})
    for suffix, data in ((".cubin", result.cubin), (".json", about.encode())):
        part = target.with_suffix(f"{suffix}.part{os.getpid()}")
        part.write_bytes(data)
        place(part, target.with_suffix(suffix))


def _is_kept(target: Path) -> bool:
    return intact(target.with_suffix(".cubin")) and intact(target.with_suffix(".json"))


def cubins(architecture: str) -> dict[str, tuple[bytes, str]]:
    """Kernel name -> (cubin, the kernel's name in it), of all files."""
    result = {}
    for source in sources():
        one = compiled(source, architecture)
        result.update({name: (one.cubin, lowered) for name, lowered in one.names.items()})
    return result


def report(architectures: tuple[str, ...] = ARCHITECTURES) -> list[tuple[str, Compiled]]:
    """Every kernel file, compiled for every architecture, with the architecture. Raises HalError without ptxas's
    figures."""
    results = [(a, compiled(source, a)) for source in sources() for a in architectures]
    if not all(result.usage for _, result in results):
        raise hal.HalError("ptxas reports no registers and spills that can be read; its log has changed")
    return results
