// The micro-kernel: C[m][n] (+)= sum over kk of A(m, kk) B[kk][n], on units (see vectors.h). A may be a band, whose row
// m is zero outside of the columns m + low ... m + high; each block of rows then sums over the columns of its band
// only.
//
// A block of MR rows x NV vectors of C lives in registers. Each step of kk loads NV vectors of B and broadcasts MR
// units of A in place; B is a packed tile in L1, or rows in place. With 32 registers blocks are 8 x 3 (24 accumulators,
// 11 loads for 24 multiply-adds, so that the limit is two multiply-adds per cycle), or 6 x 4 where n is a multiple of 4
// vectors; with 16 registers they are 4 x 3. Sizes are constants after inlining: with a variable bound the compiler
// keeps the accumulators in memory, which is 5 times slower.
enum { MR = FA_MANY_REGISTERS ? 8 : 4, MR_WIDE = 6 };

#ifdef FA_KIND_BF16
#define MAC_LANES(acc, a, b) ((vec)_mm512_dpbf16_ps((__m512)(acc), (__m512bh)(a), (__m512bh)(b)))
#define MAC(acc, a, b) MAC_LANES(acc, _mm512_set1_epi32((int)(a)), b)
#else
#define MAC_LANES(acc, a, b) ((acc) + (a) * (b))
#define MAC MAC_LANES
#endif

// acc[m][n] = sum over kk of A(m, kk) B[kk][n] for mr rows and nv vectors, where A(m, kk) = a[m * row + kk * col].
HAL_INLINE void multiply(int mr, int nv, int64_t depth, const unit *a, int64_t row, int64_t col, const unit *b, int64_t ldb,
                         vec acc[8][4]) {
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) acc[i][j] = (vec){0};
#pragma GCC unroll 2
    for (int64_t kk = 0; kk < depth; kk++) {
        uvec bj[4];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) bj[j] = load_units(b + j * W);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            const unit ai = *(const unit_at *)(a + i * row);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) acc[i][j] = MAC(acc[i][j], ai, bj[j]);
        }
        a += col;
        b += ldb;
    }
}

HAL_INLINE void block(int mr, int nv, int64_t depth, const unit *a, int64_t row, int64_t col, const unit *b, int64_t ldb,
                      real *c, int64_t ldc, int add) {
    vec acc[8][4];
    multiply(mr, nv, depth, a, row, col, b, ldb, acc);
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            store(c + i * ldc + j * W, add ? load(c + i * ldc + j * W) + acc[i][j] : acc[i][j]);
}

// The band in elements (a unit has KU elements). NULL (a compile-time constant) means that A is dense.
struct band {
    int64_t low, high;
};

// All rows for nv vectors of columns; the rows left over after full blocks are processed in blocks of 4, 2 and 1.
HAL_INLINE void stripe(int mr, int nv, int64_t m, int64_t depth, const unit *a, int64_t row, int64_t col, const unit *b,
                       int64_t ldb, real *c, int64_t ldc, int add, const struct band *band) {
    int64_t i = 0;
#define ROWS(count)                                                                                                    \
    const int64_t low = band ? i + band->low : 0, high = band ? i + count - 1 + band->high : 0;                        \
    const int64_t first = low > 0 ? low / KU : 0, last = high < 0 ? 0 : high / KU + 1;                                 \
    const int64_t end = band && last < depth ? last : depth;                                                           \
    block(count, nv, end - first, a + i * row + first * col, row, col, b + first * ldb, ldb, c + i * ldc, ldc, add);   \
    i += count
    while (i + mr <= m) { ROWS(mr); }
    if (mr > 4 && i + 4 <= m) { ROWS(4); }
    if (i + 2 <= m) { ROWS(2); }
    if (i < m) { ROWS(1); }
#undef ROWS
}

HAL_INLINE void stripes(int64_t m, int64_t vectors, int64_t depth, const unit *a, int64_t row, int64_t col, const unit *b,
                        int64_t ldb, real *c, int64_t ldc, int add, const struct band *band) {
    while (vectors > 0) {
        const int64_t nv = FA_MANY_REGISTERS && vectors % 4 == 0 && vectors % 3 != 0 ? 4 : vectors < 3 ? vectors : 3;
        switch (nv) {
            case 4: stripe(MR_WIDE, 4, m, depth, a, row, col, b, ldb, c, ldc, add, band); break;
            case 3: stripe(MR, 3, m, depth, a, row, col, b, ldb, c, ldc, add, band); break;
            case 2: stripe(MR, 2, m, depth, a, row, col, b, ldb, c, ldc, add, band); break;
            default: stripe(MR, 1, m, depth, a, row, col, b, ldb, c, ldc, add, band);
        }
        b += nv * W;
        c += nv * W;
        vectors -= nv;
    }
}

#if FA_TILES
#include "tiles.h"
#include "transpose.h"
#else
#define tiles_begin(rows) ((void)0)
#define tiles_end() ((void)0)
enum { TILE = 1 };
#endif

// C = A B, where the units of A are adjacent along kk. Operands are zero from `depth` up to a multiple of TILE.
static void multiply_rows(int64_t m, int64_t vectors, int64_t depth, const unit *a, int64_t row, const unit *b, int64_t ldb,
                          real *c, int64_t ldc) {
#if FA_TILES
    tile_rows(m, vectors, (depth + TILE - 1) / TILE * TILE, a, row, TILE, b, ldb, c, ldc, 0);
#else
    stripes(m, vectors, depth, a, row, 1, b, ldb, c, ldc, 0, NULL);
#endif
}

// C += A B, where the units of A are adjacent along kk.
static void add_rows(int64_t m, int64_t vectors, int64_t depth, const unit *a, int64_t row, const unit *b, int64_t ldb,
                     real *c, int64_t ldc) {
#if FA_TILES
    if (m >= TILE && depth % TILE == 0) {
        tile_rows(m, vectors, depth, a, row, TILE, b, ldb, c, ldc, 1);
        return;
    }
#endif
    stripes(m, vectors, depth, a, row, 1, b, ldb, c, ldc, 1, NULL);
}

// C = A B or C += A B, where A is a band of m <= 48 rows (tiles: a multiple of TILE) and its units are adjacent along m.
static void multiply_columns(int64_t m, int64_t vectors, int64_t depth, const unit *a, int64_t col, const unit *b,
                             int64_t ldb, real *c, int64_t ldc, int add, const struct band *band) {
#if FA_TILES
    // Steps of TILE units are transposed for the tiles, without regard to the band; the units left over are multiplied
    // without tiles.
    enum { ROWS = 48, STEPS = 48 };
    for (int64_t steps; (steps = (depth < STEPS ? depth : STEPS) / TILE * TILE) > 0; depth -= steps, add = 1) {
        unit rows[ROWS * STEPS] __attribute__((aligned(64)));
        transpose(rows, STEPS, a, col, steps, m);
        if (add) tile_rows(m, vectors, steps, rows, STEPS, TILE, b, ldb, c, ldc, 1);
        else tile_rows(m, vectors, steps, rows, STEPS, TILE, b, ldb, c, ldc, 0);
        a += steps * col;
        b += steps * ldb;
    }
    if (depth == 0) return;
    band = NULL;
#endif
    if (add) stripes(m, vectors, depth, a, 1, col, b, ldb, c, ldc, 1, band);
    else stripes(m, vectors, depth, a, 1, col, b, ldb, c, ldc, 0, band);
}
