// Layer norm and RMS norm (layer norm without mean and bias) over rows, forward and backward.
//
// Forward, per row: mean, then the variance around it (two passes over a row that stays in L1 or L2: no cancellation),
// then y = (x - mean) rstd w + b. Backward, with n = (x - mean) rstd and g = dy w:
//   dx = rstd (g - mean(g) - n mean(g n)),   dw = sum over rows of dy n,   db = sum over rows of dy.
// The backward pass takes four rows at a time: the two means first, then one sweep over the columns writes four rows of
// dx and adds four rows to dw and db, so that the running sums are loaded and stored a quarter as often. Each piece of
// consecutive rows (see piece_count) has its own running sums, which are added up in order at the end.
//
// Memory traffic: forward reads x, writes y; backward reads x and dy (a second time from L2 in the sweeps), writes dx.
// Large results are written with non-temporal stores.
#ifndef HAL_BODY
#include "common.h"

#include "norm_api.h"

// Forward, the rows that come ROWS later are prefetched if they have at most this many bytes; 0: never.
#ifndef HAL_FETCHED_ROW
#define HAL_FETCHED_ROW 0
#endif

enum {
    ROWS = 4,
    LONG = 8 << 10,  // forward, rows of more bytes are processed one at a time, because four of them do not fit into L1
    // Backward, rows of at most this many bytes are streamed ROWS at a time, because they are adjacent: only the first and
    // the last cache line is incomplete. They take 12 KiB, which leaves room in L1 for x and dy.
    WHOLE = STREAM_PIECE * 3 / 4,
};

#define HAL_SELF "norm.c"
#ifndef HAL_OTHERS
#define HAL_F32_ONLY
#endif
#include "dtypes.h"

void hal_norm_fwd(int dtype, int centered, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, uintptr_t mean,
                  uintptr_t rstd, double eps, int64_t rows, int64_t width) {
    if (rows == 0) return;  // a parallel region costs 0.4 us even for one thread
    HAL_DISPATCH(dtype, norm_fwd, centered, x, weight, bias, y, mean, rstd, eps, rows, width);
}

void hal_norm_bwd(int dtype, int centered, uintptr_t x, uintptr_t weight, uintptr_t mean, uintptr_t rstd, uintptr_t dy,
                  uintptr_t dx, uintptr_t dweight, uintptr_t dbias, int64_t rows, int64_t width) {
    HAL_DISPATCH(dtype, norm_bwd, centered, x, weight, mean, rstd, dy, dx, dweight, dbias, rows, width);
}

#else

// Processes `count` (a compile-time constant) rows. Their sums come first, so that the horizontal additions of one row
// overlap with the next row; layer norm has two dependent sums per row.
HAL_INLINE void NAME(norm_fwd_rows)(const int count, const int centered, const int stream, const T *x, const real *weight,
                                    const real *bias, T *y, real *means, real *rstds, real eps, int64_t width) {
    real mean[ROWS], rstd[ROWS];
    for (int r = 0; r < count; r++) {
        const T *xr = x + r * width;
        real sum = 0;
        if (centered) ROW_SUM(real, sum, width, i, LOAD(xr + i));
        mean[r] = centered ? sum / (real)width : 0;
        if (centered) means[r] = mean[r];
    }
    for (int r = 0; r < count; r++) {
        const T *xr = x + r * width;
        const real m = mean[r];
        real square;
        // The row after a long one is prefetched line by line while this one is in L1.
        if (stream && width * (int64_t)sizeof(T) > LONG)
            ROW_SUM_BEYOND(0, real, square, width, i, (LOAD(xr + i) - m) * (LOAD(xr + i) - m),
                           PREFETCH((uintptr_t)(xr + width + i), LANES * sizeof(T), 3));
        else
            ROW_SUM(real, square, width, i, (LOAD(xr + i) - m) * (LOAD(xr + i) - m));
        rstd[r] = rstds[r] = 1 / RNAME(sqrt)(square / (real)width + eps);
    }
    for (int r = 0; r < count; r++) {
        const T *xr = x + r * width;
        const real m = mean[r], scale = rstd[r];
        if (stream && width * (int64_t)sizeof(T) <= HAL_FETCHED_ROW)
            PREFETCH((uintptr_t)(xr + ROWS * width), width * (int64_t)sizeof(T), 3);
        if (centered)
            STORE_ROW(stream, y + r * width, width, i, (LOAD(xr + i) - m) * scale * weight[i] + bias[i]);
        else
            STORE_ROW(stream, y + r * width, width, i, LOAD(xr + i) * scale * weight[i]);
    }
}

