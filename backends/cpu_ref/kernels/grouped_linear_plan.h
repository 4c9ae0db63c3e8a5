// The arithmetic kinds of grouped products (grouped_linear_<kind>.c), which need 512-bit registers (linear_plan.h).
#pragma once
#include <stdint.h>

// Groups of rows and their weights [experts][n_out][n_in]; those with more than `most` rows are left out.
struct groups {
    const int64_t *sizes;
    int64_t experts, n_out, n_in, most;
};

void grouped_linear_f32(const void *x, const void *weight, void *y, const struct groups *groups);
void grouped_linear_bf16(const void *x, const void *weight, void *y, const struct groups *groups);
void grouped_linear_dx_f32(const void *dy, const void *weight, void *dx, const struct groups *groups);
void grouped_linear_dx_bf16(const void *dy, const void *weight, void *dx, const struct groups *groups);
void grouped_linear_dw_bf16(const void *dy, const void *x, void *dweight, const struct groups *groups);
