// A task of a grouped product of bfloat16 tensors by AMX (tiles.h), for n_out and n_in that are multiples of 32
// (by_tiles). One operand of each product is read in place: rows of w in the forward pass, where the transpose of x is
// packed, and rows of dy for dx, where pairs of rows of w are interleaved. Memory traffic is that without tiles.
// Included by grouped_linear_kind.h.

enum { TILES_AHEAD = 4 };  // tiles of w

HAL_INLINE int64_t in_tiles(int64_t n) { return (n + TILE - 1) / TILE * TILE; }

// panel[unit][in_tiles(m)] = the transpose of m rows of x; zero beyond the last row.
static void pack_transposed(int64_t m, int64_t n_in, const bf16 *x, unit *panel) {
    const int64_t units = n_in / KU, ld = in_tiles(m);
    for (int64_t i = 0; i < ld; i += TILE)
        for (int64_t k = 0; k < units; k += TILE) {
            uvec r[TILE];
#pragma GCC unroll 16
            for (int l = 0; l < TILE; l++) r[l] = i + l < m ? load_units(x + ((i + l) * units + k) * KU) : (uvec){0};
            transpose_block(r);
#pragma GCC unroll 16
            for (int l = 0; l < TILE; l++) store_units(panel + (k + l) * ld + i, r[l]);
        }
}

// y[i][j] = sums[j][i], rounded, for m rows of y and a multiple of 32 columns.
static void store_transposed(int64_t m, int64_t columns, const float *sums, int64_t ld, bf16 *y, int64_t ldy) {
    for (int64_t j = 0; j < columns; j += 2 * TILE)
        for (int64_t i = 0; i < m; i += TILE) {
            _Alignas(64) float lines[TILE][2 * TILE];
            for (int half = 0; half < 2; half++) {
                uvec r[TILE];
#pragma GCC unroll 16
                for (int l = 0; l < TILE; l++) r[l] = load_units(sums + (j + half * TILE + l) * ld + i);
                transpose_block(r);
#pragma GCC unroll 16
                for (int l = 0; l < TILE; l++) store_units(&lines[l][half * TILE], r[l]);
            }
            for (int l = 0; l < TILE && i + l < m; l++) store_line_bf16(0, y + (i + l) * ldy + j, lines[l]);
        }
}

// y [m][ldy] for the rows from..to of w, whose products with the packed x are the transpose of y.
static void columns_by_tiles(int64_t m, int64_t n_in, const unit *panel, const bf16 *w, bf16 *y, int64_t ldy,
                             int64_t from, int64_t to) {
    float sums[ROWS * MOST] __attribute__((aligned(64)));
    const int64_t units = n_in / KU, ld = in_tiles(m);
    for (int64_t i = 0; i < to - from; i += 2 * TILE) {
        const unit *rows = (const unit *)(const void *)(w + (from + i) * n_in);
        int64_t j = 0;
        for (; j + 2 * TILE <= ld; j += 2 * TILE)
            tile_block(2, 2, units, rows, units, TILE, panel + j, ld, sums + i * ld + j, ld, 0, TILES_AHEAD);
        // With at most 16 rows of x the product waits for memory only, and prefetches would cost 5 to 10 %.
        if (j < ld) tile_block(2, 1, units, rows, units, TILE, panel + j, ld, sums + i * ld + j, ld, 0, 0);
    }
    store_transposed(m, to - from, sums, ld, y + from, ldy);
}

// sums [m][COLUMNS_DX] of `count` columns of dx, as dx_columns leaves them. pairs: a buffer of PAIRS_TILES rows of sums.
static void dx_by_tiles(int64_t m, int64_t n_out, int64_t n_in, int64_t count, const bf16 *dy, const bf16 *w, unit *pairs,
                        float *sums) {
    for (int64_t k = 0; k < n_out / KU; k += PAIRS_TILES) {
        const int64_t depth = k + PAIRS_TILES < n_out / KU ? PAIRS_TILES : n_out / KU - k;
        for (int64_t p = 0; p < depth; p++)
            for (int64_t c = 0; c < count; c += LINE) {
                const bf16 *row = w + (k + p) * KU * n_in + c;
                const __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(row + n_in);
                __builtin_prefetch(row + PAIRS_TILES * KU * n_in, 0, 2);
                __builtin_prefetch(row + (PAIRS_TILES * KU + 1) * n_in, 0, 2);
                _mm512_storeu_si512(pairs + p * COLUMNS_DX + c, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(pairs + p * COLUMNS_DX + c + TILE, _mm512_unpackhi_epi16(a, b));
            }
        tile_rows(m, count / TILE, depth, (const unit *)(const void *)dy + k, n_out / KU, TILE, pairs, COLUMNS_DX, sums,
                  COLUMNS_DX, k > 0);
    }
}

// What dw_rows computes, from a multiple of TILE pairs (depth), which are zero beyond the last row.
static void dw_by_tiles(int64_t depth, int64_t n_out, int64_t n_in, int64_t from, int64_t to, const unit *dy,
                        const unit *x, bf16 *dw, int stream) {
    enum { LD = MOST / KU, SIDE = 2 * TILE };
    unit rows[ROWS_DW * LD] __attribute__((aligned(64)));
    float sums[SIDE * SIDE] __attribute__((aligned(64)));
    transpose(rows, LD, dy + from, n_out, depth, to - from);
    for (int64_t i = from; i < to; i += SIDE)
        for (int64_t c = 0; c < n_in; c += SIDE) {
            tile_block(2, 2, depth, rows + (i - from) * LD, LD, TILE, x + c, n_in, sums, SIDE, 0, 0);
            for (int64_t l = 0; l < SIDE; l++) store_line_bf16(stream, dw + (i + l) * n_in + c, sums + l * SIDE);
        }
}
