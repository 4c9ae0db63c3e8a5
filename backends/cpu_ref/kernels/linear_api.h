// dweight [n_out][n_in] = dy^T x and dbias [n_out] = the sum of dy's rows (0: not wanted), for contiguous float
// dy [rows][n_out] and x [rows][n_in].
void hal_linear_wgrad(uintptr_t dy, uintptr_t x, uintptr_t dweight, uintptr_t dbias, int64_t rows, int64_t n_out,
                      int64_t n_in);
