"""kernels/common.h against torch: exp's error bound, the 16-bit conversions, lane sums; and Philox's known answers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hal.backends.cpu_ref import build

SOURCE = """
#include "common.h"
#include "philox.h"
#define real float
#define EACH for (int64_t i = 0; i < n; i++)
void exps(const float *x, float *y, int64_t n) {
_Pragma("omp simd") EACH y[i] = fast_expf(x[i]); }
void low_exps(const float *x, float *y, int64_t n) {
_Pragma("omp simd") EACH y[i] = low_expf(x[i]); }
void largest(const float *x, float *y, int64_t n) {
    float top = -INFINITY; ROW_MAX(top, n, i, x[i]); *y = top; }
void largest_of_whole_lanes(const float *x, float *y, int64_t n) {
    float top = -INFINITY; ROW_MAX_BEYOND(1, top, n, i, x[i]); *y = top; }
void sums_of_whole_lanes(const float *x, float *y, int64_t n) {
    ROW_SUM_BEYOND(1, float, *y, n, i, x[i], (void)0); }
void to_bf16(const float *x, bf16 *y, int64_t n) {
_Pragma("omp simd") EACH store_bf16(y + i, x[i]); }
void lines_to_bf16(const float *x, bf16 *y, int64_t n) {
    for (int64_t i = 0; i + 32 <= n; i += 32) store_line_bf16(0, y + i, x + i); }
void lines_to_f16(const float *x, f16 *y, int64_t n) {
    for (int64_t i = 0; i + 32 <= n; i += 32) store_line_f16(0, y + i, x + i); }
void to_f16(const float *x, f16 *y, int64_t n) {
_Pragma("omp simd") EACH store_f16(y + i, x[i]); }
void from_bf16(const bf16 *x, float *y, int64_t n) {
_Pragma("omp simd") EACH y[i] = load_bf16(x + i); }
void from_f16(const f16 *x, float *y, int64_t n) {
_Pragma("omp simd") EACH y[i] = load_f16(x + i); }
void sums(const float *x, float *y, int64_t n) { ROW_SUM(float, *y, n, i, x[i]); }
void blocks(const uint64_t *seed_and_counter, uint32_t *y, int64_t n) {
    uint32_t words[4][PHILOX_LANES];
    philox_blocks((philox_t){seed_and_counter[0], 0}, seed_and_counter[1], words);
    EACH y[i] = words[i][0]; }