static void NAME(norm_fwd)(int centered, uintptr_t x_, uintptr_t weight_, uintptr_t bias_, uintptr_t y_, uintptr_t mean_,
                           uintptr_t rstd_, double eps, int64_t rows, int64_t width) {
    const real *weight = (const real *)weight_, *bias = (const real *)bias_;
    real *means = (real *)mean_, *rstds = (real *)rstd_;
    const int64_t row_bytes = width * (int64_t)sizeof(T);
    const int stream = streams(y_, rows * row_bytes, row_bytes);
#pragma omp parallel if (rows * width >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < rows; begin += ROWS) {
            const T *x = (const T *)x_ + begin * width;
            T *y = (T *)y_ + begin * width;
            if (centered && begin + ROWS <= rows && row_bytes <= LONG) {
                NAME(norm_fwd_rows)(ROWS, 1, stream, x, weight, bias, y, means + begin, rstds + begin, (real)eps, width);
                continue;
            }
            for (int64_t r = begin; r < begin + ROWS && r < rows; r++, x += width, y += width) {
                if (centered)
                    NAME(norm_fwd_rows)(1, 1, stream, x, weight, bias, y, means + r, rstds + r, (real)eps, width);
                else
                    NAME(norm_fwd_rows)(1, 0, stream, x, weight, weight, y, 0, rstds + r, (real)eps, width);
            }
        }
        if (stream) stream_end();
    }
}

// `columns` columns of `count` rows: writes dx in rows of to_width, or to line [count][columns] if it is given, and
// adds their contribution to the running sums dw and db (db only if `centered`).
HAL_INLINE void NAME(norm_bwd_columns)(const int count, const int centered, const T *x, const T *dy, const real *weight,
                                       const real *mean, const real *rstd, const real *g_mean, const real *gn_mean, T *to,
                                       int64_t to_width, real *line, double *dw, double *db, int64_t columns,
                                       int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
        const real w = weight[i];
        real dwi = 0, dbi = 0, value[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) {
            const real d = LOAD(dy + r * width + i), n = (LOAD(x + r * width + i) - mean[r]) * rstd[r];
            value[r] = rstd[r] * (d * w - g_mean[r] - n * gn_mean[r]);
            dwi += d * n;
            dbi += d;
        }
#pragma GCC unroll 4
        // In a separate loop after all loads, because a compiler cannot move loads across a store.
        for (int r = 0; r < count; r++) {
            if (line)
                line[r * columns + i] = value[r];
            else
                STORE(to + r * to_width + i, value[r]);
        }
        dw[i] += dwi;
        if (centered) db[i] += dbi;
    }
}

