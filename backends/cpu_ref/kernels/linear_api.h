// dweight [n_out][n_in] = dy^T x and dbias [n_out] = the sum of dy's rows (dbias = 0: not computed); with `add`, both
// are added to the present values. dy [rows][n_out] and x [rows][n_in], rows > 0, are contiguous tensors of `dtype`;
// the results are floats. Returns 0, and does nothing, for a dtype that the kernels do not multiply on this processor.
int hal_linear_wgrad(int64_t dtype, uintptr_t dy, uintptr_t x, uintptr_t dweight, uintptr_t dbias, int64_t rows,
                     int64_t n_out, int64_t n_in, int add);

// y [rows][n_out] = x w^T + bias (bias = 0: none), all floats. The rows of x [rows][n_in] are contiguous and begin ldx
// apart, w's element [o][i] is at o * w_out + i * w_in, bias and y are contiguous. Returns 0, and does nothing, if both
// n_out and n_in exceed 32, beyond which this is not faster than BLAS.
int hal_linear_narrow(uintptr_t x, int64_t ldx, uintptr_t w, int64_t w_out, int64_t w_in, uintptr_t bias, uintptr_t y,
                      int64_t rows, int64_t n_in, int64_t n_out);

// Whether these kernels multiply a dtype in 512-bit registers; only then are they faster than BLAS.
int hal_linear_is_fast(int64_t dtype);
