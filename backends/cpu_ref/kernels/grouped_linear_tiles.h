// Grouped products of bfloat16 tensors by AMX (tiles.h). Included by grouped_linear_bf16.c. n_out and n_in are multiples
// of 32, so that one operand of each product is read in place: rows of w in the forward pass, where the transpose of x is
// packed, and rows of dy for dx, where pairs of rows of w are interleaved. Tasks and memory traffic are those of the
// kernels without tiles.

enum { PAIRS_TILES = 64 };  // pairs of rows of w interleaved at a time for dx: 64 KiB

// panel[unit][ld] = the transpose of m rows of x, ld = m rounded up to a multiple of TILE; zero beyond the last row.
static void pack_transposed(int64_t m, int64_t units, const bf16 *x, unit *panel, int64_t ld) {
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
    const int64_t units = n_in / KU, ld = (m + TILE - 1) / TILE * TILE;
    tile_rows(to - from, ld / TILE, units, (const unit *)(const void *)(w + from * n_in), units, TILE, panel, ld, sums, ld,
              0);
    store_transposed(m, to - from, sums, ld, y + from, ldy);
}

// dx [m][n_in] for `count` columns of w [n_out][n_in]. pairs, sums: buffers of PAIRS_TILES and MOST rows of COLUMNS_DX.
static void dx_by_tiles(int64_t m, int64_t n_out, int64_t n_in, int64_t count, const bf16 *dy, const bf16 *w, bf16 *dx,
                        unit *pairs, float *sums) {
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
    store_quarters(m, count, sums, COLUMNS_DX, dx, n_in);
}

void grouped_linear_tiles(const void *x_, const void *w_, void *y_, const struct groups *g) {
    const bf16 *x = x_, *w = w_;
    bf16 *y = y_;
    const int64_t blocks = (g->n_out + ROWS - 1) / ROWS, rows = first_row(g, g->experts);
#pragma omp parallel if (rows * g->n_in * g->n_out >= HAL_PARALLEL_MIN * 16)
    {
        unit *panel = hal_scratch((size_t)(MOST * g->n_in / KU) * sizeof(unit));
        int64_t of = -1;  // the expert whose rows are packed
        tiles_begin(TILE);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t e = 0; e < g->experts; e++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t m = g->sizes[e], from = block * ROWS, to = from + ROWS < g->n_out ? from + ROWS : g->n_out;
                if (m <= 0 || m > g->most) continue;
                const int64_t start = first_row(g, e);
                if (of != e) pack_transposed(m, g->n_in / KU, x + start * g->n_in, panel, (m + TILE - 1) / TILE * TILE);
                of = e;
                columns_by_tiles(m, g->n_in, panel, w + e * g->n_out * g->n_in, y + start * g->n_out, g->n_out, from, to);
            }
        tiles_end();
    }
}

void grouped_linear_dx_tiles(const void *dy_, const void *w_, void *dx_, const struct groups *g) {
    const bf16 *dy = dy_, *w = w_;
    bf16 *dx = dx_;
    const int64_t blocks = (g->n_in + COLUMNS_DX - 1) / COLUMNS_DX, rows = first_row(g, g->experts);
#pragma omp parallel if (rows * g->n_in * g->n_out >= HAL_PARALLEL_MIN * 16)
    {
        unit *pairs = hal_scratch((size_t)(PAIRS_TILES + MOST) * COLUMNS_DX * sizeof(unit));
        float *sums = (float *)(void *)(pairs + PAIRS_TILES * COLUMNS_DX);
        tiles_begin(TILE);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t e = 0; e < g->experts; e++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t m = g->sizes[e], from = block * COLUMNS_DX;
                const int64_t count = from + COLUMNS_DX < g->n_in ? COLUMNS_DX : g->n_in - from;
                if (m <= 0 || m > g->most) continue;
                const int64_t start = first_row(g, e);
                dx_by_tiles(m, g->n_out, g->n_in, count, dy + start * g->n_out, w + e * g->n_out * g->n_in + from,
                            dx + start * g->n_in + from, pairs, sums);
            }
        tiles_end();
    }
}

// The rows from..to of dw [n_out][n_in], from interleaved pairs of rows of dy [depth][n_out] and x [depth][n_in].
static void dw_by_tiles(int64_t depth, int64_t n_out, int64_t n_in, int64_t from, int64_t to, const unit *dy,
                        const unit *x, bf16 *dw, int stream) {
    enum { LD = MOST / KU, SIDE = 2 * TILE };
    unit rows[ROWS_DW * LD] __attribute__((aligned(64)));
    float sums[SIDE * SIDE] __attribute__((aligned(64)));
    transpose(rows, LD, dy + from, n_out, depth, to - from);
    for (int64_t i = from; i < to; i += SIDE)
        for (int64_t c = 0; c < n_in; c += SIDE) {
            tile_block(2, 2, depth, rows + (i - from) * LD, LD, TILE, x + c, n_in, sums, SIDE, 0);
            for (int64_t l = 0; l < SIDE; l++) store_line_bf16(stream, dw + (i + l) * n_in + c, sums + l * SIDE);
        }
}

void grouped_linear_dw_tiles(const void *dy_, const void *x_, void *dw_, const struct groups *g) {
    const uint16_t *dy = dy_, *x = x_;
    bf16 *dw = dw_;
    const int64_t blocks = (g->n_out + ROWS_DW - 1) / ROWS_DW, each = g->n_out * g->n_in;
    const int stream = streams((uintptr_t)dw_, g->experts * each * 2, g->n_in * 2) == STREAM_LINES;
#pragma omp parallel if (g->experts * each >= HAL_PARALLEL_MIN * 4)
    {
        unit *x_pairs = hal_scratch((size_t)(MOST / KU * (g->n_in + g->n_out)) * sizeof(unit));
        unit *dy_pairs = x_pairs + MOST / KU * g->n_in;
        int64_t of = -1;  // the expert whose rows are interleaved
        tiles_begin(TILE);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t e = 0; e < g->experts; e++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t m = g->sizes[e], from = block * ROWS_DW;
                const int64_t to = from + ROWS_DW < g->n_out ? from + ROWS_DW : g->n_out;
                const int64_t pairs = (m + 1) / KU, depth = (pairs + TILE - 1) / TILE * TILE;
                if (m > g->most) continue;
                if (of != e) {
                    const int64_t start = first_row(g, e);
                    interleave_rows(m, g->n_in, x + start * g->n_in, x_pairs);
                    interleave_rows(m, g->n_out, dy + start * g->n_out, dy_pairs);
                    memset(x_pairs + pairs * g->n_in, 0, (size_t)((depth - pairs) * g->n_in) * sizeof(unit));
                    memset(dy_pairs + pairs * g->n_out, 0, (size_t)((depth - pairs) * g->n_out) * sizeof(unit));
                }
                of = e;
                dw_by_tiles(depth, g->n_out, g->n_in, from, to, dy_pairs, x_pairs, dw + e * each, stream);
            }
        if (stream) stream_end();
        tiles_end();
    }
}
