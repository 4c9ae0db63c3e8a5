// Shared by all kernels: element types, conversions, exp and related functions, reductions, the dtype template.
//
// Style of the kernels: rows are split over OpenMP threads. Inside a row there are plain loops under `#pragma omp
// simd`, which the compiler turns into AVX-512, AVX2 or NEON code with exact tails, so that one source serves every
// machine. Intrinsics are used under #if where compilers miss an instruction, next to a portable loop. Statistics and
// arithmetic are in `real` (float; double for float64 tensors). The order of a reduction depends on the shape only (for
// attention's dK and dV also on the number of threads), never on timing, so results are bit-equal from run to run.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HAL_INLINE static inline __attribute__((always_inline))
// Below this many elements a fork/join (0.3 us hot, far more when the team sleeps) costs more than it saves.
#define HAL_PARALLEL_MIN 16384

enum { HAL_F32 = 0, HAL_BF16 = 1, HAL_F16 = 2, HAL_F64 = 3, HAL_DTYPES };

typedef float f32;
typedef double f64;
typedef uint16_t bf16;  // the upper half of a float
typedef uint16_t f16;   // IEEE binary16

HAL_INLINE uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
HAL_INLINE float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

HAL_INLINE float load_f32(const f32 *p) { return *p; }
HAL_INLINE double load_f64(const f64 *p) { return *p; }
HAL_INLINE float load_bf16(const bf16 *p) { return float_of((uint32_t)*p << 16); }

// Exact for every input: exponent and mantissa are shifted into place and the exponent bias is corrected by a
// multiplication, which also normalises subnormals. Infinities and NaN get the all-ones exponent of a float.
HAL_INLINE float load_f16(const f16 *p) {
    const uint32_t moved = (uint32_t)(int32_t)(int16_t)*p << 13 & 0x8fffe000;
    const uint32_t bits = bits_of(float_of(moved) * 0x1p112f);
    return float_of((bits & 0x7fffffff) >= 0x47800000 ? bits | 0x7f800000 : bits);
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
    // Adding 0.5 leaves the subnormal's bits, rounded by the FPU, in the low bits of the sum (the ulp of 0.5 is 2^-24).
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    *p = (f16)(half | (bits >> 16 & 0x8000));
}

// exp(x) = p 2^n with x = n ln2 + r, |r| <= ln2/2, and p a degree-6 polynomial for exp(r) (fitted to 3e-9). Returns p;
// the low bits of *shifted hold n. Largest error 1.5 ulp (tested).
#define EXP_LOG2_E 1.44269504f
#define EXP_ROUND 12582912.0f  // 1.5 * 2^23: adding it leaves the rounded number in the low bits
#define EXP_LN2_HIGH 0.693145752f
#define EXP_LN2_LOW 1.42860677e-6f
#define EXP_2 0.49999994f  // the polynomial's coefficient of r^2, and so on
#define EXP_3 1.66665211e-1f
#define EXP_4 4.1668389e-2f
#define EXP_5 8.36874545e-3f
#define EXP_6 1.38145394e-3f
HAL_INLINE float exp_reduced(float x, float *shifted) {
    *shifted = x * EXP_LOG2_E + EXP_ROUND;
    float n = *shifted - EXP_ROUND;
    float r = x - n * EXP_LN2_HIGH;
    r = r - n * EXP_LN2_LOW;
    float p = EXP_6;
    p = p * r + EXP_5;
    p = p * r + EXP_4;
    p = p * r + EXP_3;
    p = p * r + EXP_2;
    p = p * r + 1.0f;
    return p * r + 1.0f;
}

// Results below 2^-125.5 become exactly 0, above FLT_MAX inf; NaN stays NaN.
HAL_INLINE float fast_expf(float x) {
    float shifted, p = exp_reduced(x > 89.0f ? 89.0f : x, &shifted);            // false for NaN
    float half_scale = float_of((bits_of(shifted) - 0x4b400000u + 126) << 23);  // half of 2^n: n may be 128
    float result = (p + p) * half_scale;
    return x < -86.98f ? 0.0f : result;
}

