// Products of small groups of rows with their experts' weights. One arithmetic kind (vectors.h): float32, or bfloat16
// pairs multiplied into floats. Sums are float32 in both. Included once by grouped_linear_<kind>.c.
//
// A group of a few rows reads its whole weight to compute little, so packing the weight, as a large product does, would
// cost as much as multiplying. Both operands of y = x w^T are contiguous along the summed dimension: a block of 6 rows of
// x and 4 of w is 24 vectors of partial products in registers, 10 loads per 24 multiply-adds, whose lanes are added at
// the end. Only x, which is small, is packed, by every thread. The summed dimension is cut into pieces of DEPTH vectors, so that the 4 pieces of w stay in L1 for all rows of
// the group. Threads share blocks of ROWS rows of w of all groups.
//
// dx = dy w needs no sum over lanes: rows of w are the vectors (gemm.h). Threads share blocks of COLUMNS columns of w of
// all groups; DEPTH_DX rows of w at a time are added to the block of dx, which stays in L2.
//
// Every element is summed in an order that depends on the shape only. Memory traffic: every weight of a group that has
// rows is read once.
#include "vectors.h"
#include "gemm.h"

#include "grouped_linear_plan.h"

#ifdef FA_KIND_BF16
typedef bf16 elem;
#define STORE_ELEM store_bf16
#else
typedef f32 elem;
#define STORE_ELEM store_f32
#endif

enum {
    M = 6,                    // rows of x per block
    N = 4,                    // rows of w per block
    STEP = W * KU,            // elements per vector
    DEPTH = 64,               // vectors per piece of a row: 4 KiB
    MOST = 64,                // the largest group
    ROWS = 32,                // rows of w per task
    COLUMNS = 960,            // columns of w per task of dx: less than a page per row
    DEPTH_DX = 32,            // rows of w at a time
};

#ifdef FA_KIND_BF16
HAL_INLINE uvec load_first(const elem *p, int64_t count) {
    return (uvec)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
}
#else
HAL_INLINE uvec load_first(const elem *p, int64_t count) {
    return (uvec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}
#endif

// packed[block][step][M][STEP] = x [m][n_in], zero beyond the last element; missing rows of the last block are not used.
// Rows of x are often a multiple of 4 KiB apart, where those of a block would evict each other from L1.
static void pack_x(int64_t m, int64_t n_in, const elem *x, elem *packed) {
    const int64_t steps = (n_in + STEP - 1) / STEP;
    for (int64_t i = 0; i < m; i++) {
        elem *to = packed + (i / M * steps * M + i % M) * STEP;
        for (int64_t k = 0; k < n_in; k += STEP, to += M * STEP) {
            const int64_t count = n_in - k < STEP ? n_in - k : STEP;
            if (count == STEP) store_units(to, load_units(x + i * n_in + k));
            else store_units(to, load_first(x + i * n_in + k, count));
        }
    }
}

// sums[i][j] += x[i] . w[j] over `depth` elements, for m packed rows of x and n rows of w (constants after inlining).
// ahead: whether the N rows of w that follow are prefetched.
HAL_INLINE void dots(int m, int n, int ahead, int64_t depth, const elem *x, const elem *w, int64_t ld, float *sums) {
    vec acc[M][N];
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) acc[i][j] = (vec){0};
    for (int64_t k = 0; k < depth; k += STEP, x += M * STEP) {
        uvec wj[N];
        if (depth - k >= STEP) {
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) {
                wj[j] = load_units(w + j * ld + k);
                // The next rows, which would otherwise come from memory while nothing is multiplied.
                if (ahead) __builtin_prefetch(w + (N + j) * ld + k, 0, 2);
            }
        } else {
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) wj[j] = load_first(w + j * ld + k, depth - k);
        }
#pragma GCC unroll 6
        for (int i = 0; i < m; i++) {
            const uvec xi = load_units(x + i * STEP);
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) acc[i][j] = MAC_LANES(acc[i][j], xi, wj[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) sums[i * N + j] += _mm512_reduce_add_ps((__m512)acc[i][j]);
}

// The same for all m rows; block: elements of a packed block of rows.
HAL_INLINE void all_dots(int n, int64_t m, int64_t depth, const elem *x, int64_t block, const elem *w, int64_t ld,
                         float *sums) {
    if (m >= M) {
        dots(M, n, 1, depth, x, w, ld, sums);
        for (m -= M, x += block, sums += M * N; m >= M; m -= M, x += block, sums += M * N)
            dots(M, n, 0, depth, x, w, ld, sums);
    }
    switch (m) {
        case 5: dots(5, n, 1, depth, x, w, ld, sums); break;
        case 4: dots(4, n, 1, depth, x, w, ld, sums); break;
        case 3: dots(3, n, 1, depth, x, w, ld, sums); break;
        case 2: dots(2, n, 1, depth, x, w, ld, sums); break;
        case 1: dots(1, n, 1, depth, x, w, ld, sums); break;
        default: break;
    }
}

