// All tensors are contiguous with shape [n0, n1, n2, n3]. Element (i0, i1, i2, i3) has index
// index0 + i0 s0 + i1 s1 + i2 s2 + i3 in the draw (seed, offset), so that a shard draws its part of a larger tensor.
void hal_philox_uniform(uintptr_t out, uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1, int64_t n2,
                        int64_t n3, int64_t s0, int64_t s1, int64_t s2);
// out = residual + dropout(x + bias), bias and residual may be 0. threshold = ceil(p * 2^24): an element is kept iff
// its top 24 bits reach it; kept values are multiplied by scale. x is real instead of dtype if x_wide, residual and out
// are if out_wide; bias is real [n3].
void hal_dropout(int dtype, uintptr_t x, int x_wide, uintptr_t bias, uintptr_t residual, uintptr_t out, int out_wide,
                 uint32_t threshold, double scale, uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1,
                 int64_t n2, int64_t n3, int64_t s0, int64_t s1, int64_t s2);
// dx = dropout(dy), dbias = its sum over rows before rounding to dtype, real [n3]. dx = 0: not computed.
void hal_dropout_bwd(int dtype, uintptr_t dy, int dy_wide, uintptr_t dx, uintptr_t dbias, uint32_t threshold, double scale,
                     uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                     int64_t s0, int64_t s1, int64_t s2);
