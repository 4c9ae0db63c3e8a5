// Grouped products of bfloat16 tensors where the CPU multiplies pairs of them into floats. The forward pass is
// grouped_linear_kind.h's; the gradients of small groups are here, since a pair is made of two rows of a matrix in memory.
//
// dx = dy w: two rows of w are interleaved in registers, whose halves are then out of order; the sums stay so, as floats
// in L2, until they are rounded. Threads share blocks of COLUMNS_DX columns of w of all groups; a block goes down w in
// pieces of DEPTH_DX rows. Memory traffic: every weight of a group that has rows is read once.
//
// dw = dy^T x: a group has at most MOST / 2 pairs of rows, so a block of dw is summed in registers, rounded, and written
// with non-temporal stores. Pairs of rows of dy and x, which are small, are interleaved in memory by every thread. Memory
// traffic: dw is written once, where a product per group writes it, and then copies it to its place.
#include "linear_plan.h"
#ifdef LINEAR_HAVE_BF16
#define GROUPED_KIND bf16
#define FA_KIND_BF16

enum {
    MR_PAIRS = 8,      // rows of a block of sums, of LINE columns
    LINE = 32,         // elements of a cache line
    COLUMNS_DX = 256,  // columns of w per task of dx
    ROWS_DW = 64,      // rows of dw per task
    AHEAD = 4,         // cache lines of a row of w
    PAIRS_TILES = 64,  // pairs of rows of w interleaved at a time for dx with AMX: 64 KiB
};

#include "grouped_linear_kind.h"

HAL_INLINE __m512 mac(__m512 sum, const void *pair, __m512i b) {
    int32_t a;
    memcpy(&a, pair, sizeof a);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}

// sums [m][COLUMNS_DX] += dy [m][n_out] times `pairs` pairs of rows of w, for one cache line of columns, lower quarters of
// 8 columns first.
HAL_INLINE void dx_block(int m, int ahead, int64_t pairs, const bf16 *dy, int64_t n_out, const bf16 *w, int64_t n_in,
                         float *sums) {
    __m512 low[MR_PAIRS], high[MR_PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
        low[i] = _mm512_loadu_ps(sums + i * COLUMNS_DX);
        high[i] = _mm512_loadu_ps(sums + i * COLUMNS_DX + 16);
    }
    for (int64_t p = 0; p < pairs; p++) {
        const bf16 *row = w + 2 * p * n_in;
        const __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(row + n_in);
        if (ahead) {
            __builtin_prefetch(row + AHEAD * LINE, 0, 3);
            __builtin_prefetch(row + n_in + AHEAD * LINE, 0, 3);
        }
        const __m512i l = _mm512_unpacklo_epi16(a, b), h = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            low[i] = mac(low[i], dy + i * n_out + 2 * p, l);
            high[i] = mac(high[i], dy + i * n_out + 2 * p, h);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
        _mm512_storeu_ps(sums + i * COLUMNS_DX, low[i]);
        _mm512_storeu_ps(sums + i * COLUMNS_DX + 16, high[i]);
    }
}

// dw [m][n_in] of one cache line of columns, from `pairs` interleaved pairs of rows of dy [pairs][n_out] and x [pairs][n_in].
HAL_INLINE void dw_block(int m, int64_t pairs, const uint32_t *dy, int64_t n_out, const uint32_t *x, int64_t n_in, bf16 *dw,
                         int stream) {
    __m512 first[MR_PAIRS], second[MR_PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) first[i] = second[i] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        const __m512i a = _mm512_loadu_si512(x + p * n_in), b = _mm512_loadu_si512(x + p * n_in + 16);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            first[i] = mac(first[i], dy + p * n_out + i, a);
            second[i] = mac(second[i], dy + p * n_out + i, b);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) {
        _Alignas(64) float values[LINE];
        _mm512_store_ps(values, first[i]);
        _mm512_store_ps(values + 16, second[i]);
        store_line_bf16(stream, dw + i * n_in, values);
    }
}

// Calls a block with its number of rows as a constant.
#define WITH_ROWS(m, call)                \
    switch (m) {                          \
        case 8: call(8); break;           \
        case 7: call(7); break;           \
        case 6: call(6); break;           \
        case 5: call(5); break;           \
        case 4: call(4); break;           \
        case 3: call(3); break;           \
        case 2: call(2); break;           \
        default: call(1); break;          \
    }

// Rounds the sums [m][COLUMNS_DX] of `count` columns, lower quarters of 8 columns first in each cache line, to dx [m][n_in].
static void store_quarters(int64_t m, int64_t count, const float *sums, bf16 *dx, int64_t n_in) {
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
    for (int64_t i = 0; i < m; i++)
        for (int64_t c = 0; c < count; c += LINE) {
            const __m512 low = _mm512_loadu_ps(sums + i * COLUMNS_DX + c);
            const __m512 high = _mm512_loadu_ps(sums + i * COLUMNS_DX + c + 16);
            _Alignas(64) float values[LINE];
            _mm512_store_ps(values, _mm512_permutex2var_ps(low, front, high));
            _mm512_store_ps(values + 16, _mm512_permutex2var_ps(low, back, high));
            store_line_bf16(0, dx + i * n_in + c, values);
        }
}

