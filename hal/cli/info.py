"""`hal info`: the backends known here, where each comes from, what it finds on this machine, and versions.

It probes and never initialises a device; a backend that is broken shows its error and hides no other.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from hal.registry import make, names, probed

from .arguments import Parser, add_backend, options

DISTRIBUTION = "torch-hal"


def parser() -> Parser:
    """The options of `hal info`."""
    made = Parser("info", description="Backends, what each finds here, and versions. Touches no device.")
    add_backend(made, required=False, default_from_environment=False)
    return made


def main(argv: Sequence[str]) -> int:
    """Runs `hal info` with these arguments."""
    made = parser()
    arguments = made.parse_args(argv)
    chosen = [arguments.backend] if arguments.backend else list(names())
    if arguments.simulate and not arguments.backend:
        made.error("--simulate needs --backend NAME")
    for name in chosen:
        print("\n".join(_backend(name, options(arguments), strict=arguments.backend is not None)))
    print("versions")
    for package, found in _versions():
        print(f"  {package:<18}{found}")
    return 0


def _backend(name: str, given: dict[str, object], strict: bool) -> Iterator[str]:
    source = names().get(name, "unknown")
    try:
        backend = make(name, given)
        probe = probed(backend)
    except Exception as error:  # shown as this backend's state: one broken plug-in must not hide the others
        if strict:
            raise
        yield f"{name} ({source}): broken\n  {type(error).__name__}: {error}"
        return
    simulated = ", simulated" if backend.simulated else ""
    devices = _many(probe.count, "device") if probe.ok else "cannot run here"
    yield f"{name} ({source}{simulated}): {devices}\n  {probe.reason}"
    for fact, value in probe.facts.items():
        yield f"  {fact}: {value}"
    ops = sorted(backend.impls)
    count = sum(len(i) for i in backend.impls.values())
    yield f"  {_many(count, 'implementation')} of {_many(len(ops), 'op')}" if ops else "  no implementations"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _versions() -> Iterator[tuple[str, str]]:
    """HAL, Python, and every package HAL can use, as its own metadata lists them."""
    import hal

    yield DISTRIBUTION, hal.__version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"
    try:
        listed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        listed = ["torch"]
    seen = set()
    for requirement in listed:
        match = re.match(r"[A-Za-z0-9_.-]+", requirement)
        extra = re.search(r"extra\s*==\s*[\"'](\w+)", requirement)
        if match is None or match[0] in seen or (extra and extra[1] == "test"):
            continue
        seen.add(match[0])
        try:
            yield match[0], version(match[0])
        except PackageNotFoundError:
            yield match[0], f"not installed (pip install '{DISTRIBUTION}[{extra[1]}]')" if extra else "not installed"
