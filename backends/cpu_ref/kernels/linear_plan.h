// The arithmetic kinds of linear's weight gradient (linear_<kind>.c). bf16 exists where the CPU multiplies bfloat16.
#pragma once
#include <stdint.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LINEAR_WIDE 1
#ifdef __AVX512BF16__
#define LINEAR_HAVE_BF16 1
#endif
#endif

// dw [n_out][n_in] and dbias [n_out] (NULL: not computed). add: to the present values. stream: dw begins on a cache line,
// as do its rows, and is written with non-temporal stores where it is written once.
void linear_wgrad_f32(const void *dy, const void *x, float *dw, float *dbias, int64_t rows, int64_t n_out, int64_t n_in,
                      int add, int stream);
void linear_wgrad_bf16(const void *dy, const void *x, float *dw, float *dbias, int64_t rows, int64_t n_out, int64_t n_in,
                       int add, int stream);

// The same where the narrower of dy and x has at most LINEAR_NARROW columns.
enum { LINEAR_NARROW = 80 };
void linear_wgrad_narrow(const float *dy, const float *x, float *dw, float *dbias, int64_t rows, int64_t n_out,
                         int64_t n_in, int add);

// y [rows][n_out] = x w^T + bias (NULL: none) where n_out or n_in is at most LINEAR_FEW. The rows of x are ldx apart,
// and w's element [o][i] is at w[o * w_out + i * w_in].
enum { LINEAR_FEW = 32 };
void linear_narrow(const float *x, int64_t ldx, const float *w, int64_t w_out, int64_t w_in, const float *bias,
                   float *y, int64_t rows, int64_t n_in, int64_t n_out);
