// Products of linear layers: entry points (see linear_kind.h and linear_narrow.h for the algorithms).
#include "common.h"
#include "linear_api.h"
#include "linear_plan.h"

int hal_linear_is_fast(int64_t dtype) {
#ifdef LINEAR_WIDE
    if (dtype == HAL_F32) return 1;
#endif
#ifdef LINEAR_HAVE_BF16
    if (dtype == HAL_BF16) return 1;
#endif
    (void)dtype;
    return 0;
}

// Whether the narrower of dy and x is read in place (linear_wgrad_narrow). If it is x, the result is transposed, which
// takes as long as multiplying some hundred rows.
static int in_place(int64_t rows, int64_t n_out, int64_t n_in) {
    return n_in < n_out ? n_in <= LINEAR_NARROW && rows >= 512 : n_out <= LINEAR_NARROW;
}

int hal_linear_wgrad(int64_t dtype, uintptr_t dy, uintptr_t x, uintptr_t dweight, uintptr_t dbias, int64_t rows,
                     int64_t n_out, int64_t n_in, int add) {
    const int stream = !add && streams(dweight, n_out * n_in * 4, n_in * 4) == STREAM_LINES;
    if (dtype == HAL_F32) {
        if (in_place(rows, n_out, n_in))
            linear_wgrad_narrow((const float *)dy, (const float *)x, (float *)dweight, (float *)dbias, rows, n_out,
                                n_in, add);
        else
            linear_wgrad_f32((const void *)dy, (const void *)x, (float *)dweight, (float *)dbias, rows, n_out, n_in,
                             add, stream);
        return 1;
    }
#ifdef LINEAR_HAVE_BF16
    if (dtype == HAL_BF16) {
        linear_wgrad_bf16((const void *)dy, (const void *)x, (float *)dweight, (float *)dbias, rows, n_out, n_in, add,
                         stream);
        return 1;
    }
#endif
    return 0;
}

int hal_linear_narrow(uintptr_t x, int64_t ldx, uintptr_t w, int64_t w_out, int64_t w_in, uintptr_t bias, uintptr_t y,
                      int64_t rows, int64_t n_in, int64_t n_out) {
    if (n_out > LINEAR_FEW && n_in > LINEAR_FEW) return 0;
    linear_narrow((const float *)x, ldx, (const float *)w, w_out, w_in, (const float *)bias, (float *)y, rows, n_in,
                  n_out);
    return 1;
}
