"""Kernels keep their accumulators in registers. This is checked in the machine code with objdump, not by timing.

Two kinds of innermost loops are checked. The loop of a matrix product (gemm.h) only loads, so a vector register that it
writes to memory, at any address, is a spilled accumulator. The loop of attention's exponentials writes its results, but
must not access vectors on the stack. The accumulators of a full block are counted: 24 with 32 registers, 12 with 16.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hal.backends.cpu_ref import build, cpu

PRODUCT = re.compile(r"(multiply_rows|add_rows|multiply_columns|tile_fused|stripes?|block|(\w+_)?tile|narrow_rows)\b")
EXPONENTIALS = re.compile(r"(forward|backward)_(piece|keys)\b|decode_\w+|(softmax|gradient)_columns\b|exponentiate")
MULTIPLY_ADD = re.compile(r"vf(?:n?)m(?:add|sub)\d+(p[sd])|vdpbf16(ps)")
AVX2 = ["-march=haswell", "-mtune=generic"]


@pytest.fixture(autouse=True)
def _readable() -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"reads x86-64 instructions; this is {platform.machine()}")
    if os.environ.get("HAL_CPU_REF_SANITIZE"):
        pytest.skip("reads optimised code; HAL_CPU_REF_SANITIZE is set")
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed (Debian/Ubuntu: apt install binutils)")


@dataclass(frozen=True)
class Loop:
    """An innermost loop. stack: the registers through which its function addresses its stack frame."""

    function: str
    stack: tuple[str, ...]
    instructions: tuple[tuple[str, str], ...]  # mnemonic, operands in AT&T's order: the destination is the last

    @property
    def multiply_adds(self) -> list[tuple[str, str]]:
        return [(op, args) for op, args in self.instructions if MULTIPLY_ADD.match(op)]

    @property
    def sums(self) -> set[str]:
        """The registers that multiply-adds accumulate into."""
        return {args.rpartition(",")[2].split("{")[0] for _, args in self.multiply_adds}

    @property
    def kind(self) -> str:
        """f32, f64 or bf16."""
        op = self.multiply_adds[0][0]
        return "bf16" if op.startswith("vdp") else "f64" if op.endswith("pd") else "f32"

    @property
    def stored(self) -> list[str]:
        """Vector registers written to memory."""
        return [args for op, args in self.instructions if op.startswith("v") and args.endswith(")")]

    @property
    def on_stack(self) -> list[str]:
        """Instructions with a vector register and an address in the stack frame."""
        frame = "|".join(f"%{r}" for r in self.stack)
        return [f"{op} {args}" for op, args in self.instructions if "mm" in args and re.search(rf"\(({frame})\b", args)]

    def __str__(self) -> str:
        lines = "\n".join(f"  {op} {args}" for op, args in self.instructions)
        return f"{self.function}, {len(self.multiply_adds)} multiply-adds:\n{lines}"


def innermost_loops(binary: Path) -> Iterator[Loop]:
    """All loops of at least four multiply-adds that contain no other loop."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(binary)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    parts = re.split(r"(?m)^[0-9a-f]+ <(.+)>:$", listing.stdout)
    for name, body in zip(parts[1::2], parts[2::2]):
        matches = re.findall(r"(?m)^\s*([0-9a-f]+):\t(\S+)[ \t]*([^#<\n]*)", body)
        code = [(op, args.strip()) for _, op, args in matches]
        if sum(MULTIPLY_ADD.match(op) is not None for op, _ in code) < 4:
            continue
        stack = ("rsp", "rbp") if ("mov", "%rsp,%rbp") in code else ("rsp",)
        for inner in cycles(successors([int(address, 16) for address, *_ in matches], code)):
            loop = Loop(name, stack, tuple(code[i] for i in sorted(inner)))
            if len(loop.multiply_adds) >= 4:
                yield loop


def successors(addresses: list[int], code: list[tuple[str, str]]) -> dict[int, list[int]]:
    """The instructions that may follow each one, by their positions in the code of a function.

    The targets of indirect jumps are not known; they lead to the cases of a switch, not to the head of a loop.
    """
    at = {address: i for i, address in enumerate(addresses)}
    after: dict[int, list[int]] = {}
    for i, (op, args) in enumerate(code):
        next_one = [] if op.startswith(("jmp", "ret")) or i + 1 == len(code) else [i + 1]
        target = at.get(int(args, 16)) if op[0] == "j" and args.isalnum() else None
        after[i] = next_one if target is None else [*next_one, target]
    return after


