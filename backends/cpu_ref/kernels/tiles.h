// The micro-kernel of AMX: C[m][n] (+)= sum over kk of A(m, kk) B[kk][n] for bfloat16 units (vectors.h), 16 rows x 16
// units of A and 16 units x 16 columns of B per instruction. A's units are adjacent along kk.
//
// A block of 2 x 2 tiles of C stays in tile registers: four loads, of at least 8 cycles each, for four products of 16.
// The depth is a multiple of TILE: operands are padded with zeros. Rows are not: where fewer than TILE are left, the
// tiles are configured for so many, so that nothing is read or written beyond them, which takes as long as nine products.
//
// An instruction adds up the even and the odd elements of its 16 units separately, in float32, and then both sums to C.
// The terms are those of vdpbf16ps (subnormal numbers count as 0 in both), added in another order: results differ from the
// kernels without AMX by the rounding of float32 sums.
//
// The instructions are written as assembly because GCC's intrinsics do not tell the compiler which memory they read. The
// numbers of the registers are part of the instructions: 0 to 3 are sums, 4 and 5 are A, 6 and 7 are B.
enum { TILE = 16 };

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row of each register
    uint8_t rows[16];
};

// Configures the thread's tile registers for 1 to TILE rows of A and C. Threads that multiply begin with TILE rows.
HAL_INLINE void tiles_begin(int rows) {
    const uint8_t r = (uint8_t)rows;
    const struct tile_config config = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {r, r, r, r, r, r, TILE, TILE}};
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

HAL_INLINE void tiles_end(void) { __asm__ volatile("tilerelease"); }

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define TILE_LOAD(t, at, ld) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(at), "r"((int64_t)(ld) * 4) : "memory")
#define TILE_STORE(t, at, ld) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(at), "r"((int64_t)(ld) * 4) : "memory")
#define TILE_PRODUCT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

// mt x nt (1 or 2, constants after inlining) tiles of C. A(m, kk) = a[m * row + kk / TILE * step + kk % TILE]. The tiles
// of A that come `ahead` steps later are prefetched (a constant, too; 0: none).
HAL_INLINE void tile_block(int mt, int nt, int64_t depth, const unit *a, int64_t row, int64_t step, const unit *b,
                           int64_t ldb, real *c, int64_t ldc, int add, int ahead) {
    real *below = c + TILE * ldc;
    if (add) {
        TILE_LOAD(0, c, ldc);
        if (nt > 1) TILE_LOAD(1, c + TILE, ldc);
        if (mt > 1) TILE_LOAD(2, below, ldc);
        if (mt > 1 && nt > 1) TILE_LOAD(3, below + TILE, ldc);
    } else {
        TILE_ZERO(0);
        if (nt > 1) TILE_ZERO(1);
        if (mt > 1) TILE_ZERO(2);
        if (mt > 1 && nt > 1) TILE_ZERO(3);
    }
    for (int64_t kk = 0; kk < depth; kk += TILE, a += step, b += TILE * ldb) {
        for (int r = 0; ahead && r < mt * TILE; r++) __builtin_prefetch(a + r * row + ahead * step, 0, 3);
        TILE_LOAD(4, a, row);
        TILE_LOAD(6, b, ldb);
        TILE_PRODUCT(0, 4, 6);
        if (nt > 1) {
            TILE_LOAD(7, b + TILE, ldb);
            TILE_PRODUCT(1, 4, 7);
        }
        if (mt > 1) {
            TILE_LOAD(5, a + TILE * row, row);
            TILE_PRODUCT(2, 5, 6);
            if (nt > 1) TILE_PRODUCT(3, 5, 7);
        }
    }
    TILE_STORE(0, c, ldc);
    if (nt > 1) TILE_STORE(1, c + TILE, ldc);
    if (mt > 1) TILE_STORE(2, below, ldc);
    if (mt > 1 && nt > 1) TILE_STORE(3, below + TILE, ldc);
}

HAL_INLINE void tile_row(int mt, int64_t vectors, int64_t depth, const unit *a, int64_t row, int64_t step, const unit *b,
                         int64_t ldb, real *c, int64_t ldc, int add) {
    int64_t j = 0;
    for (; j + 2 <= vectors; j += 2) tile_block(mt, 2, depth, a, row, step, b + j * TILE, ldb, c + j * TILE, ldc, add, 0);
    if (j < vectors) tile_block(mt, 1, depth, a, row, step, b + j * TILE, ldb, c + j * TILE, ldc, add, 0);
}

HAL_INLINE void tile_rows(int64_t m, int64_t vectors, int64_t depth, const unit *a, int64_t row, int64_t step,
                          const unit *b, int64_t ldb, real *c, int64_t ldc, int add) {
    int64_t i = 0;
    for (; i + 2 * TILE <= m; i += 2 * TILE)
        tile_row(2, vectors, depth, a + i * row, row, step, b, ldb, c + i * ldc, ldc, add);
    for (; i + TILE <= m; i += TILE) tile_row(1, vectors, depth, a + i * row, row, step, b, ldb, c + i * ldc, ldc, add);
    if (i == m) return;
    tiles_begin((int)(m - i));
    tile_row(1, vectors, depth, a + i * row, row, step, b, ldb, c + i * ldc, ldc, add);
    tiles_begin(TILE);
}
