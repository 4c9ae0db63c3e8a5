// swiglu, geglu and bias_gelu, forward and backward: y = act(a) b (gated), or act(a), where (a, b) are the halves of x
// + bias.
//
// KIND is a -D option, so a kernel holds one activation. Forward: a group takes CHUNK columns of a row. Backward
// recomputes the activation from x and sums dx over pieces of the rows, see common.h, which is the bias gradient.
//
// Memory traffic: forward reads x, writes y; backward reads x and dy, writes dx.

#define SILU 0
#define GELU_ERF 1
#define GELU_TANH 2
#define GELU_FAST 3

static inline vec sigmoid(vec x) { return 1 / (1 + exp(-x)); }

// The activation's value; *slope gets its derivative.
static inline vec act(vec x, vec *slope) {
#if KIND == SILU
    const vec s = sigmoid(x);
    *slope = s * (1 + x * (1 - s));
    return x * s;
#elif KIND == GELU_ERF
    const vec cdf = 0.5f * erfc(x * -0.70710678f);  // erfc keeps the digits that 1 + erf loses in the left tail
    *slope = cdf + x * (0.39894228f * exp(-0.5f * x * x));
    return x * cdf;
#elif KIND == GELU_TANH
    // 0.5 (1 + tanh(u)) = sigmoid(2 u)
    const vec s = sigmoid(1.59576912f * x * (1 + 0.044715f * x * x));
    *slope = s + x * s * (1 - s) * (1.59576912f * (1 + 0.134145f * x * x));
    return x * s;
#else
    const vec s = sigmoid(1.702f * x);
    *slope = s + 1.702f * x * s * (1 - s);
    return x * s;
#endif
}

kernel void activation_fwd(IN(T, x), IN(T, bias), OUT(T, y), const long width) {
    const long row = get_group_id(1);
    global const T *x = TENSOR(x) + row * width * (1 + GATED), *bias = TENSOR(bias);
    global T *y = TENSOR(y) + row * width;
    FOR_COLUMNS(c, n, get_group_id(0) * CHUNK, min((long)(get_group_id(0) + 1) * CHUNK, width)) {
        vec a = LOAD_N(T, x + c, n), slope;
        if (bias) a += LOAD_N(T, bias + c, n);
        vec v = act(a, &slope);
        if (GATED) {
            vec b = LOAD_N(T, x + width + c, n);
            if (bias) b += LOAD_N(T, bias + width + c, n);
            v *= b;
        }
        STORE_N(T, y + c, v, n);
    }
}

// partial: [pieces][width of x], the column sums of dx; may be missing (there is no bias).
kernel void activation_bwd(IN(T, x), IN(T, bias), IN(T, dy), OUT(T, dx), OUT(f32, partial), const long rows,
                           const long width) {
    global const T *x = TENSOR(x), *bias = TENSOR(bias), *dy = TENSOR(dy);
    global T *dx = TENSOR(dx);
    global f32 *partial = TENSOR(partial);
    const long full = width * (1 + GATED);
    if (partial) partial += get_group_id(1) * full;
    FOR_PIECE(row, rows)
        FOR_SPAN(c, n, width) {
            const long at = row * full + c;
            const vec d = LOAD_N(T, dy + row * width + c, n);
            vec a = LOAD_N(T, x + at, n), slope;
            if (bias) a += LOAD_N(T, bias + c, n);
            const vec value = act(a, &slope);
            vec da = d * slope;
            if (GATED) {
                vec b = LOAD_N(T, x + at + width, n);
                if (bias) b += LOAD_N(T, bias + width + c, n);
                const vec db = d * value;
                da *= b;
                if (partial) ADD_N(partial + width + c, db, n);
                STORE_N(T, dx + at + width, db, n);
            }
            if (partial) ADD_N(partial + c, da, n);
            STORE_N(T, dx + at, da, n);
        }
}
