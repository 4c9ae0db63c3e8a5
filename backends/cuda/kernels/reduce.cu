// column_sum: out[column] = sum over pieces of partial[piece][column], in a fixed order.
//
// A block takes 32 adjacent columns; warp w adds every 8th piece (coalesced 128-byte rows), then the first warp adds
// the eight sums in order. partial was written by the previous kernel on the same stream, so most reads hit L2. Sixteen of
// a thread's loads are in flight, because there are too few threads to hide the latency of a few.
#include "common.h"

template <class T> __global__ void __launch_bounds__(256) column_sum(const float *partial, T *out, i64 pieces, i64 width) {
    __shared__ float sums[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (i64 base = (i64)blockIdx.x * 32; base < width; base += (i64)gridDim.x * 32) {
        const i64 column = base + lane;
        float sum = 0.0f;
        if (column < width)
            staged<16>((i64)warp, pieces, (i64)8, [&](i64 piece) { return partial[piece * width + column]; },
                       [&](i64, float x) { sum += x; });
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && column < width) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) total += sums[w][lane];
            from_float(total, out[column]);
        }
        __syncthreads();
    }
}

EXPORT(column_sum<f32>)
EXPORT(column_sum<bf16>)
EXPORT(column_sum<f16>)
