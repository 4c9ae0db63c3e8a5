// philox_uniform, dropout and bias_dropout_add, forward and backward.
//
// A row is the last dimension of the draw, whose elements are numbered consecutively. Forward: a group takes CHUNK
// columns of a row. Backward with a bias: a group takes a piece of the rows, see common.h. The backward pass draws the
// bits again; they are never stored.
//
// Memory traffic: dropout reads x, writes y; bias_dropout_add reads x and residual, writes y; backward reads dy, writes
// dx.

// A draw of shape [.., n1, n2, width], possibly a block of a larger one: element (i0, i1, i2, j) is number
// first + i0 s0 + i1 s1 + i2 s2 + j of the stream (seed, offset).
#define DRAW                                                                                            \
    const ulong seed, const ulong offset, const long first, const long n1, const long n2, const long s0, \
        const long s1, const long s2
#define ROW_START(row) \
    ((ulong)(first + (row) / n2 / n1 * s0 + (row) / n2 % n1 * s1 + (row) % n2 * s2))

#define CHUNK_END(width) min((long)(get_group_id(0) + 1) * CHUNK, width)

kernel void philox_uniform(OUT(f32, out), DRAW, const long width) {
    global f32 *out = TENSOR(out);
    const long row = get_group_id(1);
    const ulong start = ROW_START(row);
    FOR_COLUMNS(c, n, get_group_id(0) * CHUNK, CHUNK_END(width)) {
        const uvec bits = philox(seed, offset, start + (ulong)c + lane_numbers());
        STORE_N(f32, out + row * width + c, CONVERT(float)(bits >> 8) * 0x1p-24f, n);
    }
}

// y = residual + dropout(x + bias); bias and residual may be missing. T: x and bias, R: residual and y.
kernel void dropout(IN(T, x), IN(T, bias), IN(R, residual), OUT(R, y), const uint threshold, const float scale, DRAW,
                    const long width) {
    global const T *x = TENSOR(x), *bias = TENSOR(bias);
    global const R *residual = TENSOR(residual);
    global R *y = TENSOR(y);
    const long row = get_group_id(1), at = row * width;
    const ulong start = ROW_START(row);
    FOR_COLUMNS(c, n, get_group_id(0) * CHUNK, CHUNK_END(width)) {
        vec v = LOAD_N(T, x + at + c, n);
        if (bias) v += LOAD_N(T, bias + c, n);
        if (threshold) v = drop(v, seed, offset, start + (ulong)c, threshold, scale);
        if (residual) v += LOAD_N(R, residual + at + c, n);
        STORE_N(R, y + at + c, v, n);
    }
}

// dx = dropout(dy), and partial[piece][width], the column sums of each piece of rows.
kernel void dropout_bwd(IN(R, dy), OUT(T, dx), OUT(f32, partial), const uint threshold, const float scale, DRAW,
                        const long rows, const long width) {
    global const R *dy = TENSOR(dy);
    global T *dx = TENSOR(dx);
    global f32 *partial = TENSOR(partial);
    partial += get_group_id(1) * width;
    FOR_PIECE(row, rows) {
        const ulong start = ROW_START(row);
        FOR_SPAN(c, n, width) {
            vec v = LOAD_N(R, dy + row * width + c, n);
            if (threshold) v = drop(v, seed, offset, start + (ulong)c, threshold, scale);
            ADD_N(partial + c, v, n);
            STORE_N(T, dx + row * width + c, v, n);
        }
    }
}