// Equal to fast_expf for x <= 88. This suffices where a row's maximum or log-sum-exp has been subtracted, because
// rounding leaves x at most slightly above 0. It saves three of seventeen instructions.
HAL_INLINE float low_expf(float x) {
    float shifted, p = exp_reduced(x, &shifted);
    return x < -86.98f ? 0.0f : p * float_of((bits_of(shifted) + 127) << 23);
}

// float64 tensors exist for gradient checks: libm is good enough there.
HAL_INLINE float exp_f32(float x) { return fast_expf(x); }
HAL_INLINE double exp_f64(double x) { return exp(x); }
HAL_INLINE float low_exp_f32(float x) { return low_expf(x); }
HAL_INLINE double low_exp_f64(double x) { return exp(x); }
HAL_INLINE float log_f32(float x) { return logf(x); }
HAL_INLINE double log_f64(double x) { return log(x); }
HAL_INLINE float sqrt_f32(float x) { return sqrtf(x); }
HAL_INLINE double sqrt_f64(double x) { return sqrt(x); }

// Results larger than this are written with non-temporal stores: an ordinary store first reads the line that it is
// about to overwrite, and a block of this size is seldom still cached when the allocator reuses it. Smaller results are
// faster with ordinary stores. This is a constant because in a virtual machine sysconf(_SC_LEVEL3_CACHE_SIZE) may
// report the sum of the host's caches; build.py lowers it for processors whose third level is slow.
#ifndef HAL_STREAM_MIN
#define HAL_STREAM_MIN ((int64_t)6 << 20)
#endif

// Writes one cache line with a non-temporal store. Another thread may read it after the writer's stream_end().
#if defined(__AVX512F__)
#include <immintrin.h>
#define STREAM_LINE(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512(from))
#elif defined(__AVX__)
#include <immintrin.h>
HAL_INLINE void stream_line(__m256i *to, const __m256i *from) {
    _mm256_stream_si256(to, _mm256_loadu_si256(from));
    _mm256_stream_si256(to + 1, _mm256_loadu_si256(from + 1));
}
#define STREAM_LINE(to, from) stream_line((__m256i *)(to), (const __m256i *)(from))
#else
#define STREAM_LINE(to, from) memcpy(to, from, 64)
#undef HAL_NO_STREAM
#define HAL_NO_STREAM
#endif

// The method of writing a result of `bytes` bytes in rows of `row`. Large results use non-temporal stores, which write
// full cache lines. Rows that do not begin on a cache line are computed in pieces that stream_copy copies to their
// place.
enum { STREAM_NOT = 0, STREAM_LINES = 1, STREAM_PIECES = 2, STREAM_PIECE = 4096 /* bytes */ };
HAL_INLINE int streams(uintptr_t to, int64_t bytes, int64_t row) {
#ifdef HAL_NO_STREAM
    return STREAM_NOT + 0 * (int)(to + (uintptr_t)bytes + (uintptr_t)row);
#else
    if (bytes <= HAL_STREAM_MIN) return STREAM_NOT;
    if (to % 64 == 0 && row % 64 == 0) return STREAM_LINES;
    return row >= 512 ? STREAM_PIECES : STREAM_NOT;  // shorter rows contain too few full cache lines
#endif
}

// Copies `bytes` bytes to any address; full cache lines are written with non-temporal stores.
HAL_INLINE void stream_copy(void *to_, const void *from_, int64_t bytes) {
    char *to = (char *)to_;
    const char *from = (const char *)from_;
    int64_t at = (int64_t)(-(uintptr_t)to % 64);
    if (at > bytes) at = bytes;
    memcpy(to, from, (size_t)at);
    for (; at + 64 <= bytes; at += 64) STREAM_LINE(to + at, from + at);
    memcpy(to + at, from + at, (size_t)(bytes - at));
}

HAL_INLINE void stream_end(void) {
#ifndef HAL_NO_STREAM
    _mm_sfence();
#endif
}

// store_line_<dtype>: rounds the values of one cache line to their dtype and writes them, with a non-temporal store if
// `stream` (`to` is then 64-byte aligned). Compiler-generated code takes a dozen instructions to round 16 floats to
// bfloat16, AVX512-BF16 takes one. That instruction flushes subnormals to zero, so lines with a subnormal use the
// portable loop.
#define DEFINE_STORE_LINE(T, real)                                                                          \
    HAL_INLINE void store_line_##T(int stream, T *to, const real *values) {                                 \
        _Alignas(64) T line[64 / sizeof(T)];                                                                \
        round_##T(line, values);                                                                            \
        if (stream) STREAM_LINE(to, line);                                                                  \
        else memcpy(to, line, sizeof line);                                                                 \
    }