"""


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., torch.Tensor]:
    folder = tmp_path_factory.mktemp("math")
    (folder / "math.c").write_text(SOURCE)
    flags = [flag for flag in build._wanted_flags() if "sanitize" not in flag]
    command = [*build.find_compiler(), *flags, f"-I{build.KERNELS}", "-shared", str(folder / "math.c")]
    subprocess.run([*command, "-o", str(folder / "math.so"), "-lm"], check=True)
    library = ctypes.CDLL(str(folder / "math.so"))

    def run(name: str, x: torch.Tensor, out: torch.dtype, n: int | None = None) -> torch.Tensor:
        count = x.numel() if n is None else n
        y = torch.empty(count if not name.startswith(("sums", "largest")) else 1, dtype=out)
        getattr(library, name)(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y)), ctypes.c_int64(count))
        return y

    return run


def floats(step: int) -> torch.Tensor:
    """Every step-th of all 2^32 bit patterns."""
    return torch.from_numpy(np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32).view(np.float32).copy())


def test_exp_is_within_one_and_a_half_ulp_and_saturates(call: Callable[..., torch.Tensor]) -> None:
    x = torch.cat([torch.linspace(-87.5, 89.0, 1_000_001), floats(4099)])
    got, want = call("exps", x, torch.float32), torch.exp(x.double())
    flushed = want < 2.0**-125  # results below 2^-125.5 become 0
    overflow = want > torch.finfo(torch.float32).max
    normal = ~flushed & ~overflow & ~want.isnan()
    ulp = torch.exp2(torch.floor(torch.log2(want[normal])) - 23)
    assert ((got[normal].double() - want[normal]).abs() / ulp).max() <= 1.5
    assert (got[flushed] <= 2.0**-124).all() and (got[flushed] >= 0).all()
    assert got[overflow].isinf().all()
    assert torch.equal(got.isnan(), x.isnan())
    special = torch.tensor([-float("inf"), float("inf"), 0.0, -0.0])
    assert call("exps", special, torch.float32).tolist() == [0.0, float("inf"), 1.0, 1.0]


def test_exp_of_what_is_not_above_88_is_the_same_number_bit_by_bit(call: Callable[..., torch.Tensor]) -> None:
    x = torch.cat([torch.linspace(-87.5, 88.0, 1_000_001), floats(4099), torch.tensor([0.0, -0.0, -float("inf")])])
    x = x[~(x > 88.0)]  # keeps NaN
    got, want = call("low_exps", x, torch.float32), call("exps", x, torch.float32)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("n", [0, 1, 63, 64, 127, 128, 129, 1000, 4099])
def test_the_largest_is_found_wherever_it_stands(call: Callable[..., torch.Tensor], n: int) -> None:
    x = -1.0 - torch.rand(n + 1)
    assert call("largest", x, torch.float32, n).item() == max(x[:n].tolist(), default=-float("inf"))
    for at in range(n):
        x[at] = float(at)
        assert call("largest", x, torch.float32, n).item() == at
        x[at] = float("nan")  # ignored, also when it precedes the next maximum


@pytest.mark.parametrize("n", [1, 15, 16, 31, 32, 33, 95, 127, 161, 1001])
def test_what_lies_beyond_a_row_is_read_but_does_not_count(call: Callable[..., torch.Tensor], n: int) -> None:
    x = torch.randn(n + 32)
    for junk in (float("nan"), float("inf"), 3e38):
        x[n:] = junk
        for name in ("sums", "largest"):
            got, want = (call(f"{name}{kind}", x, torch.float32, n) for kind in ("_of_whole_lanes", ""))
            assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_16_bit_conversions_are_exact_and_round_to_nearest_even(
    call: Callable[..., torch.Tensor], name: str, dtype: torch.dtype
) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = call(f"from_{name}", every, torch.float32)
    assert torch.equal(wide.isnan(), every.isnan())
    assert torch.equal(wide[~every.isnan()], every.float()[~every.isnan()])
    # All representable values, all midpoints between neighbours and their neighbours, and a sample of everything.
    values = every.float()[every.isfinite()].sort().values
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    x = torch.cat([wide, middles, torch.nextafter(middles, values[1:]), torch.nextafter(middles, values[:-1])])
    x = torch.cat([x, floats(4099), torch.tensor([65519.9, 65520.0, -65520.0, float("inf"), 3.4e38])])
    got, want = call(f"to_{name}", x, torch.int16).view(dtype), x.to(dtype)
    assert torch.equal(got.isnan(), x.isnan())
    keep = ~x.isnan()
    assert torch.equal(got[keep].view(torch.int16), want[keep].view(torch.int16))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_lines_are_rounded_like_single_values(call: Callable[..., torch.Tensor], name: str, dtype: torch.dtype) -> None:
    x = torch.cat([floats(1021), torch.full((32,), 1e-39)])
    x = torch.cat([x, *(torch.linspace(-top, top, 3200) for top in (1.2e-38, 1.3e-4, 7e4))])
    x = x[: x.numel() // 32 * 32]
    got, want = call(f"lines_to_{name}", x, torch.int16).view(dtype), x.to(dtype)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()].view(torch.int16), want[~x.isnan()].view(torch.int16))


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 63, 64, 65, 1000])
def test_lane_sums_add_every_element_once(call: Callable[..., torch.Tensor], count: int) -> None:
    x = torch.arange(1, count + 1, dtype=torch.float32)
    assert call("sums", x, torch.float32).item() == count * (count + 1) / 2
    torch.manual_seed(count)
    x = torch.randn(count) * 10.0 ** torch.randint(-3, 4, (count,))
    lanes = torch.zeros(32)
    for part in x.split(32):
        lanes[: part.numel()] += part
    while lanes.numel() > 1:  # the order is part of the result
        lower, upper = lanes.chunk(2)
        lanes = lower + upper
    assert call("sums", x, torch.float32).item() == lanes.item()


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),  # known answer of Random123's test suite
        (2**64 - 1, 2**64 - 1, None),
        (0x0123456789ABCDEF, 2**32 - 1, None),
    ],
)
def test_philox_words(
    call: Callable[..., torch.Tensor], seed: int, counter: int, words: tuple[int, ...] | None
) -> None:
    x = torch.from_numpy(np.array([seed, counter], dtype=np.uint64).view(np.int64).copy())
    got = [w % (1 << 32) for w in call("blocks", x, torch.int32, 4).tolist()]
    assert got == list(words or philox(seed, counter))


def philox(seed: int, counter: int) -> tuple[int, ...]:
    """Philox4x32-10, as the paper writes it."""
    low = (1 << 32) - 1
    x, k0, k1 = [counter & low, counter >> 32, 0, 0], seed & low, seed >> 32
    for _ in range(10):
        p0, p1 = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(p1 >> 32) ^ x[1] ^ k0, p1 & low, (p0 >> 32) ^ x[3] ^ k1, p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return tuple(x)
