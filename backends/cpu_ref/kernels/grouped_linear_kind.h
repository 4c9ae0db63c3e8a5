// Products of small groups of rows with their experts' weights. One arithmetic kind (vectors.h): float32, or bfloat16
// pairs multiplied into floats. Sums are float32 in both. Included once by grouped_linear_<kind>.c.
//
// A group of a few rows reads its whole weight to compute little, so packing the weight, as a large product does, would
// cost as much as multiplying. Both operands of y = x w^T are contiguous along the summed dimension: a block of 4 rows of
// x and 6 of w is 24 vectors of partial products in registers, 10 loads per 24 multiply-adds, whose lanes are added at
// the end. Only x, which is small, is packed, by every thread. The summed dimension is cut into pieces of DEPTH vectors,
// so that the 6 pieces of w stay in L1 for all rows of the group, which come from L2. Threads share blocks of ROWS rows
// of w of all groups.
//
// dx = dy w needs no sum over lanes: rows of w are the vectors (gemm.h). Threads share blocks of COLUMNS columns of w of
// all groups; DEPTH_DX rows of w at a time are added to the block of dx, which stays in L2. If a group has more rows than
// one block, it reads w more than once, so w is packed: in place, rows of 4 KiB would evict each other from L1.
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
    M = 4,                    // rows of x per block
    N = 6,                    // rows of w per block
    STEP = W * KU,            // elements per vector
    DEPTH = 32,               // vectors per piece of a row: 2 KiB
    MOST = 64,                // the largest group
    ROWS = 96,                // rows of w per task
    COLUMNS = 960,            // columns of w per task of dx: less than a page per row
    DEPTH_DX = 32,            // rows of w at a time in place
    DEPTH_PACKED = 128,       // and if they are packed: 48 KiB
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

// to[j] += the sum of the lanes of acc[j], for 4 vectors at a time: half the shuffles of a sum by itself.
HAL_INLINE void add_lanes_4(float *to, vec a, vec b, vec c, vec d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    const __m512 abcd = _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd),
                                      (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    const __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sum));
}