def cycles(after: dict[int, list[int]]) -> Iterator[set[int]]:
    """The innermost loops of a graph: strongly connected parts that have no cycle left without their first node.

    A range of addresses would not do: compilers place code between a loop's first and last instruction that does not
    belong to it, and jump backwards to code that is executed once.
    """
    for part in connected(after):
        entered = {b for a, following in after.items() if a not in part for b in following if b in part}
        head = min(entered or part)
        inner = list(cycles({a: [b for b in after[a] if b in part and b != head] for a in part if a != head}))
        yield from inner or [part]


def connected(after: dict[int, list[int]]) -> list[set[int]]:
    """The sets of nodes that reach one another, each with at least one edge inside (Kosaraju's algorithm)."""
    before: dict[int, list[int]] = {a: [] for a in after}
    for a, following in after.items():
        for b in following:
            before[b].append(a)
    order: list[int] = []
    visit(after, after, set(), order)
    seen: set[int] = set()
    parts = []
    for a in reversed(order):
        part: list[int] = []
        visit([a], before, seen, part)
        if len(part) > 1 or (a in after[a] and part):
            parts.append(set(part))
    return parts


def visit(starts: Iterable[int], edges: dict[int, list[int]], seen: set[int], order: list[int]) -> None:
    """Depth-first search: appends every node that is reached to `order` after those that are reached from it."""
    for start in starts:
        path = [] if start in seen else [(start, iter(edges[start]))]
        seen.add(start)
        while path:
            following = next((b for b in path[-1][1] if b not in seen), None)
            if following is None:
                order.append(path.pop()[0])
            else:
                seen.add(following)
                path.append((following, iter(edges[following])))


def faults(loops: list[Loop], full: int) -> list[str]:
    """The errors in the products among `loops`, of which the largest blocks have `full` sums."""
    products = [loop for loop in loops if PRODUCT.match(loop.function)]
    messages = [f"sums are written to memory in {loop}" for loop in products if loop.stored]
    for kind in sorted({loop.kind for loop in products}) or ["any"]:
        blocks = [loop for loop in products if loop.kind in (kind, "any") and len(loop.sums) >= full]
        if not blocks:
            messages.append(f"{kind}: no block of {full} sums in registers")
        for loop in blocks:
            if len(loop.instructions) > 2 * len(loop.multiply_adds):
                messages.append(f"{len(loop.instructions)} instructions are too many in {loop}")
    return messages


