"""HAL's AscendC kernel, run by the simulator from its source: bit-equal draws and dropout, in one device operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import run

import pytest
import torch

import hal
from hal import Rng, ops
from hal.backends.npu import Npu, kernels, simulator
from hal.backends.npu.kernels import compile_kernels

DRAWS = [
    ((), Rng(2)),
    ((7,), Rng(3, 2**32 - 1)),  # the counter carries into its high word
    ((5, 7), Rng(2**64 - 1, 2**64 - 2)),  # the counter wraps
    ((2, 4099), Rng(4)),  # one row of several tiles
    ((5, 5), Rng(7, 11).block((9, 13), (4, 6))),  # rows that begin within a counter
    ((2, 3, 4, 2050), Rng(9).block((4, 6, 9, 4001), (1, 2, 3, 5))),
    ((2, 2, 3, 8), Rng(9).block((2, 5, 3, 8), (0, 1, 0, 0))),  # rows that are one in memory
]


@pytest.mark.parametrize("shape, rng", DRAWS)
def test_a_draw_is_the_definitions(npu: Npu, shape: tuple[int, ...], rng: Rng) -> None:
    assert hal.why(ops.philox_uniform, shape, rng).chosen == "npu/philox"
    expected = ops.philox_uniform.reference(shape, rng, device=torch.device("cpu"))
    assert torch.equal(ops.philox_uniform(shape, rng).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dropout_is_the_references_bit_for_bit(npu: Npu, dtype: torch.dtype) -> None:
    x = torch.randn(37, 129, dtype=dtype).t()
    x[3, 5], x[4, 6] = float("inf"), float("nan")
    rng = Rng(5).block((200, 40), (3, 1))
    got, expected = ops.dropout(x.npu(), 0.3, rng).cpu(), ops.dropout.reference(x, 0.3, rng)
    assert torch.equal(got.nan_to_num(), expected.nan_to_num()) and torch.equal(got.isnan(), expected.isnan())


def test_dropout_is_one_operation_on_the_device(npu: Npu, machine: simulator.Simulator) -> None:
    x = torch.ones(64, 1024, dtype=torch.bfloat16).npu()
    before = machine.counters()
    ops.dropout(x, 0.1, Rng(1))
    torch.npu.synchronize()
    made = {name: n - before[name] for name, n in machine.counters().items()}
    assert made["operators"] == 1 and made["device_to_host"] == made["host_to_device"] == 0, made


def test_without_the_kernel_operators_drop(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose CANN cannot build it."""
    monkeypatch.setattr(kernels, "_missing", "cmake cannot be run")
    x = torch.randn(6, 10)
    why = hal.why(ops.dropout, x.npu(), 0.5, Rng(1))
    assert why.chosen == "npu/torch" and "cmake cannot be run" in str(why)
    assert torch.equal(ops.dropout(x.npu(), 0.5, Rng(1)).cpu(), ops.dropout.reference(x, 0.5, Rng(1)))


PLANTED: list[tuple[str, Callable[[str], str], str]] = [
    (
        "a missing barrier",
        lambda text: text.replace(
            "    for (int32_t t : kTimes) Add(At(t + 2), At(t + 2), At(t + 10), n);\n", "", 1
        ).replace(
            "    PipeBarrier<PIPE_V>();\n    for (int32_t t : kTimes) {\n      Low16(At(t + 8), At(t), n);",
            "    for (int32_t t : kTimes) {\n      Low16(At(t + 8), At(t), n);",
            1,
        ),
        "without PipeBarrier<PIPE_V>",
    ),
    (
        "a product beyond int32",
        lambda text: text.replace("(8 * byte)) & 0xff)", "(8 * byte)) & 0xffffff)", 1),
        "beyond int32",
    ),
    ("an operand that is not aligned", lambda text: text.replace("* kLanes]", "* kLanes + 1]", 1), "multiple of 32"),
    ("a tile beyond the buffer", lambda text: text.replace("kLanes = 512", "kLanes = 1024", 1), "unified buffer"),
    (
        "a comparison of a part of 256 bytes",
        lambda text: text.replace(
            "CMPMODE::GE, static_cast<uint32_t>((count + 63) / 64 * 64)", "CMPMODE::GE, count", 1
        ),
        "multiple of 256 bytes",
    ),
    (
        "a queue's buffer that is never freed",
        lambda text: text.replace("    out_.FreeTensor(y);\n", "", 1),
        "AllocTensor",
    ),
    (
        "exclusive or of 32 bits",
        lambda text: text.replace(
            "a.ReinterpretCast<uint16_t>(), b.ReinterpretCast<uint16_t>(), 2 * lanes", "a, b, lanes"
        ),
        "int16 and uint16|no matching function",
    ),
]

HARNESS = """
#include "planted.cpp"
static bool anywhere(const void*, size_t) { return true; }
int main() {
  ascendc_host::is_device_memory = anywhere;
  static float x[9000], y[9000];
  try {
    ascendc_host::run(2, [] {
      hal_philox((uint8_t*)x, (uint8_t*)y, 1, 2, 3, 0, 0, 0, 1, 1, 1, 8999, 1, 1000.0f, 1.5f);
    });
  } catch (const std::exception& failure) {
    puts(failure.what());
    return 1;
  }
}
"""


@pytest.mark.nightly
@pytest.mark.parametrize("change, refusal", [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_the_stand_in_refuses_what_the_vector_unit_does_not_document(
    tmp_path: Path, change: Callable[[str], str], refusal: str
) -> None:
    """Each error is planted into the kernel's source, which passes as it is."""
    text = (compile_kernels.KERNELS / "philox.cpp").read_text()
    planted = change(text)
    assert planted != text
    assert _outcome(tmp_path, text) == ""
    outcome = _outcome(tmp_path, planted)
    assert any(part in outcome for part in refusal.split("|")), outcome


def _outcome(folder: Path, kernel: str) -> str:
    """What the compiler or the run of this kernel says; "" if both succeed."""
    (folder / "planted.cpp").write_text(kernel)
    (folder / "harness.cpp").write_text(HARNESS)
    root = Path(torch.__file__).parent
    command = ["g++", "-std=c++17", "-O1", "-fno-strict-aliasing", f"-I{compile_kernels.STAND_IN}", f"-I{folder}"]
    command += ["-isystem", str(root / "include"), str(folder / "harness.cpp"), "-o", str(folder / "harness")]
    command += [f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    compiled = run(command, check=False, capture_output=True, text=True)
    if compiled.returncode:
        return compiled.stderr
    return run([str(folder / "harness")], check=False, capture_output=True, text=True).stdout
