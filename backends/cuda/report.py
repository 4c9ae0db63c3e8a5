"""`python -m hal.backends.cuda.report`: the resources of every kernel as Markdown; exit code 1 if one spills.

Needs NVRTC (pip install cupy-cuda13x nvidia-cuda-nvrtc), no driver and no GPU. docs/cuda-kernels.md is its output.
"""

from __future__ import annotations

import sys

from . import compile


def markdown(usage: list[compile.Usage], version: str) -> str:
    """A table with one row per kernel and one cell per architecture: registers / bytes of static shared memory."""
    by_kernel: dict[str, dict[str, compile.Usage]] = {}
    for u in usage:
        by_kernel.setdefault(u.kernel, {})[u.architecture] = u
    spilled = [u for u in usage if u.spill_stores or u.spill_loads or u.stack]
    lines = [
        "# Registers and shared memory of the CUDA kernels",
        "",
        f"Made by `python -m hal.backends.cuda.report` with NVRTC {version}; not a measurement on a device. "
        "Blocks have at most 256 threads. Cells: registers per thread / bytes of static shared memory per block.",
        "",
        f"Spills and stack: {', '.join(f'{u.kernel} on {u.architecture}' for u in spilled) or 'none'}.",
        "",
        f"| kernel | {' | '.join(compile.ARCHITECTURES)} |",
        f"|---|{'---|' * len(compile.ARCHITECTURES)}",
    ]
    for kernel, by_architecture in by_kernel.items():
        cells = [f"{by_architecture[a].registers} / {by_architecture[a].shared}" for a in compile.ARCHITECTURES]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prints the report."""
    version = "{}.{}".format(*compile.nvrtc().getVersion())
    usage = compile.report()
    print(markdown(usage, version), end="")
    return 1 if any(u.spill_stores or u.spill_loads or u.stack for u in usage) else 0


if __name__ == "__main__":
    sys.exit(main())
