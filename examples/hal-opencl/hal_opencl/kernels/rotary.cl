// Rotary position embedding: rotates pair p of a head by the angle of its position, or back for sign -1 (the gradient).
//
// One group per head of a token. Halves (INTERLEAVED = 0): channel i pairs with i + half, LANES pairs at a time.
// Interleaved: 2i pairs with 2i + 1, one pair at a time. Channels from 2 half on are copied. Memory traffic: reads x,
// writes y.

// Heads are numbered over three row dimensions of sizes [.., n1, n2]; x_s*, a_s*: their strides in x and in cos and
// sin.
kernel void rotary(IN(T, x), IN(f32, cosine), IN(f32, sine), OUT(T, y), const float sign, const long n1, const long n2,
                   const long d, const long half_, const long x_s0, const long x_s1, const long x_s2, const long a_s0,
                   const long a_s1, const long a_s2) {
    const long head = get_group_id(0), i0 = head / n2 / n1, i1 = head / n2 % n1, i2 = head % n2;
    global const T *x = TENSOR(x) + i0 * x_s0 + i1 * x_s1 + i2 * x_s2;
    global const f32 *cosine = TENSOR(cosine), *sine = TENSOR(sine);
    global T *y = TENSOR(y) + head * d;
    const long angle = i0 * a_s0 + i1 * a_s1 + i2 * a_s2;
#if INTERLEAVED
    for (long p = get_local_id(0); p < half_; p += GROUP) {
        const float a = GET(T, x + 2 * p), b = GET(T, x + 2 * p + 1);
        const float c = cosine[angle + p], s = sign * sine[angle + p];
        PUT(T, y + 2 * p, a * c - b * s);
        PUT(T, y + 2 * p + 1, b * c + a * s);
    }
#else
    FOR_COLUMNS(p, n, 0, half_) {
        const vec a = LOAD_N(T, x + p, n), b = LOAD_N(T, x + half_ + p, n);
        const vec c = LOAD_N(f32, cosine + angle + p, n), s = sign * LOAD_N(f32, sine + angle + p, n);
        STORE_N(T, y + p, a * c - b * s, n);
        STORE_N(T, y + half_ + p, b * c + a * s, n);
    }
#endif
    FOR_COLUMNS(i, n, 2 * half_, d) STORE_N(T, y + i, LOAD_N(T, x + i, n), n);
}
