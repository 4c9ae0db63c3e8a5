// All tensors are contiguous with shape [n0, n1, n2, n3]; element (i0, i1, i2, i3) is number
// index0 + i0 s0 + i1 s1 + i2 s2 + i3 of the draw (seed, offset), so that a shard draws its part of a larger tensor.
// threshold = ceil(p * 2^24): an element is kept iff its top 24 bits reach it; kept values are multiplied by scale.
void hal_philox_uniform(uintptr_t out, uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1, int64_t n2,
                        int64_t n3, int64_t s0, int64_t s1, int64_t s2);
void hal_dropout(int dtype, uintptr_t x, uintptr_t out, uint32_t threshold, double scale, uint64_t seed, uint64_t offset,
                 int64_t index0, int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t s0, int64_t s1, int64_t s2);
// out = residual + dropout(x + bias); bias has n3 elements or is 0.
void hal_bias_dropout_add(int dtype, uintptr_t x, uintptr_t bias, uintptr_t residual, uintptr_t out, uint32_t threshold,
                          double scale, uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1, int64_t n2,
                          int64_t n3, int64_t s0, int64_t s1, int64_t s2);
