// The weight gradient of a linear layer, dW (+)= dY^T X, and optionally the bias gradient. One arithmetic kind
// (vectors.h): float32, or bfloat16 pairs of tokens multiplied into floats. Sums are float32 in both. Included once by
// linear_<kind>.c.
//
// The product sums over tokens, so both operands are read across their rows. Both are packed without transposition
// (bfloat16: two rows interleaved) into panels for the micro-kernel (gemm.h), DEPTH units of tokens at a time: X into
// panels of 48 columns, and blocks of ROWS columns of dY into panels of 8, private to the thread that multiplies them.
// For AMX (tiles.h) panels have 32 columns, and those of dY are transposed, because its A has units adjacent along the
// tokens. While a block of dY is in cache, its columns are summed for the bias.
//
// Threads share the work in one of two ways. "Together": all panels of X are packed first, then blocks of dY are
// distributed. "Apart": each thread packs some panels of X and multiplies them with all of dY. In this way no thread
// waits for another or reads data that another wrote, which is slow between cores that share no cache, but every thread
// packs all of dY.
//
// Every element is a sum over blocks of DEPTH units in order, so the result does not depend on the number of threads.
// Memory traffic: X is read once, dY once per COLUMNS columns of X ("apart": by every thread), dW is read and written
// once per DEPTH units.
#include "vectors.h"
#include "gemm.h"
#include "transpose.h"

#include "linear_plan.h"

#include <omp.h>

#ifdef FA_KIND_BF16
typedef bf16 elem;
#define LOAD load_bf16
#else
typedef f32 elem;
#define LOAD load_f32
#endif

enum {
    // Units of tokens per block: a panel of X (36 KiB; 20 KiB with tiles) and one of dY stay in L1.
    DEPTH = FA_TILES ? 160 : 192,
    ROWS = 96,                            // columns of dY per block
    HEIGHT = FA_TILES ? 2 * TILE : MR,    // columns of dY per panel
    PANEL = FA_TILES ? 2 * TILE : 3 * W,  // columns of X per panel
    COLUMNS = 96 * 48,                    // columns of X packed at a time: 3.5 MiB, which the outer caches hold
};

// For count columns: dst[c] = the pair (src[c], next[c] & second); in float32, src[c] alone.
HAL_INLINE void pack_row(unit *dst, const elem *src, const elem *next, unit second, int64_t count) {
#ifdef FA_KIND_BF16
    for (int64_t c = 0; c < count; c++) dst[c] = src[c] | (next[c] & second) << 16;
#else
    (void)next, (void)second;
    for (int64_t c = 0; c < count; c++) dst[c] = src[c];
#endif
}

// Packs panels of `width` columns: dst[panel][unit][width] = src[token][columns from panel * width on], zero beyond the
// last column and, up to a multiple of TILE units, beyond the last token. Inlined with constants, in particular `most`
// columns: copies of a size that the compiler did not know took a third of the product's total time.
HAL_INLINE void pack_panels(unit *dst, const elem *src, int64_t stride, int64_t tokens, int64_t columns, int64_t width,
                            int64_t most) {
    const int64_t whole = columns / width * width, rest = columns - whole;
    for (int64_t k = 0; k < tokens; k += KU, dst += width, src += KU * stride) {
        const int pair = KU == 2 && k + 1 < tokens;  // otherwise the last of an odd number of tokens
        const elem *next = pair ? src + stride : src;
        const unit second = pair ? 0xffff : 0;
        if (columns == most) {
            for (int64_t i = 0; i < most; i += width) pack_row(dst + i * DEPTH, src + i, next + i, second, width);
            continue;
        }
        for (int64_t i = 0; i < whole; i += width) pack_row(dst + i * DEPTH, src + i, next + i, second, width);
        if (rest) {
            pack_row(dst + whole * DEPTH, src + whole, next + whole, second, rest);
            for (int64_t c = rest; c < width; c++) dst[whole * DEPTH + c] = 0;
        }
    }
    for (int64_t k = (tokens + KU - 1) / KU; k % TILE; k++, dst += width)
        for (int64_t i = 0; i < columns; i += width) memset(dst + i * DEPTH, 0, (size_t)width * sizeof(unit));
}