// sums[i][j] += x[i] . w[j] over `depth` elements, for m packed rows of x and n rows of w (constants after inlining).
// The first `ahead` rows of `next` are prefetched (a constant, too).
HAL_INLINE void dots(int m, int n, int ahead, int64_t depth, const elem *x, const elem *w, const elem *next, int64_t ld,
                     float *sums) {
    vec acc[M * N];  // those of a row of x side by side
#pragma GCC unroll 24
    for (int i = 0; i < m * n; i++) acc[i] = (vec){0};
    for (int64_t k = 0; k < depth; k += STEP, x += M * STEP) {
        uvec wj[N];
#pragma GCC unroll 6
        for (int j = 0; j < ahead; j++) __builtin_prefetch(next + j * ld + k, 0, 2);
        if (depth - k >= STEP) {
#pragma GCC unroll 6
            for (int j = 0; j < n; j++) wj[j] = load_units(w + j * ld + k);
        } else {
#pragma GCC unroll 6
            for (int j = 0; j < n; j++) wj[j] = load_first(w + j * ld + k, depth - k);
        }
#pragma GCC unroll 4
        for (int i = 0; i < m; i++) {
            const uvec xi = load_units(x + i * STEP);
#pragma GCC unroll 6
            for (int j = 0; j < n; j++) acc[i * n + j] = MAC_LANES(acc[i * n + j], xi, wj[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i + 4 <= m * n; i += 4) add_lanes_4(sums + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
#pragma GCC unroll 4
    for (int i = m * n & ~3; i < m * n; i++) sums[i] += _mm512_reduce_add_ps((__m512)acc[i]);
}

// sums [m][n] += x w^T over `depth` elements for all m rows of x; block: elements of a packed block of rows. Each block
// prefetches `ahead` of the N rows of w that follow: all of them at once would wait for memory and multiply nothing.
HAL_INLINE void all_dots(int n, int ahead, int64_t m, int64_t depth, const elem *x, int64_t block, const elem *w,
                         int64_t ld, float *sums) {
    int64_t next = N;
    for (; m >= M; m -= M, x += block, sums += M * n, next = next + ahead < 2 * N ? next + ahead : N)
        dots(M, n, ahead, depth, x, w, w + next * ld, ld, sums);
    switch (m) {
        case 3: dots(3, n, ahead, depth, x, w, w + next * ld, ld, sums); break;
        case 2: dots(2, n, ahead, depth, x, w, w + next * ld, ld, sums); break;
        case 1: dots(1, n, ahead, depth, x, w, w + next * ld, ld, sums); break;
        default: break;
    }
}

// y [m][ldy], n rows of w [..][n_in] from row j on (n, ahead: constants after inlining); x is packed.
HAL_INLINE void columns(int n, int ahead, int64_t m, int64_t n_in, const elem *x, const elem *w, elem *y, int64_t ldy,
                        int64_t j) {
    // With a single block of rows there is nothing to keep in L1.
    const int64_t piece = m <= M ? n_in : DEPTH * STEP, block = (n_in + STEP - 1) / STEP * STEP * M;
    float sums[MOST * N] = {0};
    for (int64_t k = 0; k < n_in; k += piece)
        all_dots(n, ahead, m, k + piece < n_in ? piece : n_in - k, x + k * M, block, w + j * n_in + k, n_in, sums);
    for (int64_t i = 0; i < m; i++)
        for (int c = 0; c < n; c++) STORE_ELEM(y + i * ldy + j + c, sums[i * n + c]);
}

// The same for the rows from..to of w.
static void some_columns(int64_t m, int64_t n_in, const elem *x, const elem *w, elem *y, int64_t ldy, int64_t from,
                         int64_t to) {
    int64_t j = from;
    if (m <= M) for (; j + N <= to; j += N) columns(N, N, m, n_in, x, w, y, ldy, j);
    else if (m <= 2 * M) for (; j + N <= to; j += N) columns(N, N / 2, m, n_in, x, w, y, ldy, j);
    else if (m <= 5 * M) for (; j + N <= to; j += N) columns(N, N / 3, m, n_in, x, w, y, ldy, j);
    else for (; j + N <= to; j += N) columns(N, 1, m, n_in, x, w, y, ldy, j);
    for (; j + 2 <= to; j += 2) columns(2, 0, m, n_in, x, w, y, ldy, j);
    if (j < to) columns(1, 0, m, n_in, x, w, y, ldy, j);
}

// Whether the product uses AMX.
HAL_INLINE int by_tiles(const struct groups *g) { return FA_TILES && g->n_out % 32 == 0 && g->n_in % 32 == 0; }

#if FA_TILES
#include "grouped_linear_tiles.h"
#endif

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
        tiles_begin(TILE);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t e = 0; e < g->experts; e++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t m = g->sizes[e], from = block * ROWS, to = from + ROWS < g->n_out ? from + ROWS : g->n_out;
                if (m <= 0 || m > g->most) continue;
                const int64_t start = first_row(g, e);
                const elem *rows_of_x = x + start * g->n_in, *weight = w + e * g->n_out * g->n_in;
                const int packs = of != e;
                of = e;
#if FA_TILES
                if (by_tiles(g)) {
                    if (packs) pack_transposed(m, g->n_in, rows_of_x, (unit *)(void *)panel);
                    columns_by_tiles(m, g->n_in, (const unit *)(const void *)panel, weight, y + start * g->n_out,
                                     g->n_out, from, to);
                    continue;
                }
#endif
                if (packs) pack_x(m, g->n_in, rows_of_x, panel);
                some_columns(m, g->n_in, panel, weight, y + start * g->n_out, g->n_out, from, to);
            }
        tiles_end();
    }
}

#ifdef FA_KIND_F32
// dx [m][count] for `count` columns of w [n_out][n_in], a multiple of W.
static void dx_columns(int64_t m, int64_t n_out, int64_t n_in, int64_t count, const float *dy, const float *w, float *dx) {
    enum { PANEL = 3 * W };
    float packed[DEPTH_PACKED * PANEL] __attribute__((aligned(64)));
    const int64_t most = m > MR ? DEPTH_PACKED : DEPTH_DX;
    for (int64_t k = 0; k < n_out; k += most) {
        const int64_t depth = k + most < n_out ? most : n_out - k;
        for (int64_t c = 0; c < count; c += PANEL) {
            const int64_t vectors = (c + PANEL < count ? PANEL : count - c) / W;
            const float *panel = w + k * n_in + c;
            int64_t ld = n_in;
            for (int64_t i = 0; i < depth; i++)
                for (int64_t j = 0; j < vectors; j++) {
                    __builtin_prefetch(panel + i * n_in + 2 * PANEL + j * W, 0, 2);
                    if (m > MR) store(packed + i * PANEL + j * W, load(panel + i * n_in + j * W));
                }
            if (m > MR) panel = packed, ld = PANEL;
            if (k) stripes(m, vectors, depth, dy + k, n_out, 1, panel, ld, dx + c, n_in, 1, NULL);
            else stripes(m, vectors, depth, dy + k, n_out, 1, panel, ld, dx + c, n_in, 0, NULL);
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
