// Rows of x [rows, width] (contiguous), weight and bias [width] as real (float; double for float64 x).
// centered = 1: layer norm; 0: RMS norm (bias, mean, dbias unused: 0). mean, rstd: real [rows].
void hal_norm_fwd(int dtype, int centered, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, uintptr_t mean,
                  uintptr_t rstd, double eps, int64_t rows, int64_t width);
void hal_norm_bwd(int dtype, int centered, uintptr_t x, uintptr_t weight, uintptr_t mean, uintptr_t rstd, uintptr_t dy,
                  uintptr_t dx, uintptr_t dweight, uintptr_t dbias, int64_t rows, int64_t width);