// y [m][ldy], rows from..to of w [..][n_in]; x is packed.
static void some_columns(int64_t m, int64_t n_in, const elem *x, const elem *w, elem *y, int64_t ldy, int64_t from,
                         int64_t to) {
    // With a single block of rows there is nothing to keep in L1.
    const int64_t piece = m <= M ? n_in : DEPTH * STEP, block = (n_in + STEP - 1) / STEP * STEP * M;
    for (int64_t j = from; j < to; j += N) {
        float sums[MOST * N] = {0};
        const int n = to - j < N ? (int)(to - j) : N;
        for (int64_t k = 0; k < n_in; k += piece) {
            const int64_t depth = k + piece < n_in ? piece : n_in - k;
            if (n == N) all_dots(N, m, depth, x + k * M, block, w + j * n_in + k, n_in, sums);
            else
                for (int c = 0; c < n; c++) all_dots(1, m, depth, x + k * M, block, w + (j + c) * n_in + k, n_in, sums + c);
        }
        for (int64_t i = 0; i < m; i++)
            for (int c = 0; c < n; c++) STORE_ELEM(y + i * ldy + j + c, sums[i * N + c]);
    }
}

static int64_t first_row(const struct groups *g, int64_t expert) {
    int64_t row = 0;
    for (int64_t e = 0; e < expert; e++) row += g->sizes[e];
    return row;
}

void CAT(grouped_linear_, GROUPED_KIND)(const void *x_, const void *w_, void *y_, const struct groups *g) {
    const elem *x = x_, *w = w_;
    elem *y = y_;
    const int64_t blocks = (g->n_out + ROWS - 1) / ROWS, rows = first_row(g, g->experts);
    const int64_t packed = (MOST + M - 1) / M * M * ((g->n_in + STEP - 1) / STEP * STEP);
#pragma omp parallel if (rows * g->n_in * g->n_out >= HAL_PARALLEL_MIN * 16)
    {
        elem *panel = hal_scratch((size_t)packed * sizeof(elem));
        int64_t of = -1;  // the expert whose rows are packed
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t e = 0; e < g->experts; e++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t m = g->sizes[e], from = block * ROWS, to = from + ROWS < g->n_out ? from + ROWS : g->n_out;
                if (m <= 0 || m > g->most) continue;
                const int64_t start = first_row(g, e);
                if (of != e) pack_x(m, g->n_in, x + start * g->n_in, panel);
                of = e;
                some_columns(m, g->n_in, panel, w + e * g->n_out * g->n_in, y + start * g->n_out, g->n_out, from, to);
            }
    }
}

#ifdef FA_KIND_F32
// dx [m][count] for `count` columns of w [n_out][n_in], a multiple of W.
static void dx_columns(int64_t m, int64_t n_out, int64_t n_in, int64_t count, const float *dy, const float *w, float *dx) {
    enum { PANEL = 3 * W };
    for (int64_t k = 0; k < n_out; k += DEPTH_DX) {
        const int64_t depth = k + DEPTH_DX < n_out ? DEPTH_DX : n_out - k;
        for (int64_t c = 0; c < count; c += PANEL) {
            const int64_t vectors = (c + PANEL < count ? PANEL : count - c) / W;
            const float *panel = w + k * n_in + c;
            for (int64_t i = 0; i < depth; i++) __builtin_prefetch(panel + i * n_in + 2 * PANEL);
            if (k) stripes(m, vectors, depth, dy + k, n_out, 1, panel, n_in, dx + c, n_in, 1, NULL);
            else stripes(m, vectors, depth, dy + k, n_out, 1, panel, n_in, dx + c, n_in, 0, NULL);
        }
    }
}

void grouped_linear_dx_f32(const void *dy_, const void *w_, void *dx_, const struct groups *g) {
    const float *dy = dy_, *w = w_;
    float *dx = dx_;
    const int64_t blocks = (g->n_in + COLUMNS - 1) / COLUMNS;
    const int64_t rows = first_row(g, g->experts);
#pragma omp parallel for schedule(dynamic, 1) collapse(2) if (rows * g->n_in * g->n_out >= HAL_PARALLEL_MIN * 16)
    for (int64_t e = 0; e < g->experts; e++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t m = g->sizes[e], from = block * COLUMNS;
            const int64_t count = from + COLUMNS < g->n_in ? COLUMNS : g->n_in - from;
            if (m <= 0 || m > g->most) continue;
            const int64_t start = first_row(g, e);
            dx_columns(m, g->n_out, g->n_in, count, dy + start * g->n_out, w + e * g->n_out * g->n_in + from,
                       dx + start * g->n_in + from);
        }
}
#endif
