// What every kernel shares: element types, conversions, exp and its relatives, reductions, the dtype template.
//
// Style of the kernels: rows are split over OpenMP threads; inside a row, plain loops under `#pragma omp simd` that the
// compiler turns into AVX-512, AVX2 or NEON code, exact tails included, so one source serves every machine. Statistics
// and arithmetic are in `real` (float; double for float64 tensors). A reduction's order depends on the shape only, never
// on timing or the number of threads, so results are bit-equal from run to run.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HAL_INLINE static inline __attribute__((always_inline))
#define HAL_PRAGMA(text) _Pragma(#text)
// Below this many elements a fork/join (0.3 us hot, far more when the team sleeps) costs more than it saves.
#define HAL_PARALLEL_MIN 16384

enum { HAL_F32 = 0, HAL_BF16 = 1, HAL_F16 = 2, HAL_F64 = 3 };

typedef float f32;
typedef double f64;
typedef uint16_t bf16;  // the upper half of a float
typedef uint16_t f16;   // IEEE binary16

HAL_INLINE uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
HAL_INLINE float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

HAL_INLINE float load_f32(const f32 *p) { return *p; }
HAL_INLINE double load_f64(const f64 *p) { return *p; }
HAL_INLINE float load_bf16(const bf16 *p) { return float_of((uint32_t)*p << 16); }

// Exact for every input: exponent and mantissa are moved into place and the bias is corrected by a multiplication,
// which also normalises subnormals; infinities and NaN get float's all-ones exponent.
HAL_INLINE float load_f16(const f16 *p) {
    uint32_t half = *p, magnitude = (half & 0x7fff) << 13;
    float scaled = float_of(magnitude) * 0x1p112f;
    uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : bits_of(scaled);
    return float_of(bits | (half & 0x8000) << 16);
}

HAL_INLINE void store_f32(f32 *p, float value) { *p = value; }
HAL_INLINE void store_f64(f64 *p, double value) { *p = value; }

// Round to nearest even; a NaN stays a (quiet) NaN.
HAL_INLINE void store_bf16(bf16 *p, float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *p = (bf16)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

// Round to nearest even; overflow becomes infinity, tiny values become subnormals, a NaN stays a NaN.
HAL_INLINE void store_f16(f16 *p, float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Adding 0.5 leaves the subnormal's bits, rounded by the FPU, at the bottom of the sum (ulp of 0.5 = 2^-24).
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    *p = (f16)(half | (bits >> 16 & 0x8000));
}

// exp(x): x = n ln2 + r with |r| <= ln2/2, a degree-6 polynomial for exp(r), then two exact multiplications by powers of
// two, so that results underflow gradually to 0 and overflow to inf; NaN stays NaN.
// Largest error over all floats: 1.1 ulp (test_kernel_math).
HAL_INLINE float fast_expf(float x) {
    float clamped = x > 89.0f ? 89.0f : x;
    clamped = clamped < -104.0f ? -104.0f : clamped;  // both comparisons are false for NaN
    float shifted = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer in the low bits
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float p = 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t exponent = (int32_t)(bits_of(shifted) - 0x4b400000u);
    int32_t half = exponent >> 1;
    return p * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(exponent - half + 127) << 23);
}

// float64 tensors exist for gradient checks: libm is good enough there.
HAL_INLINE float exp_f32(float x) { return fast_expf(x); }
HAL_INLINE double exp_f64(double x) { return exp(x); }
HAL_INLINE float sqrt_f32(float x) { return sqrtf(x); }
HAL_INLINE double sqrt_f64(double x) { return sqrt(x); }

// Splits `count` rows into pieces whose number depends on the shape only (at most 64), so that partial sums of weight
// gradients are combined in the same order whatever the number of threads is.
HAL_INLINE int64_t piece_count(int64_t count, int64_t width) {
    int64_t by_work = count * width / HAL_PARALLEL_MIN + 1;
    int64_t pieces = by_work < 64 ? by_work : 64;
    return pieces < count ? pieces : (count > 0 ? count : 1);
}
