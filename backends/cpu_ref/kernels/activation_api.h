// kind: 0 silu, 1 gelu (erf), 2 gelu (tanh), 3 gelu (fast: x sigmoid(1.702 x)).
// gated = 1: x [rows, 2 width], y = act(x1 + b1) (x2 + b2); gated = 0: x [rows, width], y = act(x + b). Contiguous.
// bias: real, as wide as the rows of x, or 0. dbias: real, written if there is a bias.
void hal_activation_fwd(int dtype, int kind, int gated, uintptr_t x, uintptr_t bias, uintptr_t y, int64_t rows,
                        int64_t width);
void hal_activation_bwd(int dtype, int kind, int gated, uintptr_t x, uintptr_t bias, uintptr_t dy, uintptr_t dx,
                        uintptr_t dbias, int64_t rows, int64_t width);
