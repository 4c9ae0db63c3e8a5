// The weight gradient of a linear layer, dW = dY^T X, in float32, with the bias gradient on the way.
//
// The product sums over tokens, so both operands are read across their rows. Both are packed as they lie into panels of the
// micro-kernel (gemm.h), DEPTH tokens at a time: X into panels of 48 columns, and blocks of ROWS columns of dY into panels
// of 8, private to the thread that multiplies them. While a block of dY is in cache, its columns are summed up for the bias.
//
// Threads share the work in one of two ways. Together: all panels of X are packed first, then blocks of dY are dealt out.
// Apart: each thread packs some panels of X for itself and multiplies them with all of dY. Then none waits for another or
// reads what another wrote, which is slow between processors that share no cache; but every one packs all of dY.
//
// Every element is a sum over blocks of DEPTH tokens in order, so the result does not depend on the number of threads.
// Memory traffic: X is read once, dY once per COLUMNS columns of X (apart: by every thread), dW is read and written once
// per DEPTH tokens.
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

// What a thread needs for its share of one block of tokens: panels of X as packed, room for a packed block of dY.
struct share {
    const float *dy, *x;
    float *dw, *panels, *rows;
    double *sums;  // of dY's columns, or 0
    int64_t depth, n_out, n_in, columns;
    int add;
};

static void pack_columns(const struct share *s, int64_t panel) {
    const int64_t from = panel * PANEL, columns = s->columns - from;
    pack_panel(s->panels + from * DEPTH, s->x + from, s->n_in, s->depth, columns < PANEL ? columns : PANEL, PANEL);
}

// One block of dY's columns times the panels [p0, p1).
static void multiply_block(const struct share *s, int64_t block, int64_t p0, int64_t p1) {
    const int64_t i0 = block * ROWS, m = i0 + ROWS < s->n_out ? ROWS : s->n_out - i0;
    for (int64_t i = 0; i < m; i += MR)
        pack_panel(s->rows + i * DEPTH, s->dy + i0 + i, s->n_out, s->depth, m - i < MR ? m - i : MR, MR);
    if (s->sums) add_sums(s->sums + i0, s->dy + i0, s->n_out, s->depth, m);
    for (int64_t p = p0; p < p1; p++) {
        const int64_t n = s->columns - p * PANEL < PANEL ? s->columns - p * PANEL : PANEL;
        for (int64_t i = 0; i < m; i += MR)
            tile(m - i < MR ? m - i : MR, n, s->depth, s->rows + i * DEPTH, s->panels + p * PANEL * DEPTH,
                 s->dw + (i0 + i) * s->n_in + p * PANEL, s->n_in, s->add);
    }
}

void hal_linear_wgrad(uintptr_t dy_, uintptr_t x_, uintptr_t dweight, uintptr_t dbias, int64_t rows, int64_t n_out,
                      int64_t n_in) {
    const float *dy = (const float *)dy_, *x = (const float *)x_;
    float *dw = (float *)dweight;
    const int64_t blocks = (n_out + ROWS - 1) / ROWS, threads = omp_get_max_threads();
    const int64_t shared = (n_in < COLUMNS ? (n_in + PANEL - 1) / PANEL * PANEL : COLUMNS) * DEPTH, own = ROWS * DEPTH;
    float *workspace = hal_scratch((size_t)(shared + threads * own) * sizeof(float) + (size_t)n_out * sizeof(double));
    double *sums = (double *)(workspace + shared + threads * own);
    memset(sums, 0, (size_t)n_out * sizeof(double));
#pragma omp parallel num_threads(threads)
    for (int64_t j0 = 0; j0 < n_in; j0 += COLUMNS) {
        const int64_t n = j0 + COLUMNS < n_in ? COLUMNS : n_in - j0, panels = (n + PANEL - 1) / PANEL;
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        // Packing dY takes a tenth of the time of multiplying it with one panel. With 16 panels per thread that is nothing;
        // with 4 less than blocks lose that cannot be dealt out evenly; with one less than threads that get no block.
        const int apart = panels >= 16 * team || (panels >= 4 * team && blocks < 8 * team) ||
                          (panels >= team && blocks < team);
        for (int64_t k0 = 0; k0 < rows; k0 += DEPTH) {
            const int64_t depth = k0 + DEPTH < rows ? DEPTH : rows - k0;
            const struct share share = {
                dy + k0 * n_out, x + k0 * n_in + j0, dw + j0, workspace, workspace + shared + me * own,
                dbias && j0 == 0 && !(apart && me > 0) ? sums : 0, depth, n_out, n_in, n, k0 > 0,
            };
            if (apart) {
                const int64_t p0 = panels * me / team, p1 = panels * (me + 1) / team;
                for (int64_t p = p0; p < p1; p++) pack_columns(&share, p);
                for (int64_t block = 0; block < blocks; block++) multiply_block(&share, block, p0, p1);
            } else {
#pragma omp for schedule(static)
                for (int64_t p = 0; p < panels; p++) pack_columns(&share, p);
#pragma omp for schedule(dynamic, 1)
                for (int64_t block = 0; block < blocks; block++) multiply_block(&share, block, 0, panels);
            }
        }
#pragma omp barrier  // the next panels lie where these do, and may be shared out differently
    }
    if (dbias)
        for (int64_t i = 0; i < n_out; i++) ((float *)dbias)[i] = (float)sums[i];
}
