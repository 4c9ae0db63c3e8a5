"""`hal info`: the installed backends, where each comes from, the devices that it detects, and versions.

It probes and never initialises a device. The error of a broken backend is shown in its place, and the others follow.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from hal.core.backend import Backend
from hal.core.registry import backend_names, make, probed

from .arguments import Parser, options, parser_of_backends

DISTRIBUTION = "torch-hal"


def parser() -> Parser:
    """The options of `hal info`."""
    return parser_of_backends("info", "Backends, the devices that each detects, and versions. Touches no device.")


def main(argv: Sequence[str]) -> int:
    """Runs `hal info` with these arguments."""
    command_parser = parser()
    arguments = command_parser.parse_args(argv)
    chosen = [arguments.backend] if arguments.backend else list(backend_names())
    if arguments.simulate and not arguments.backend:
        command_parser.error("--simulate needs --backend NAME")
    for name in chosen:
        print("\n".join(_backend(name, options(arguments), strict=arguments.backend is not None)))
    print("versions")
    for package, installed in _versions():
        print(f"  {package:<18}{installed}")
    return 0


def _backend(name: str, given: dict[str, object], strict: bool) -> Iterator[str]:
    source = backend_names().get(name, "unknown")
    try:
        backend = make(name, given)
        probe = probed(backend)
    except Exception as error:  # one broken plug-in must not hide the others
        if strict:
            raise
        yield f"{name} ({source}): broken\n  {type(error).__name__}: {error}"
        return
    simulated = ", simulated" if backend.simulated else ""
    devices = _counted(probe.count, "device") if probe.ok else "cannot run here"
    yield f"{name} ({source}{simulated}): {devices}\n  {probe.reason}"
    for fact, value in probe.facts.items():
        yield f"  {fact}: {value}"
    if probe.ok:
        yield from _capabilities(backend)
    ops = sorted(backend.impls)
    count = sum(len(i) for i in backend.impls.values())
    yield f"  {_counted(count, 'implementation')} of {_counted(len(ops), 'op')}" if ops else "  no implementations"


def _capabilities(backend: Backend) -> Iterator[str]:
    """What the devices can do, apart from ops, as `Backend.capabilities` says without a device."""
    try:
        able = backend.capabilities()
    except Exception as error:
        yield f"  capabilities: {type(error).__name__}: {error}"
        return
    yield f"  tensors: {', '.join(sorted(str(d).removeprefix('torch.') for d in able.dtypes))}"
    limit = "limited by memory" if able.max_elements is None else f"at most {able.max_elements}"
    yield f"  elements of a tensor: {limit}"
    flags = {
        "asynchronous": able.asynchronous,
        "compiles per shape": able.static_shapes,
        "memory visible to the host": able.host_visible,
        "deterministic": able.deterministic,
        "graphs": able.graphs,
        "memory pools": able.memory_pools,
        "dropout in attention": able.attention_dropout,
    }
    yield "  " + ", ".join(f"{name}: {'yes' if value else 'no'}" for name, value in flags.items())


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _versions() -> Iterator[tuple[str, str]]:
    """The versions of HAL, Python, and every package in the metadata of HAL."""
    import hal

    yield DISTRIBUTION, hal.__version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"
    try:
        listed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        listed = ["torch"]
    reported = set()
    for requirement in listed:
        match = re.match(r"[A-Za-z0-9_.-]+", requirement)
        extra = re.search(r"extra\s*==\s*[\"'](\w+)", requirement)
        if match is None or match[0] in reported or (extra and extra[1] == "test"):
            continue
        reported.add(match[0])
        try:
            yield match[0], version(match[0])
        except PackageNotFoundError:
            yield match[0], f"not installed (pip install '{DISTRIBUTION}[{extra[1]}]')" if extra else "not installed"