def compiled(source: str, folder: Path, *flags: str, kernels: Path = build.KERNELS) -> list[Loop]:
    """The loops of one kernel file, compiled as by the backend, except for `flags`."""
    build_flags = [f for f in build._wanted_flags() if not (flags and f.startswith(("-march", "-mprefer")))]
    target = folder / "kernel.o"
    command = [*build.find_compiler(), *build_flags, *flags, "-c", str(kernels / source), "-o", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(innermost_loops(target))


def registers() -> int:
    """Sums of a full block on this processor. Skips where there are no multiply-adds to look for."""
    if not {"avx2", "fma"} <= cpu.features():
        pytest.skip("looks for fused multiply-adds; this processor has none")
    return 24 if {"avx512f", "avx512bw", "avx512dq"} <= cpu.features() else 12


@pytest.mark.slow
def test_the_kernels_in_use_keep_their_sums_in_registers() -> None:
    full = registers()
    loops = [loop for part in (build.CORE, *build.PARTS) for loop in innermost_loops(build.ensure_built(part))]
    messages = faults(loops, full)
    assert not messages, "\n".join(messages)
    products = [loop for loop in loops if PRODUCT.match(loop.function) and len(loop.sums) >= full]
    kinds = {"f32", "f64"} | ({"bf16"} if {"avx512f", "avx512_bf16"} <= cpu.features() else set())
    assert {loop.kind for loop in products} == kinds
    functions = {"tile", "multiply_rows", "add_rows", "multiply_columns"} | ({"tile_fused"} if full == 24 else set())
    assert functions <= {p.function.split(".")[0] for p in products}


def exponential_faults(loops: list[Loop]) -> list[str]:
    """The errors in attention's exponentials, four keys at a time with five or more multiply-adds each."""
    # float64 calls the C library's exp2 one lane at a time: no register survives a call.
    ours = [x for x in loops if EXPONENTIALS.match(x.function) and not any(op == "call" for op, _ in x.instructions)]
    messages = [f"{loop.on_stack} in {loop}" for loop in ours if loop.on_stack]
    whole = {loop.function.split(".")[0] for loop in ours if len(loop.multiply_adds) >= 20}
    return (
        messages if len(whole) >= 2 else [*messages, f"no loop over four keys, forward and backward, only in {whole}"]
    )


def test_attentions_exponentials_touch_no_vector_on_the_stack() -> None:
    if registers() < 24:
        pytest.skip("with 16 registers the polynomial's constants are read from memory")
    parts = (build.CORE, "attention_bf16", "attention_f64")
    messages = exponential_faults([loop for part in parts for loop in innermost_loops(build.ensure_built(part))])
    assert not messages, "\n".join(messages)


@pytest.mark.slow
def test_a_spill_planted_in_the_exponentials_is_found(tmp_path: Path) -> None:
    if registers() < 24:
        pytest.skip("with 16 registers the polynomial's constants are read from memory")
    kernels = tmp_path / "kernels"
    shutil.copytree(build.KERNELS, kernels)
    text = (kernels / "flash_attention_forward.h").read_text()
    assert text.count("vec p[4];") == 1
    (kernels / "flash_attention_forward.h").write_text(text.replace("vec p[4];", "volatile vec p[4];"))
    messages = exponential_faults(compiled("flash_attention_f32.c", tmp_path, kernels=kernels))
    assert any("(%rsp)" in fault or "(%rbp)" in fault for fault in messages)


def test_linear_compiled_for_avx2_keeps_its_sums_in_registers(tmp_path: Path) -> None:
    messages = faults(compiled("linear_f32.c", tmp_path, *AVX2), 12)
    assert not messages, "\n".join(messages)


@pytest.mark.parametrize(
    "kind", [pytest.param("f32", marks=pytest.mark.slow), pytest.param("f64", marks=pytest.mark.nightly)]
)
def test_attention_compiled_for_avx2_keeps_its_sums_in_registers(kind: str, tmp_path: Path) -> None:
    messages = faults(compiled(f"flash_attention_{kind}.c", tmp_path, *AVX2), 12)
    assert not messages, "\n".join(messages)


# Replacements in gemm.h for the declarations of a block's sums and of a step's operands, and the error then reported.
SUMS, OPERANDS = "vec acc[8][4];", "uvec bj[4];"
PLANTED = {
    "a bound that the compiler does not know": (f"volatile int n = mr; mr = n; {SUMS}", OPERANDS, "written to memory"),
    "sums of variable extent": ("volatile int n = nv; nv = n; vec acc[mr][nv];", OPERANDS, "written to memory"),
    "more sums than registers": ("nv = nv == 3 ? 5 : nv; vec acc[8][5];", "uvec bj[5];", "written to memory"),
    "other work between the products": (SUMS, f"volatile int n = 0;{' n++;' * 30} {OPERANDS}", "too many"),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize(
    "target",
    [pytest.param("this processor", marks=pytest.mark.slow), pytest.param("AVX2", marks=pytest.mark.nightly)],
)
def test_a_planted_spill_is_found(fault: str, target: str, tmp_path: Path) -> None:
    full, flags = (registers(), []) if target == "this processor" else (12, AVX2)
    kernels = tmp_path / "kernels"
    shutil.copytree(build.KERNELS, kernels)
    text, (sums, operands, message) = (kernels / "gemm.h").read_text(), PLANTED[fault]
    for old, new in ((SUMS, sums), (OPERANDS, operands)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (kernels / "gemm.h").write_text(text)
    assert message in "\n".join(faults(compiled("linear_f32.c", tmp_path, *flags, kernels=kernels), full))


def test_the_loop_is_found_that_other_code_lies_within() -> None:
    """0 enters at 3; 1 and 2 are a loop's exit, 3 to 5 the loop; 6 jumps back to 1, 7 and 8 are a loop of one."""
    after = {0: [3], 1: [2], 2: [7], 3: [4], 4: [5, 1], 5: [3, 6], 6: [1], 7: [8], 8: [8, 9], 9: [7, 10], 10: []}
    assert sorted(map(sorted, cycles(after))) == [[3, 4, 5], [8]]


def test_a_file_without_products_is_no_proof() -> None:
    """If no loop is recognised in the code, the check must fail instead of reporting no errors."""
    assert faults([], 24) == ["any: no block of 24 sums in registers"]
