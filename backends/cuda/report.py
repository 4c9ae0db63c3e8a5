"""`python -m hal.backends.cuda.report`: the resources of every kernel as Markdown; exit code 1 if one spills.

Needs NVRTC (pip install cupy-cuda13x nvidia-cuda-nvrtc), no driver and no GPU. docs/cuda-kernels.md is its output.
"""

from __future__ import annotations

import sys

from . import compile, machine_code

ATTENTION = """\
## The rate of attention with dropout

An estimate from the machine code, not a measurement. Of a forward tile of 16 queries, 32 keys and 128 channels in 16
bits (0.26 million floating-point operations), a warp executes about 830 instructions with dropout and 560 without: 64
`mma.sync` (which take about 410 cycles of one of an H100's four tensor cores, and 512 of an A100's), 40 `ldmatrix`,
115 for its copies of the next tile, and 270 for four Philox blocks. A scheduler issues one instruction per cycle, and
has three warps. If it issues in half to three quarters of the cycles, that makes 140 to 210 TFLOP/s with dropout on an
H100, 14 to 21 % of its peak, and 90 to 140 on an A100. Kernels without dropout (FlashAttention-3, cuDNN) reach 60 to
75 % on an H100. The unfused path that this replaces is bound by float32 products (67 TFLOP/s at most) and writes or
reads scores six times. Backward has seven products where forward has two, so it takes about three and a half times as
long as forward.

[An H100](verified/cuda-nvidia-h100-80gb-hbm3.md) has reached 145 to 173 TFLOP/s forward (1,024 to 16,384 tokens, 128
channels), and took 3.2 times as long backward. FlashAttention-2 in torch, which draws dropout bits of its own, is 1.5
to 1.6 times as fast forward, and 1.3 to 1.8 times in both passes together.
"""


RATES = """\
## The rates of the other kernels

An estimate from the machine code, not a measurement. The kernels of a training step in bfloat16 are meant to run at the
rate of a copy, which is taken as 90 % of the memory's bandwidth. Two things can keep them from it. A multiprocessor
issues four instructions per cycle, which gives a budget of instructions for the bytes of 8 elements. And with a latency
of 700 ns, so many bytes of loads must be under way in a multiprocessor: {bytes}.

Cells: instructions per 8 elements, as a share of the budget; 16-byte loads in flight per thread; and the share of a
copy's rate that both limits allow, if schedulers issue in 80 % of the cycles and as many blocks of 256 threads are
resident as registers allow. Instructions are those of whole loops, with all branches taken. Barriers between two passes
over a row, the ends of rows, and the instructions outside of loops are not counted, so that norms and softmax will stay
below their cells. (The loops of `norm_fwd_held` and `norm_bwd_held` are over rows, so that all of a row is counted.)
`tests/backends/cuda/test_cuda_machine_code.py` holds the budget on sm_80 and sm_90, and four loads on all three.

[An H100](verified/cuda-nvidia-h100-80gb-hbm3.md) has reached 97 to 98 % of the rate of a copy in the forward passes of
norms on large tensors, and 88 to 95 % in those of activations, dropout, bias_dropout_add, rotary and cross_entropy;
with the backward pass, 89 to 95 % for norms, activations, dropout and cross_entropy. scale_mask_softmax reaches 78 %
(84 % with its backward pass), bias_dropout_add 82 % with its backward pass, l2norm 87 %, and AdamW and
unscale_and_check 93 to 95 %. Norms of 64 rows take 2.2 to 2.6 us, of which most is the launch.

"""


def _rate(streaming: machine_code.Streaming, usage: compile.Usage, found: machine_code.Cost) -> str:
    balance = machine_code.BALANCE[usage.architecture]
    issue = found.instructions / (balance.budget * streaming.bytes)
    # 65,536 registers, allocated in units of 8 per thread; 2,048 threads.
    threads = min(8, 65536 // (-(-usage.registers // 8) * 8 * 256)) * 256
    flight = threads * found.in_flight * 16 / balance.in_flight
    return f"{found.instructions:.0f}, {issue:.0%}; {found.in_flight}; {min(1.0, 0.8 / issue, flight):.0%}"


def rates(results: list[tuple[str, compile.Compiled]]) -> str:
    """The table of estimated rates, one row per kernel of machine_code.STREAMING."""
    balances = machine_code.BALANCE.items()
    under_way = ", ".join(f"{b.in_flight / 1024:.0f} KiB ({b.name})" for _, b in balances)
    names = [f"{b.name} ({a})" for a, b in balances]
    lines = [f"| kernel | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for streaming in machine_code.STREAMING:
        cells = []
        for architecture in machine_code.BALANCE:
            result = next(r for a, r in results if a == architecture and streaming.kernel in r.names)
            usage = next(u for u in result.usage if u.kernel == streaming.kernel)
            name = result.names[streaming.kernel]
            cells.append(_rate(streaming, usage, machine_code.cost(streaming, result.cubin, name, architecture)))
        lines.append(f"| `{streaming.kernel}` | {' | '.join(cells)} |")
    return RATES.format(bytes=under_way) + "\n".join(lines) + "\n"


def markdown(results: list[tuple[str, compile.Compiled]], version: str) -> str:
    """A table with one row per kernel and one cell per architecture: registers / bytes of static shared memory; and the
    estimates of rates."""
    usage = [u for _, result in results for u in result.usage]
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
    return "\n".join(lines) + "\n\n" + ATTENTION + "\n" + rates(results)


def main() -> int:
    """Prints the report."""
    version = "{}.{}".format(*compile.nvrtc().getVersion())
    results = compile.report()
    print(markdown(results, version), end="")
    return 1 if any(u.spill_stores or u.spill_loads or u.stack for _, result in results for u in result.usage) else 0


if __name__ == "__main__":
    sys.exit(main())
