// The weight gradient of a linear layer, dW = dY^T X, in float32, with the bias gradient on the way.
//
// The product sums over tokens, so both operands are read across their rows. Both are packed as they lie into panels of the
// micro-kernel (gemm.h), DEPTH tokens at a time: X into panels of 48 columns, which all threads share, and blocks of ROWS
// columns of dY into panels of 8, private to the thread that multiplies them. While a block of dY is in cache, its columns
// are summed up for the bias.
//
// Every element is a sum over blocks of DEPTH tokens in order, so the result does not depend on the number of threads.
// Memory traffic: X and dY are read once (dY once per COLUMNS columns of X), dW is read and written once per DEPTH tokens.
#define FA_KIND_F32
#include "vectors.h"
#include "gemm.h"

#include "linear_api.h"

#include <omp.h>

enum {
    DEPTH = 192,             // tokens per block: a panel of X (36 KiB) and one of dY stay in L1
    ROWS = 96,               // columns of dY per block
    PANEL = 3 * W,           // columns of X per panel
    COLUMNS = 96 * PANEL,    // columns of X packed at a time: 3.5 MiB, which the outer caches hold
    FEW = 8,                 // blocks per thread
};

// Panels of `width` columns: dst[panel][k][width] = src[k][columns from panel * width on], zero beyond the last column.
static void pack_panel(float *dst, const float *src, int64_t stride, int64_t depth, int64_t columns, int64_t width) {
    if (columns == width) {
        for (int64_t k = 0; k < depth; k++) memcpy(dst + k * width, src + k * stride, (size_t)width * sizeof(float));
        return;
    }
    for (int64_t k = 0; k < depth; k++) {
        memcpy(dst + k * width, src + k * stride, (size_t)columns * sizeof(float));
        memset(dst + k * width + columns, 0, (size_t)(width - columns) * sizeof(float));
    }
}

// sums[c] += the sum of column c of src.
static void add_sums(double *sums, const float *src, int64_t stride, int64_t depth, int64_t columns) {
    float part[ROWS] = {0};
    for (int64_t k = 0; k < depth; k++)
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) part[c] += src[k * stride + c];
    for (int64_t c = 0; c < columns; c++) sums[c] += part[c];
}

// A tile of dW, m <= MR rows, n <= PANEL columns. Tiles that are not whole pass through a buffer.
static void tile(int64_t m, int64_t n, int64_t depth, const float *a, const float *b, float *c, int64_t ldc, int add) {
    if (m == MR && n == PANEL) {
        for (int64_t i = 0; i < MR; i++)  // on its way while the sum is made
            for (int64_t j = 0; j < PANEL; j += W) __builtin_prefetch(c + i * ldc + j, 1);
        stripe(MR, 3, MR, depth, a, 1, MR, b, PANEL, c, ldc, add, NULL);
        return;
    }
    float whole[MR * PANEL] __attribute__((aligned(64)));
    stripes(MR, (n + W - 1) / W, depth, a, 1, MR, b, PANEL, whole, PANEL, 0, NULL);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) c[i * ldc + j] = whole[i * PANEL + j] + (add ? c[i * ldc + j] : 0);
}

void hal_linear_wgrad(uintptr_t dy_, uintptr_t x_, uintptr_t dweight, uintptr_t dbias, int64_t rows, int64_t n_out,
                      int64_t n_in) {
    const float *dy = (const float *)dy_, *x = (const float *)x_;
    float *dw = (float *)dweight;
    const int64_t blocks = (n_out + ROWS - 1) / ROWS, threads = omp_get_max_threads();
    const int64_t parts = blocks < FEW * threads ? threads : 1;  // few blocks are shared out by panels of X, too
    const int64_t shared = (n_in < COLUMNS ? (n_in + PANEL - 1) / PANEL * PANEL : COLUMNS) * DEPTH, own = ROWS * DEPTH;
    float *workspace = hal_scratch((size_t)(shared + threads * own) * sizeof(float) + (size_t)n_out * sizeof(double));
    double *sums = (double *)(workspace + shared + threads * own);
    memset(sums, 0, (size_t)n_out * sizeof(double));
#pragma omp parallel num_threads(threads)
    for (int64_t j0 = 0; j0 < n_in; j0 += COLUMNS) {
        const int64_t n = j0 + COLUMNS < n_in ? COLUMNS : n_in - j0, panels = (n + PANEL - 1) / PANEL;
        float *mine = workspace + shared + omp_get_thread_num() * own;
        for (int64_t k0 = 0; k0 < rows; k0 += DEPTH) {
            const int64_t depth = k0 + DEPTH < rows ? DEPTH : rows - k0;
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++)
                pack_panel(workspace + p * PANEL * DEPTH, x + k0 * n_in + j0 + p * PANEL, n_in, depth,
                           n - p * PANEL < PANEL ? n - p * PANEL : PANEL, PANEL);
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < blocks * parts; item++) {
                const int64_t i0 = item / parts * ROWS, m = i0 + ROWS < n_out ? ROWS : n_out - i0, part = item % parts;
                const float *from = dy + k0 * n_out + i0;
                for (int64_t i = 0; i < m; i += MR)
                    pack_panel(mine + i * DEPTH, from + i, n_out, depth, m - i < MR ? m - i : MR, MR);
                if (dbias && j0 == 0 && part == 0) add_sums(sums + i0, from, n_out, depth, m);
                for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++)
                    for (int64_t i = 0; i < m; i += MR)
                        tile(m - i < MR ? m - i : MR, n - p * PANEL < PANEL ? n - p * PANEL : PANEL, depth,
                             mine + i * DEPTH, workspace + p * PANEL * DEPTH, dw + (i0 + i) * n_in + j0 + p * PANEL,
                             n_in, k0 > 0);
            }
        }
    }
    if (dbias)
        for (int64_t i = 0; i < n_out; i++) ((float *)dbias)[i] = (float)sums[i];
}
