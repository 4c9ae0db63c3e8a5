// y = softmax(scale x) over the last dimension of x [b, n, sq, sk] (contiguous), 0 where masked and in dead rows.
// mask: bytes, nonzero = masked out, addressed through four strides (0 = broadcast), or 0. causal: j <= i + sk - sq
// only.
// lse: real [b, n, sq], log of the sum of exponentials per row; or 0.
void hal_softmax_fwd(int dtype, uintptr_t x, uintptr_t y, double scale, int causal, int64_t b, int64_t n, int64_t sq,
                     int64_t sk, uintptr_t lse, uintptr_t mask, int64_t mb, int64_t mn, int64_t mq, int64_t mk);
// dx = scale y (dy - sum(dy y)), everything contiguous; y as given, or exp(scale x - lse) where y is not 0, if x is
// given.
void hal_softmax_bwd(int dtype, uintptr_t y, uintptr_t x, uintptr_t lse, uintptr_t dy, uintptr_t dx, double scale,
                     int causal, int64_t rows, int64_t sq, int64_t sk);