#if FA_TILES
// Packs columns of dY as tiles: dst[unit / TILE][column][unit % TILE], zero beyond the last column and token.
static void pack_tiles(unit *dst, const elem *src, int64_t stride, int64_t tokens, int64_t columns) {
    for (int64_t k = 0; k < tokens; k += KU * TILE, dst += ROWS * TILE, src += KU * TILE * stride)
        for (int64_t c = 0; c < columns; c += TILE) {
            const __mmask16 valid = columns - c < TILE ? (__mmask16)((1 << (columns - c)) - 1) : 0xffff;
            uvec r[TILE];
#pragma GCC unroll 16
            for (int l = 0; l < TILE; l++) {
                const elem *at = src + KU * l * stride + c;
                const int64_t left = tokens - k - KU * l;
                r[l] = (uvec)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(left > 0 ? valid : 0, at));
                r[l] |= (uvec)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(left > 1 ? valid : 0, at + stride)) << 16;
            }
            transpose_block(r);
#pragma GCC unroll 16
            for (int l = 0; l < TILE; l++) store_units(dst + (c + l) * TILE, r[l]);
        }
}
#endif

// sums[c] += the sum of column c of src.
static void add_sums(double *sums, const elem *src, int64_t stride, int64_t tokens, int64_t columns) {
    float part[ROWS] = {0};
    for (int64_t k = 0; k < tokens; k++)
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) part[c] += LOAD(src + k * stride + c);
    for (int64_t c = 0; c < columns; c++) sums[c] += part[c];
}

// HEIGHT rows and `vectors` vectors of columns of C = A B or, with `add`, C += A B (constants after inlining).
HAL_INLINE void product(int vectors, int64_t depth, const unit *a, const unit *b, float *c, int64_t ldc, int add) {
#if FA_TILES
    tile_row(2, vectors, (depth + TILE - 1) / TILE * TILE, a, TILE, ROWS * TILE, b, PANEL, c, ldc, add);
#else
    stripes(HEIGHT, vectors, depth, a, 1, HEIGHT, b, PANEL, c, ldc, add, NULL);
#endif
}

// A tile of dW, m <= HEIGHT rows and n <= PANEL columns, through a buffer. Not inlined: the loop of the product must
// remain free of stores (tests/backends/cpu_ref/test_machine_code.py).
static __attribute__((noinline)) void buffered_tile(int64_t m, int64_t n, int64_t depth, const unit *a, const unit *b,
                                                    float *c, int64_t ldc, int add, int stream) {
    float whole[HEIGHT * PANEL] __attribute__((aligned(64)));
    product((int)(n + W - 1) / W, depth, a, b, whole, PANEL, 0);
    for (int64_t i = 0; i < m; i++)
        if (stream)
            for (int64_t j = 0; j < n; j += W) STREAM_LINE(c + i * ldc + j, whole + i * PANEL + j);
        else
            for (int64_t j = 0; j < n; j++) c[i * ldc + j] = whole[i * PANEL + j] + (add ? c[i * ldc + j] : 0);
}

// The same, in place if the tile is full and its lines are not written with non-temporal stores.
static void tile(int64_t m, int64_t n, int64_t depth, const unit *a, const unit *b, float *c, int64_t ldc, int add,
                 int stream) {
    if (m < HEIGHT || n < PANEL || stream) {
        buffered_tile(m, n, depth, a, b, c, ldc, add, stream);
        return;
    }
    for (int64_t i = 0; i < HEIGHT; i++)  // prefetched while the sum is computed
        for (int64_t j = 0; j < PANEL; j += W) __builtin_prefetch(c + i * ldc + j, 1);
    product(PANEL / W, depth, a, b, c, ldc, add);
}

// The buffers of a thread for its share of one block of tokens: packed panels of X, and space for a packed block of dY.
struct share {
    const elem *dy, *x;
    float *dw;
    unit *panels, *rows;
    double *sums;  // sums of dY's columns, or 0
    int64_t tokens, n_out, n_in, columns;
    int add, stream;
};