// round_<dtype>: one cache line, to aligned memory. HAL_ROUNDS_<dtype>: whether that is cheaper than single values.
#define ROUND_EACH(T, real)                                                                                 \
    HAL_INLINE void round_##T(T *line, const real *values) {                                                \
        _Pragma("omp simd") for (int i = 0; i < (int)(64 / sizeof(T)); i++) store_##T(line + i, values[i]); \
    }                                                                                                       \
    enum { HAL_ROUNDS_##T = 0 };
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
HAL_INLINE void round_bf16(bf16 *line, const float *values) {
    enum { SUBNORMAL = 0x20 };
    const __m512 low = _mm512_loadu_ps(values), high = _mm512_loadu_ps(values + 16);
    if (_mm512_fpclass_ps_mask(low, SUBNORMAL) | _mm512_fpclass_ps_mask(high, SUBNORMAL)) {
        for (int i = 0; i < 32; i++) store_bf16(line + i, values[i]);
    } else {
        _mm512_store_si512(line, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}
enum { HAL_ROUNDS_bf16 = 1 };
#else
ROUND_EACH(bf16, float)
#endif
#ifdef __AVX512F__
HAL_INLINE void round_f16(f16 *line, const float *values) {
    const __m256i low = _mm512_cvtps_ph(_mm512_loadu_ps(values), _MM_FROUND_TO_NEAREST_INT);
    const __m256i high = _mm512_cvtps_ph(_mm512_loadu_ps(values + 16), _MM_FROUND_TO_NEAREST_INT);
    _mm512_store_si512(line, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
enum { HAL_ROUNDS_f16 = 1 };
#else
ROUND_EACH(f16, float)
#endif
ROUND_EACH(f32, float)
ROUND_EACH(f64, double)
DEFINE_STORE_LINE(f32, float)
DEFINE_STORE_LINE(bf16, float)
DEFINE_STORE_LINE(f16, float)
DEFINE_STORE_LINE(f64, double)

enum { LANES = 32 };
HAL_INLINE int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// The tail of a row beyond a multiple of LANES is up to 31 single elements, which take longer than all vectors of a
// short row. Where memory may be read up to the next multiple of LANES (`beyond`: a row of the same tensor follows) and
// stores can be masked, the tail is computed in full lanes. Loads are not masked, because gcc would then make each wait
// for the load of the previous row. Data that is read again soon must not be written this way: a masked store cannot be
// forwarded to a load.
#define DEFINE_STORE_FIRST(T, real)                                             \
    HAL_INLINE void store_first_##T(T *to, const real *lane, int count) {       \
        for (int l = 0; l < count; l++) store_##T(to + l, lane[l]);             \
    }
#ifdef __AVX512F__
enum { HAL_MASKS_f32 = 1, HAL_MASKS_f64 = 1 };
HAL_INLINE void store_first_f32(f32 *to, const float *lane, int count) {
    const uint32_t wanted = (1u << count) - 1;
    _mm512_mask_storeu_ps(to, (__mmask16)wanted, _mm512_loadu_ps(lane));
    if (count > 16) _mm512_mask_storeu_ps(to + 16, (__mmask16)(wanted >> 16), _mm512_loadu_ps(lane + 16));
}
HAL_INLINE void store_first_f64(f64 *to, const double *lane, int count) {
    const uint32_t wanted = (1u << count) - 1;
    for (int l = 0; l < count; l += 8)
        _mm512_mask_storeu_pd(to + l, (__mmask8)(wanted >> l), _mm512_loadu_pd(lane + l));
}
#else
enum { HAL_MASKS_f32 = 0, HAL_MASKS_f64 = 0 };
DEFINE_STORE_FIRST(f32, float)
DEFINE_STORE_FIRST(f64, double)
#endif
enum { HAL_MASKS_bf16 = 0, HAL_MASKS_f16 = 0 };
DEFINE_STORE_FIRST(bf16, float)
DEFINE_STORE_FIRST(f16, float)
// Whether this is allowed for `count` elements from element `at` on of a tensor of `all` elements.
#define BEYOND(at, count, all) (NAME(HAL_MASKS) && (at) + whole_lanes(count) <= (all))
// Runs the statement that follows for i = at ... end - 1 in lanes l = 0, 1, ... < LANES, or for all lanes with in_ as
// mask.
#define REST(beyond, l, i, at, end, ...)                                                     \
    do {                                                                                     \
        const int left_ = (int)((end) - (at));                                               \
        if ((beyond) && left_ > 0) {                                                         \
            _Pragma("omp simd") for (int l = 0; l < LANES; l++) {                            \
                const int in_ = l < left_;                                                   \
                const int64_t i = (at) + l;                                                  \
                (void)in_, (void)i;                                                          \
                __VA_ARGS__;                                                                 \
            }                                                                                \
        } else {                                                                             \
            _Pragma("omp simd") for (int l = 0; l < left_; l++) {                            \
                enum { in_ = 1 };                                                            \
                const int64_t i = (at) + l;                                                  \
                (void)i;                                                                     \
                __VA_ARGS__;                                                                 \
            }                                                                                \
        }                                                                                    \
    } while (0)

// v[i] = value for 0 <= i < count, `other` from there up to the next multiple of LANES; beyond: see BEYOND.
#define FILL_LANES(beyond, v, count, i, value, other)                                        \
    do {                                                                                     \
        int64_t at_ = 0;                                                                     \
        for (; at_ + LANES <= (count); at_ += LANES) {                                       \
            _Pragma("omp simd") for (int l_ = 0; l_ < LANES; l_++) {                         \
                const int64_t i = at_ + l_;                                                  \
                (v)[i] = (value);                                                            \
            }                                                                                \
        }                                                                                    \
        REST(beyond, l_, i, at_, count, const real v_ = (value); (v)[i] = in_ ? v_ : (other)); \
        if (!(beyond))                                                                       \
            for (int64_t i = (count); i % LANES; i++) (v)[i] = (other);                      \
    } while (0)

// out[i] = value for 0 <= i < count, `value` being of type real. stream: what streams() returned. beyond: see BEYOND;
// with masks, whole lines are written for STREAM_LINES only, which has no tail, because a tail begins at a multiple of
// LANES.
_Static_assert(!HAL_ROUNDS_f32 && !HAL_ROUNDS_f64, "types with masks are not rounded by lines");
#define STORE_ROW(stream, out, count, i, value) STORE_ROW_BEYOND(0, stream, out, count, i, value)
#define STORE_ROW_BEYOND(beyond, stream, out, count, i, value)                                   \
    do {                                                                                         \
        enum { LINE_ = 64 / sizeof(T), PIECE_ = STREAM_PIECE / sizeof(T) };                      \
        _Alignas(64) T piece_[PIECE_];                                                           \
        const int64_t step_ = (stream) == STREAM_PIECES ? PIECE_ : (count);                      \
        for (int64_t begin_ = 0; begin_ < (count); begin_ += step_) {                            \
            const int64_t end_ = begin_ + step_ < (count) ? begin_ + step_ : (count);            \
            T *to_ = (stream) == STREAM_PIECES ? piece_ : (out);                                 \
            int64_t at_ = begin_;                                                                \
            for (; ((stream) == STREAM_LINES || NAME(HAL_ROUNDS)) && at_ + LINE_ <= end_; at_ += LINE_) { \
                _Alignas(64) real values_[LINE_];                                                \
                _Pragma("omp simd") for (int l_ = 0; l_ < LINE_; l_++) {                         \
                    const int64_t i = at_ + l_;                                                  \
                    values_[l_] = (value);                                                       \
                }                                                                                \
                NAME(store_line)((stream) == STREAM_LINES, to_ + (at_ - begin_), values_);       \
            }                                                                                    \
            for (; at_ + LANES <= end_; at_ += LANES) {                                          \
                _Pragma("omp simd") for (int l_ = 0; l_ < LANES; l_++) {                         \
                    const int64_t i = at_ + l_;                                                  \
                    STORE(to_ + (i - begin_), value);                                            \
                }                                                                                \
            }                                                                                    \
            if ((beyond) && at_ < end_) {                                                        \
                _Alignas(64) real values_[LANES];                                                \
                _Pragma("omp simd") for (int l_ = 0; l_ < LANES; l_++) {                         \
                    const int64_t i = at_ + l_;                                                  \
                    values_[l_] = (value);                                                       \
                }                                                                                \
                NAME(store_first)(to_ + (at_ - begin_), values_, (int)(end_ - at_));             \
            } else {                                                                             \
                _Pragma("omp simd") for (int64_t i = at_; i < end_; i++) STORE(to_ + (i - begin_), value); \
            }                                                                                    \
            if ((stream) == STREAM_PIECES)                                                       \
                stream_copy((out) + begin_, piece_, (end_ - begin_) * (int64_t)sizeof(T));       \
        }                                                                                        \
    } while (0)

// Prefetches memory into the first-level cache (locality 3) or the second (2). The hardware prefetcher stays within a
// page of 4 KiB, so every page would begin with the latency of memory and, in a virtual machine, of a long page walk.
// Takes an address, not a pointer, because the data after a row may lie outside of the tensor.
#define PREFETCH(address, bytes, locality)                                                      \
    for (uintptr_t line_ = (address), last_ = line_ + (uintptr_t)(bytes); line_ < last_; line_ += 64) \
    __builtin_prefetch((const void *)line_, 0, locality)

// The sum of the lanes: the upper half is added to the lower half until one lane is left.
#define DEFINE_ADD_LANES(real, suffix)                      \
    HAL_INLINE real add_lanes_##suffix(real *lane) {        \
        for (int w = LANES / 2; w > 0; w /= 2)              \
            for (int l = 0; l < w; l++) lane[l] += lane[l + w]; \
        return lane[0];                                     \
    }
#ifdef __AVX512F__
// The same additions in registers. Compilers turn the loop into five store-load round trips, a quarter of layer norm's
// time.
HAL_INLINE float add_lanes_f32(const float *lane) {
    const __m512d sixteen = _mm512_castps_pd(_mm512_add_ps(_mm512_loadu_ps(lane), _mm512_loadu_ps(lane + 16)));
    const __m256 eight = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(sixteen)),
                                       _mm256_castpd_ps(_mm512_extractf64x4_pd(sixteen, 1)));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
DEFINE_ADD_LANES(float, f32)
#endif
DEFINE_ADD_LANES(double, f64)
#define ADD_LANES(lane) _Generic((lane)[0], float: add_lanes_f32, double: add_lanes_f64)(lane)

// sum = term(0) + ... + term(count - 1); `term` is an expression in `i`. Element i is added to lane i % 32, and the
// lanes are added up at the end. With AVX-512 that is two accumulators, enough to hide the latency of addition behind
// L2's bandwidth; more accumulators would lengthen the horizontal sum, which dominates short rows.
#define ROW_SUM(type, sum, count, i, term) ROW_SUM_BEYOND(0, type, sum, count, i, term, (void)0)
// The same, with a statement that runs before every LANES elements, from i on; beyond: see BEYOND.
#define ROW_SUM_BEYOND(beyond, type, sum, count, i, term, statement)                  \
    do {                                                                              \
        type lane_[LANES] = {0};                                                      \
        int64_t at_ = 0;                                                              \
        for (; at_ + LANES <= (count); at_ += LANES) {                                \
            { const int64_t i = at_; (void)i; statement; }                            \
            _Pragma("omp simd") for (int l_ = 0; l_ < LANES; l_++) {                  \
                const int64_t i = at_ + l_;                                           \
                lane_[l_] += (term);                                                  \
            }                                                                         \
        }                                                                             \
        REST(beyond, l_, i, at_, count, const type t_ = (term); lane_[l_] += in_ ? t_ : 0); \
        sum = ADD_LANES(lane_);                                                       \
    } while (0)
// top = the largest of top, value(0), ..., value(count - 1), ignoring NaN. AVX-512 uses four registers: with a single
// one, which compilers generate for `reduction(max)`, each comparison waits for the previous one. beyond: see BEYOND.
#define ROW_MAX(top, count, i, value) ROW_MAX_BEYOND(0, top, count, i, value)
#define ROW_MAX_BEYOND(beyond, top, count, i, value)                                  \
    do {                                                                              \
        enum { WIDE_ = 2 * LANES };                                                   \
        real lane_[WIDE_];                                                            \
        for (int l_ = 0; l_ < WIDE_; l_++) lane_[l_] = (top);                         \
        int64_t at_ = 0;                                                              \
        for (; at_ + WIDE_ <= (count); at_ += WIDE_) {                                \
            _Pragma("omp simd") for (int l_ = 0; l_ < WIDE_; l_++) {                  \
                const int64_t i = at_ + l_;                                           \
                lane_[l_] = (value) > lane_[l_] ? (value) : lane_[l_];                \
            }                                                                         \
        }                                                                             \
        for (; at_ + LANES <= (count); at_ += LANES) {                                \
            _Pragma("omp simd") for (int l_ = 0; l_ < LANES; l_++) {                  \
                const int64_t i = at_ + l_;                                           \
                lane_[l_] = (value) > lane_[l_] ? (value) : lane_[l_];                \
            }                                                                         \
        }                                                                             \
        REST(beyond, l_, i, at_, count, const real v_ = (value);                      \
             lane_[l_] = in_ && v_ > lane_[l_] ? v_ : lane_[l_]);                     \
        _Pragma("omp simd reduction(max : top)") for (int l_ = 0; l_ < WIDE_; l_++)   \
            top = lane_[l_] > top ? lane_[l_] : top;                                  \
    } while (0)
// Two sums over the same elements, each as ROW_SUM forms it.
#define ROW_SUMS(type, sum_a, sum_b, count, i, term_a, term_b)                        \
    do {                                                                              \
        type lane_a_[LANES] = {0}, lane_b_[LANES] = {0};                              \
        int64_t at_ = 0;                                                              \
        for (; at_ + LANES <= (count); at_ += LANES) {                                \
            _Pragma("omp simd") for (int l_ = 0; l_ < LANES; l_++) {                  \
                const int64_t i = at_ + l_;                                           \
                lane_a_[l_] += (term_a);                                              \
                lane_b_[l_] += (term_b);                                              \
            }                                                                         \
        }                                                                             \
        REST(0, l_, i, at_, count, lane_a_[l_] += (term_a); lane_b_[l_] += (term_b)); \
        sum_a = ADD_LANES(lane_a_);                                                   \
        sum_b = ADD_LANES(lane_b_);                                                   \
    } while (0)

// Scratch memory of the calling thread, 64-byte aligned. It is kept until a larger block is requested, because fresh
// memory costs a page fault per 4 KiB, more than most kernels. Valid until the thread's next call, and freed when the
// thread ends. Aborts when out of memory.
void *hal_scratch(size_t bytes);

// Sums over rows (weight and bias gradients) are accumulated in double, because millions of terms may cancel. They are
// formed in pieces of consecutive rows: at most 32 pieces of at least 16 rows, or up to four of at least 4. The number
// of pieces depends on the shape only, so the result is the same for any number of threads.
HAL_INLINE int64_t piece_count(int64_t rows) {
    const int64_t pieces = rows / 16, small = rows < 16 ? rows / 4 : 4;
    return pieces > 32 ? 32 : pieces > small ? pieces : small > 1 ? small : 1;
}

// out[i] = the sum over pieces of partial[piece * stride + i]; called by every thread of a parallel region.
#define DEFINE_SUM_PIECES(real, suffix)                                                                            \
    static inline void sum_pieces_##suffix(const double *partial, int64_t pieces, int64_t stride, int64_t width,   \
                                           real *out) {                                                            \
        enum { BLOCK_ = 256 };                                                                                     \
        _Pragma("omp for schedule(static)") for (int64_t begin = 0; begin < width; begin += BLOCK_) {              \
            const int64_t count = begin + BLOCK_ < width ? BLOCK_ : width - begin;                                 \
            double sum[BLOCK_] = {0};                                                                              \
            for (int64_t piece = 0; piece < pieces; piece++) {                                                     \
                const double *from = partial + piece * stride + begin;                                             \
                _Pragma("omp simd") for (int64_t i = 0; i < count; i++) sum[i] += from[i];                         \
            }                                                                                                      \
            for (int64_t i = 0; i < count; i++) out[begin + i] = (real)sum[i];                                     \
        }                                                                                                          \
    }
DEFINE_SUM_PIECES(float, f32)
DEFINE_SUM_PIECES(double, f64)
