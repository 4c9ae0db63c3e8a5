// y [rows][n_out] = x [rows][n_in] times the transpose of weight[e] [n_out][n_in], for the rows of every group e of
// sizes [experts] that has at most `most` rows; all contiguous, of `dtype`. The rows of other groups are not written.
// Returns 0, and does nothing, for a dtype that the kernels do not multiply on this processor.
int hal_grouped_linear(int64_t dtype, uintptr_t x, uintptr_t weight, uintptr_t sizes, uintptr_t y, int64_t experts,
                       int64_t n_out, int64_t n_in, int64_t most);
// dx [rows][n_in] = dy [rows][n_out] times weight[e], likewise; 0 also for an n_in that is no multiple of a cache line, or
// an odd n_out of bfloat16.
int hal_grouped_linear_dx(int64_t dtype, uintptr_t dy, uintptr_t weight, uintptr_t sizes, uintptr_t dx, int64_t experts,
                          int64_t n_out, int64_t n_in, int64_t most);
// dweight[e] [n_out][n_in], of `dtype`, = dy^T x of the rows of every group e of at most `most` rows, including empty ones.
// The gradients of other groups are not written. Returns 0, and does nothing, like hal_grouped_linear_dx.
int hal_grouped_linear_dw(int64_t dtype, uintptr_t dy, uintptr_t x, uintptr_t sizes, uintptr_t dweight, int64_t experts,
                          int64_t n_out, int64_t n_in, int64_t most);
// dweight[e] [n_out][n_in] (floats) = dy^T x of the rows of group e, or with `add` plus the present values.
int hal_grouped_linear_wgrad(int64_t dtype, uintptr_t dy, uintptr_t x, uintptr_t sizes, uintptr_t dweight, int64_t experts,
                             int64_t n_out, int64_t n_in, int add);