static void pack_columns(const struct share *s, int64_t panel) {
    const int64_t from = panel * PANEL, columns = s->columns - from;
    pack_panels(s->panels + from * DEPTH, s->x + from, s->n_in, s->tokens, columns < PANEL ? columns : PANEL, PANEL,
                PANEL);
}

// Multiplies one block of dY's columns with the panels [p0, p1).
static void multiply_block(const struct share *s, int64_t block, int64_t p0, int64_t p1) {
    const int64_t i0 = block * ROWS, m = i0 + ROWS < s->n_out ? ROWS : s->n_out - i0, depth = (s->tokens + KU - 1) / KU;
#if FA_TILES
    pack_tiles(s->rows, s->dy + i0, s->n_out, s->tokens, m);
#else
    pack_panels(s->rows, s->dy + i0, s->n_out, s->tokens, m, HEIGHT, ROWS);
#endif
    if (s->sums) add_sums(s->sums + i0, s->dy + i0, s->n_out, s->tokens, m);
    for (int64_t p = p0; p < p1; p++) {
        const int64_t n = s->columns - p * PANEL < PANEL ? s->columns - p * PANEL : PANEL;
        for (int64_t i = 0; i < m; i += HEIGHT)
            tile(m - i < HEIGHT ? m - i : HEIGHT, n, depth, s->rows + i * (FA_TILES ? TILE : DEPTH),
                 s->panels + p * PANEL * DEPTH, s->dw + (i0 + i) * s->n_in + p * PANEL, s->n_in, s->add, s->stream);
    }
}

void CAT(linear_wgrad_, LINEAR_KIND)(const void *dy_, const void *x_, float *dw, float *dbias, int64_t rows, int64_t n_out,
                                     int64_t n_in, int add, int stream) {
    const elem *dy = dy_, *x = x_;
    const int64_t blocks = (n_out + ROWS - 1) / ROWS, threads = omp_get_max_threads();
    const int64_t shared = (n_in < COLUMNS ? (n_in + PANEL - 1) / PANEL * PANEL : COLUMNS) * DEPTH, own = ROWS * DEPTH;
    stream = stream && !add && rows <= DEPTH * KU;
    unit *workspace = hal_scratch((size_t)(shared + threads * own) * sizeof(unit) + (size_t)n_out * sizeof(double));
    double *sums = (double *)(workspace + shared + threads * own);
    memset(sums, 0, (size_t)n_out * sizeof(double));
#pragma omp parallel num_threads(threads)
    {
        tiles_begin(TILE);
        for (int64_t j0 = 0; j0 < n_in; j0 += COLUMNS) {
            const int64_t n = j0 + COLUMNS < n_in ? COLUMNS : n_in - j0, panels = (n + PANEL - 1) / PANEL;
            const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
            // Packing dY from memory takes up to half as long as multiplying it with one panel. Packing once per thread
            // (apart) pays with 16 panels per thread. With 2, it costs less than distributing few blocks unevenly, and
            // with 1, less than leaving threads without a block.
            const int apart = panels >= 16 * team || (panels >= 2 * team && blocks < 8 * team) ||
                              (panels >= team && blocks < team);
            for (int64_t k0 = 0; k0 < rows; k0 += DEPTH * KU) {
                const int64_t tokens = k0 + DEPTH * KU < rows ? DEPTH * KU : rows - k0;
                const struct share share = {
                    dy + k0 * n_out, x + k0 * n_in + j0, dw + j0, workspace, workspace + shared + me * own,
                    dbias && j0 == 0 && !(apart && me > 0) ? sums : 0, tokens, n_out, n_in, n, add || k0 > 0, stream,
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
            if (stream) stream_end();
#pragma omp barrier  // the next panels reuse this memory and may be distributed differently
        }
        tiles_end();
    }
    if (dbias)
        for (int64_t i = 0; i < n_out; i++) dbias[i] = (float)((add ? dbias[i] : 0) + sums[i]);
}