// sums [m][COLUMNS_DX] of `count` columns of dx, for store_quarters.
static void dx_columns(int64_t m, int64_t n_out, int64_t n_in, int64_t count, const bf16 *dy, const bf16 *w, float *sums) {
    memset(sums, 0, (size_t)(m * COLUMNS_DX) * sizeof(float));
    for (int64_t k = 0; k < n_out; k += DEPTH_DX) {
        const int64_t pairs = (k + DEPTH_DX < n_out ? DEPTH_DX : n_out - k) / 2;
        for (int64_t c = 0; c < count; c += LINE)
            for (int64_t i = 0; i < m; i += MR_PAIRS) {
#define CALL(rows)                                                                                                      \
    if (i) dx_block(rows, 0, pairs, dy + i * n_out + k, n_out, w + k * n_in + c, n_in, sums + i * COLUMNS_DX + c);      \
    else dx_block(rows, 1, pairs, dy + k, n_out, w + k * n_in + c, n_in, sums + c)
                WITH_ROWS(m - i < MR_PAIRS ? m - i : MR_PAIRS, CALL)
#undef CALL
            }
    }
}

void grouped_linear_dx_bf16(const void *dy_, const void *w_, void *dx_, const struct groups *g) {
    const bf16 *dy = dy_, *w = w_;
    bf16 *dx = dx_;
    const int64_t blocks = (g->n_in + COLUMNS_DX - 1) / COLUMNS_DX, rows = first_row(g, g->experts);
#pragma omp parallel if (rows * g->n_in * g->n_out >= HAL_PARALLEL_MIN * 16)
    {
        float *sums = hal_scratch((size_t)(MOST + PAIRS_TILES) * COLUMNS_DX * sizeof(float));
        tiles_begin(TILE);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t e = 0; e < g->experts; e++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t m = g->sizes[e], from = block * COLUMNS_DX;
                const int64_t count = from + COLUMNS_DX < g->n_in ? COLUMNS_DX : g->n_in - from;
                if (m <= 0 || m > g->most) continue;
                const int64_t start = first_row(g, e);
                const bf16 *rows_of_dy = dy + start * g->n_out, *weight = w + e * g->n_out * g->n_in + from;
#if FA_TILES
                if (by_tiles(g))
                    dx_by_tiles(m, g->n_out, g->n_in, count, rows_of_dy, weight,
                                (unit *)(void *)(sums + MOST * COLUMNS_DX), sums);
                else
#endif
                    dx_columns(m, g->n_out, g->n_in, count, rows_of_dy, weight, sums);
                store_quarters(m, count, sums, dx + start * g->n_in + from, g->n_in);
            }
        tiles_end();
    }
}

// pairs[p][i] = (x[2p][i], x[2p + 1][i]) for m rows of n elements; zero in place of a missing last row, and up to `depth`
// pairs.
static void interleave_rows(int64_t m, int64_t depth, int64_t n, const uint16_t *x, uint32_t *pairs) {
    for (int64_t p = 0; 2 * p < m; p++) {
        const uint16_t *a = x + 2 * p * n, *b = a + n;
        const int lone = 2 * p + 1 == m;
        for (int64_t i = 0; i < n; i++) pairs[p * n + i] = a[i] | (lone ? 0 : (uint32_t)b[i] << 16);
    }
    for (int64_t p = (m + 1) / 2; p < depth; p++) memset(pairs + p * n, 0, (size_t)n * sizeof *pairs);
}

// The rows from..to of dw [n_out][n_in], from interleaved pairs of rows of dy [pairs][n_out] and x [pairs][n_in].
static void dw_rows(int64_t pairs, int64_t n_out, int64_t n_in, int64_t from, int64_t to, const uint32_t *dy,
                    const uint32_t *x, bf16 *dw, int stream) {
    for (int64_t i = from; i < to; i += MR_PAIRS)
        for (int64_t c = 0; c < n_in; c += LINE) {
#define CALL(rows) dw_block(rows, pairs, dy + i, n_out, x + c, n_in, dw + i * n_in + c, stream)
            WITH_ROWS(to - i < MR_PAIRS ? to - i : MR_PAIRS, CALL)
#undef CALL
        }
}

void grouped_linear_dw_bf16(const void *dy_, const void *x_, void *dw_, const struct groups *g) {
    const uint16_t *dy = dy_, *x = x_;
    bf16 *dw = dw_;
    const int64_t blocks = (g->n_out + ROWS_DW - 1) / ROWS_DW, each = g->n_out * g->n_in;
    const int stream = streams((uintptr_t)dw_, g->experts * each * 2, g->n_in * 2) == STREAM_LINES;
#pragma omp parallel if (g->experts * each >= HAL_PARALLEL_MIN * 4)
    {
        uint32_t *x_pairs = hal_scratch((size_t)(MOST / 2 * (g->n_in + g->n_out)) * sizeof(uint32_t));
        uint32_t *dy_pairs = x_pairs + MOST / 2 * g->n_in;
        int64_t of = -1;  // the expert whose rows are interleaved
        tiles_begin(TILE);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t e = 0; e < g->experts; e++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t m = g->sizes[e], from = block * ROWS_DW;
                const int64_t to = from + ROWS_DW < g->n_out ? from + ROWS_DW : g->n_out;
                const int64_t pairs = (m + 1) / 2, depth = by_tiles(g) ? (pairs + TILE - 1) / TILE * TILE : pairs;
                if (m > g->most) continue;
                if (of != e) {
                    const int64_t start = first_row(g, e);
                    interleave_rows(m, depth, g->n_in, x + start * g->n_in, x_pairs);
                    interleave_rows(m, depth, g->n_out, dy + start * g->n_out, dy_pairs);
                }
                of = e;
#if FA_TILES
                if (by_tiles(g)) {
                    dw_by_tiles(depth, g->n_out, g->n_in, from, to, dy_pairs, x_pairs, dw + e * each, stream);
                    continue;
                }
#endif
                dw_rows(pairs, g->n_out, g->n_in, from, to, dy_pairs, x_pairs, dw + e * each, stream);
            }
        if (stream) stream_end();
        tiles_end();
    }
}
#else
typedef int grouped_linear_bf16_needs_avx512_bf16;  // a translation unit may not be empty
#endif
