// Sums of the partial results of other kernels, always in the order of the pieces.

// out[c] = sum over pieces of partial[piece][c].
kernel void column_sum(IN(f32, partial), OUT(T, out), const long pieces, const long width) {
    global const f32 *partial = TENSOR(partial);
    global T *out = TENSOR(out);
    const long c = (long)get_global_id(0) * LANES, n = width - c;
    if (n <= 0) return;
    vec sum = 0;
    for (long piece = 0; piece < pieces; piece++) sum += LOAD_N(f32, partial + piece * width + c, n);
    STORE_N(T, out + c, sum, n);
}

// partial[piece][width] = the column sums of each piece of the rows of x.
kernel void column_pieces(IN(T, x), OUT(f32, partial), const long rows, const long width) {
    global const T *x = TENSOR(x);
    global f32 *partial = TENSOR(partial) + get_group_id(1) * width;
    FOR_PIECE(row, rows)
        FOR_SPAN(c, n, width) ADD_N(partial + c, LOAD_N(T, x + row * width + c, n), n);
}