// dx of `count` (a compile-time constant) rows and their contribution to the running sums dw and db (db only if
// `centered`).
HAL_INLINE void NAME(norm_bwd_rows)(const int count, const int centered, const int stream, const T *x, const T *dy,
                                    const real *weight, const real *means, const real *rstds, T *dx, double *dw, double *db,
                                    int64_t width) {
    real mean[ROWS], rstd[ROWS], g_mean[ROWS], gn_mean[ROWS];
    for (int r = 0; r < count; r++) {
        const T *xr = x + r * width, *dyr = dy + r * width;
        real g = 0, gn;
        const real m = centered ? means[r] : 0;
        if (centered)
            ROW_SUMS(real, g, gn, width, i, LOAD(dyr + i) * weight[i], LOAD(dyr + i) * weight[i] * (LOAD(xr + i) - m));
        else
            ROW_SUM(real, gn, width, i, LOAD(dyr + i) * weight[i] * LOAD(xr + i));
        mean[r] = m;
        rstd[r] = rstds[r];
        g_mean[r] = g / (real)width;
        gn_mean[r] = gn * rstd[r] / (real)width;
    }
    enum { LINE = 64 / sizeof(T), PIECE = STREAM_PIECE / 2 / sizeof(T) };
    if (stream == STREAM_PIECES) {
        _Alignas(64) T piece[ROWS * WHOLE / sizeof(T)];
        if (width * (int64_t)sizeof(T) <= WHOLE) {
            NAME(norm_bwd_columns)(count, centered, x, dy, weight, mean, rstd, g_mean, gn_mean, piece, width, 0, dw, db, width,
                                   width);
            stream_copy(dx, piece, count * width * (int64_t)sizeof(T));
            return;
        }
        for (int64_t i = 0; i < width; i += PIECE) {
            const int64_t columns = i + PIECE < width ? PIECE : width - i;
            NAME(norm_bwd_columns)(count, centered, x + i, dy + i, weight + i, mean, rstd, g_mean, gn_mean, piece, PIECE, 0,
                                   dw + i, db + i, columns, width);
            for (int r = 0; r < count; r++)
                stream_copy(dx + r * width + i, piece + r * PIECE, columns * (int64_t)sizeof(T));
        }
        return;
    }
    int64_t i = 0;
    for (; (stream || NAME(HAL_ROUNDS)) && i + LINE <= width; i += LINE) {
        _Alignas(64) real lines[ROWS * LINE];
        NAME(norm_bwd_columns)(count, centered, x + i, dy + i, weight + i, mean, rstd, g_mean, gn_mean, 0, 0, lines, dw + i,
                               db + i, LINE, width);
        for (int r = 0; r < count; r++) NAME(store_line)(stream, dx + r * width + i, lines + r * LINE);
    }
    if (i < width)
        NAME(norm_bwd_columns)(count, centered, x + i, dy + i, weight + i, mean, rstd, g_mean, gn_mean, dx + i, width, 0,
                               dw + i, db + i, width - i, width);
}

// The same for the rows begin ... end - 1, ROWS at a time.
HAL_INLINE void NAME(norm_bwd_piece)(const int centered, const int stream, const T *x, const T *dy, const real *weight,
                                     const real *means, const real *rstds, T *dx, double *dw, double *db, int64_t begin,
                                     int64_t end, int64_t width) {
    int64_t row = begin;
    for (; row + ROWS <= end; row += ROWS)
        NAME(norm_bwd_rows)(ROWS, centered, stream, x + row * width, dy + row * width, weight, means + row, rstds + row,
                            dx + row * width, dw, db, width);
    for (; row < end; row++)
        NAME(norm_bwd_rows)(1, centered, stream, x + row * width, dy + row * width, weight, means + row, rstds + row,
                            dx + row * width, dw, db, width);
}

static void NAME(norm_bwd)(int centered, uintptr_t x_, uintptr_t weight_, uintptr_t mean_, uintptr_t rstd_, uintptr_t dy_,
                           uintptr_t dx_, uintptr_t dweight_, uintptr_t dbias_, int64_t rows, int64_t width) {
    const T *x = (const T *)x_, *dy = (const T *)dy_;
    const real *weight = (const real *)weight_, *means = (const real *)mean_, *rstds = (const real *)rstd_;
    T *dx = (T *)dx_;
    const int64_t pieces = piece_count(rows), sums = centered ? 2 : 1;
    const int64_t row_bytes = width * (int64_t)sizeof(T);
    const int stream = streams(dx_, rows * row_bytes, row_bytes);
    double *partial = hal_scratch((size_t)(pieces * sums * width) * sizeof(double));
#pragma omp parallel if (rows * width >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < pieces; piece++) {
            int64_t begin = rows * piece / pieces, end = rows * (piece + 1) / pieces;
            double *dw = partial + piece * sums * width, *db = dw + (sums - 1) * width;
            memset(dw, 0, (size_t)(sums * width) * sizeof(double));
#define CASE(centered_, stream_)                                                                                        \
    case 4 * (centered_) + (stream_):                                                                                   \
        NAME(norm_bwd_piece)(centered_, stream_, x, dy, weight, means, rstds, dx, dw, db, begin, end, width);            \
        break
            switch (4 * !!centered + stream) {  // so that both are compile-time constants
                CASE(0, STREAM_NOT); CASE(0, STREAM_LINES); CASE(0, STREAM_PIECES);
                CASE(1, STREAM_NOT); CASE(1, STREAM_LINES); CASE(1, STREAM_PIECES);
            }
#undef CASE
        }
        if (stream) stream_end();
        RNAME(sum_pieces)(partial, pieces, sums * width, width, (real *)dweight_);
        if (centered) RNAME(sum_pieces)(partial + width, pieces, sums * width, width, (real *)dbias_);
    }
}

#endif
