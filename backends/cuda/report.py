"""`python -m hal.backends.cuda.report`: the resources of every kernel as Markdown; exit code 1 if one spills.

Needs NVRTC (pip install cupy-cuda13x nvidia-cuda-nvrtc), no driver and no GPU. docs/cuda-kernels.md is its output.
"""

from __future__ import annotations

import sys

from . import compile

ATTENTION = """\
## The rate of attention with dropout

An estimate, not a measurement. A forward tile of 64 queries, 32 keys and 64 channels in 16 bits is 0.52 million
floating-point operations, in 128 `mma.sync` (about 200 cycles of an H100's tensor cores, 256 of an A100's). Its
fragments take about 580 loads of 128 bytes from shared memory, one per cycle, and scores pass through shared memory
once more (about 250 cycles). Dropout draws 512 Philox blocks of about 100 integer instructions, at 64 per cycle: 800
cycles. These overlap only between the blocks of a multiprocessor, so that a tile takes 1,200 to 1,900 cycles with
dropout and 800 to 1,000 without: 60 to 100 TFLOP/s with dropout on an H100, 7 to 10 % of its peak, and 40 to 65 on an
A100. Kernels without dropout (FlashAttention-3, cuDNN) reach 60 to 75 % on an H100. The unfused path that this
replaces is bound by float32 products (67 TFLOP/s at most) and writes or reads scores six times. Backward has seven
products in place of five, so it takes about three and a half times as long as forward.
"""


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
    return "\n".join(lines) + "\n\n" + ATTENTION


def main() -> int:
    """Prints the report."""
    version = "{}.{}".format(*compile.nvrtc().getVersion())
    usage = compile.report()
    print(markdown(usage, version), end="")
    return 1 if any(u.spill_stores or u.spill_loads or u.stack for u in usage) else 0


if __name__ == "__main__":
    sys.exit(main())
