// softmax(scale x) over rows of x [b, n, sq, sk] with a mask and a causal limit; masked entries are 0, dead rows all 0.
//
// One group per row: maximum, then the sum of exponentials, then y. Backward: the probabilities are recomputed from x
// and those two (y may have been rounded to 16 bits), then dx = scale p (dy - sum(p dy)).
//
// Memory traffic: forward reads x once from memory, writes y; backward reads x and dy, writes dx.

// The visible part of row `row`: columns [0, end) whose mask byte, at mask[c * m3], is 0.
#define ROW                                                                                             \
    const long row = get_group_id(0), i = row % sq, h = row / sq % heads, b = row / sq / heads;         \
    const long end = CAUSAL ? clamp(i + sk - sq + 1, (long)0, sk) : sk;                                 \
    global const uchar *mask = TENSOR(mask) ? TENSOR(mask) + b * m0 + h * m1 + i * m2 : 0;
#define ROW_PARAMETERS                                                                                  \
    IN(uchar, mask), const float scale, const long heads, const long sq, const long sk, const long m0,  \
        const long m1, const long m2, const long m3

// scale x, and -inf where the mask or the end of the row hides an entry.
static inline vec scores(global const T *x, long c, long n, float scale, global const uchar *mask, long m3) {
    const vec s = LOAD_N(T, x + c, n) * scale;
    if (!mask && n >= LANES) return s;
    float v[LANES];
    VSTORE(s, v);
    for (long i = 0; i < LANES; i++)
        if (i >= n || (mask && mask[(c + i) * m3])) v[i] = -INFINITY;
    return VLOAD(v);
}

// stats: [2][rows], the maximum (0 for a dead row, so that exp(-inf - 0) = 0) and 1 / the sum (0 for a dead row).
kernel void softmax_fwd(IN(T, x), OUT(T, y), OUT(f32, stats), const long rows, ROW_PARAMETERS) {
    LOCAL_SCRATCH
    ROW
    global const T *x = TENSOR(x) + row * sk;
    global T *y = TENSOR(y) + row * sk;
    global f32 *stats = TENSOR(stats);
    vec tops = -INFINITY, sums = 0;
    FOR_COLUMNS(c, n, 0, end) tops = fmax(tops, scores(x, c, n, scale, mask, m3));
    const float highest = group_max(lanes_max(tops)), top = highest == -INFINITY ? 0 : highest;
    FOR_COLUMNS(c, n, 0, end) sums += exp(scores(x, c, n, scale, mask, m3) - top);
    const float sum = group_sum(lanes_sum(sums)), factor = sum == 0 ? 0 : 1 / sum;
    FOR_COLUMNS(c, n, 0, end) STORE_N(T, y + c, exp(scores(x, c, n, scale, mask, m3) - top) * factor, n);
    FOR_COLUMNS(c, n, end, sk) STORE_N(T, y + c, (vec)0, n);
    if (get_local_id(0) == 0) {
        stats[row] = top;
        stats[rows + row] = factor;
    }
}

kernel void softmax_bwd(IN(T, x), IN(f32, stats), IN(T, dy), OUT(T, dx), const long rows, ROW_PARAMETERS) {
    LOCAL_SCRATCH
    ROW
    global const T *x = TENSOR(x) + row * sk, *dy = TENSOR(dy) + row * sk;
    global T *dx = TENSOR(dx) + row * sk;
    const float top = TENSOR(stats)[row], factor = TENSOR(stats)[rows + row];
    vec dots = 0;
    FOR_COLUMNS(c, n, 0, end) dots += exp(scores(x, c, n, scale, mask, m3) - top) * LOAD_N(T, dy + c, n);
    const float mean = group_sum(lanes_sum(dots)) * factor;
    FOR_COLUMNS(c, n, 0, end) {
        const vec p = exp(scores(x, c, n, scale, mask, m3) - top) * factor;
        STORE_N(T, dx + c, scale * p * (LOAD_N(T, dy + c, n) - mean), n);
    }
    FOR_COLUMNS(c, n, end, sk) STORE_N(T, dx + c, (vec)0, n);
}
