// Products of groups of rows with their experts' weights: entry points (see grouped_linear_kind.h for the algorithm).
#include "common.h"
#include "grouped_linear_api.h"
#include "grouped_linear_plan.h"
#include "linear_plan.h"

int hal_grouped_linear(int64_t dtype, uintptr_t x, uintptr_t weight, uintptr_t sizes, uintptr_t y, int64_t experts,
                       int64_t n_out, int64_t n_in, int64_t most) {
    const struct groups groups = {(const int64_t *)sizes, experts, n_out, n_in, most};
#ifdef LINEAR_WIDE
    if (dtype == HAL_F32) {
        grouped_linear_f32((const void *)x, (const void *)weight, (void *)y, &groups);
        return 1;
    }
#endif
#ifdef LINEAR_HAVE_BF16
    if (dtype == HAL_BF16) {
        grouped_linear_bf16((const void *)x, (const void *)weight, (void *)y, &groups);
        return 1;
    }
#endif
    (void)dtype, (void)x, (void)weight, (void)y, (void)groups;
    return 0;
}

int hal_grouped_linear_dx(int64_t dtype, uintptr_t dy, uintptr_t weight, uintptr_t sizes, uintptr_t dx, int64_t experts,
                          int64_t n_out, int64_t n_in, int64_t most) {
    const struct groups groups = {(const int64_t *)sizes, experts, n_out, n_in, most};
#ifdef LINEAR_WIDE
    if (dtype == HAL_F32 && n_in % 16 == 0) {
        grouped_linear_dx_f32((const void *)dy, (const void *)weight, (void *)dx, &groups);
        return 1;
    }
#endif
#ifdef LINEAR_HAVE_BF16
    if (dtype == HAL_BF16 && n_in % 32 == 0 && n_out % 2 == 0) {
        grouped_linear_dx_bf16((const void *)dy, (const void *)weight, (void *)dx, &groups);
        return 1;
    }
#endif
    (void)dtype, (void)dy, (void)weight, (void)dx, (void)groups;
    return 0;
}

int hal_grouped_linear_dw(int64_t dtype, uintptr_t dy, uintptr_t x, uintptr_t sizes, uintptr_t dweight, int64_t experts,
                          int64_t n_out, int64_t n_in, int64_t most) {
    const struct groups groups = {(const int64_t *)sizes, experts, n_out, n_in, most};
#ifdef LINEAR_HAVE_BF16
    if (dtype == HAL_BF16 && n_in % 32 == 0) {
        grouped_linear_dw_bf16((const void *)dy, (const void *)x, (void *)dweight, &groups);
        return 1;
    }
#endif
    (void)dtype, (void)dy, (void)x, (void)dweight, (void)groups;
    return 0;
}

int hal_grouped_linear_wgrad(int64_t dtype, uintptr_t dy_, uintptr_t x_, uintptr_t sizes_, uintptr_t dweight,
                             int64_t experts, int64_t n_out, int64_t n_in, int add) {
    const int64_t *sizes = (const int64_t *)sizes_, bytes = dtype == HAL_F32 ? 4 : 2;
    const char *dy = (const char *)dy_, *x = (const char *)x_;
    float *dw = (float *)dweight;
#ifdef LINEAR_WIDE
#ifndef LINEAR_HAVE_BF16
    if (dtype != HAL_F32) return 0;
#endif
    if (dtype != HAL_F32 && dtype != HAL_BF16) return 0;
    const int stream = !add && streams(dweight, experts * n_out * n_in * 4, n_in * 4) == STREAM_LINES;
    for (int64_t e = 0; e < experts; e++, dw += n_out * n_in) {
        const int64_t rows = sizes[e];
        if (!rows) {
            if (!add) memset(dw, 0, (size_t)(n_out * n_in) * sizeof(float));
            continue;
        }
#ifdef LINEAR_HAVE_BF16
        if (dtype == HAL_BF16) linear_wgrad_bf16(dy, x, dw, NULL, rows, n_out, n_in, add, stream);
        else
#endif
            linear_wgrad_f32(dy, x, dw, NULL, rows, n_out, n_in, add, stream);
        dy += rows * n_out * bytes;
        x += rows * n_in * bytes;
    }
    return 1;
#else
    (void)sizes, (void)bytes, (void)dy, (void)x, (void)dw, (void)experts, (void)n_out, (void)n_in, (void)add;
    return 0;
#endif
}
