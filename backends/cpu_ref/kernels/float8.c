// float8 tensors times their scales, as float32: what a product of them reads.
//
// Rows are split over threads; the elements that share a scale are one loop. One byte is read and four are written per
// element.
#include "common.h"

#include "float8_api.h"

// As load_f16: exponent and mantissa are moved into place, and a multiplication corrects the exponent bias (127 - 7) and
// normalises subnormals. The format has no infinities; its only NaN is all ones.
HAL_INLINE float load_e4m3(uint8_t byte) {
    const uint32_t sign = (uint32_t)(byte & 0x80) << 24, magnitude = byte & 0x7f;
    const float value = float_of(sign | magnitude << 20) * 0x1p120f;
    return magnitude == 0x7f ? float_of(0x7fc00000) : value;
}

// e5m2 is the upper half of a binary16.
HAL_INLINE float load_e5m2(uint8_t byte) {
    const f16 half = (f16)(byte << 8);
    return load_f16(&half);
}

void hal_dequantize(int e5m2, uintptr_t x_, uintptr_t scale_, uintptr_t out_, int64_t rows, int64_t width,
                    int64_t row_block, int64_t block) {
    const int64_t blocks = (width + block - 1) / block;
#pragma omp parallel for schedule(static) if (rows * width >= HAL_PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *scales = (const float *)scale_ + row / row_block * blocks;
        for (int64_t at = 0; at < blocks; at++) {
            const int64_t begin = at * block, n = width - begin < block ? width - begin : block;
            const uint8_t *x = (const uint8_t *)x_ + row * width + begin;
            float *out = (float *)out_ + row * width + begin, scale = scales[at];
            if (e5m2) {
#pragma omp simd
                for (int64_t j = 0; j < n; j++) out[j] = load_e5m2(x[j]) * scale;
            } else {
#pragma omp simd
                for (int64_t j = 0; j < n; j++) out[j] = load_e4m3(x[j]) * scale;
            }
        }
    }
}
