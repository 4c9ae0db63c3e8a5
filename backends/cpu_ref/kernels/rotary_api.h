// x with dimensions [n0, n1, n2, d] and strides xs0, xs1, xs2 (elements; the last is 1), y contiguous. The first 2 half
// channels are rotated by the angles whose real cosines and sines lie at i0 cs0 + i1 cs1 + i2 cs2 + pair; the rest is
// copied.
// sign: +1 forward, -1 backward (the inverse rotation).
void hal_rotary(int dtype, int interleaved, double sign, uintptr_t x, uintptr_t cos, uintptr_t sin, uintptr_t y, int64_t n0,
                int64_t n1, int64_t n2, int64_t d, int64_t half, int64_t xs0, int64_t xs1, int64_t xs2, int64_t cs0,
                int64_t cs1, int64_t cs2);
