// y [rows][h] = silu(a) b probs for x = [a, b] [rows][2 h] of `dtype` and probs [rows], real.
void hal_grouped_swiglu_fwd(int dtype, uintptr_t x, uintptr_t probs, uintptr_t y, int64_t rows, int64_t h);
// dx of `dtype` and dprobs, real; either may be 0 (not computed).
void hal_grouped_swiglu_bwd(int dtype, uintptr_t x, uintptr_t probs, uintptr_t dy, uintptr_t dx, uintptr_t dprobs,
                            int64_t rows, int64_t h);
