// What changes the scores of a call: softcap, ALiBi and bias. A score s = q k becomes
//   log2(e) (softcap tanh(scale s / softcap) - slope |i + shift - j| + bias)
// before hidden scores are set to -inf; the softmax then has the scale 1 in base 2.
struct adjust {
    real scale, softcap, slope;
    const char *bias;  // of the head; NULL = none
    int64_t row, column, dtype, shift;
};

static const double LOG2E = 1.4426950408889634;

static struct adjust adjust_of(const struct fa_call *call, const struct fa_sequence *seq, int64_t head) {
    const struct hal_flash_attention *g = call->shape;
    struct adjust a = {(real)g->scale, (real)g->softcap, 0, call->bias, g->bias[2], g->bias[3], g->dtype, seq->shift};
    if (call->slopes) a.slope = call->slopes[seq->batch * g->slopes[0] + head * g->slopes[1]];
    if (call->bias) a.bias += (seq->batch * g->bias[0] + head * g->bias[1]) * element_size(g->dtype);
    return a;
}

// tanh(x); NaN stays NaN. Near 0, where 1 - exp(-2x) cancels, by its series (relative error 5e-8 at 0.3).
HAL_INLINE vec tanh_of(vec x) {
#ifdef FA_KIND_F64
    for (int l = 0; l < W; l++) x[l] = tanh(x[l]);
    return x;
#else
    const vec size = max(x, splat(0) - x), e = exp2_of(size * (real)(-2 * LOG2E)), large = (1 - e) / (1 + e), y = x * x;
    vec p = y * (real)(62.0 / 2835) - (real)(17.0 / 315);
    p = p * y + (real)(2.0 / 15);
    p = p * y - (real)(1.0 / 3);
    return select(size < splat((real)0.3), x + x * y * p, select(x < splat(0), splat(0) - large, large));
#endif
}

// The logits, in base 2 and without the bias, of scores whose keys are at `distance` = i + shift - j. cap receives the
// derivative of the softcap.
HAL_INLINE vec adjusted(const struct adjust *a, vec s, vec distance, vec *cap) {
    vec z = s * a->scale;
    if (a->softcap > 0) {
        const vec t = tanh_of(z / a->softcap);
        z = t * a->softcap;
        *cap = 1 - t * t;
    }
    z -= max(distance, splat(0) - distance) * a->slope;
    return z * (real)LOG2E;
}

// to[j * step] += log2(e) bias[i][first + j] for j < count.
static void add_bias(const struct adjust *a, int64_t i, int64_t first, int count, real *to, int step) {
    const char *row = a->bias + (i * a->row + first * a->column) * element_size(a->dtype);
#define ADD(T) \
    for (int j = 0; j < count; j++) to[j * step] += (real)LOG2E * (real)load_##T((const T *)row + j * a->column)
#ifdef FA_KIND_F64
    ADD(f64);
#else
    if (a->dtype == HAL_F32) {
        ADD(f32);
    } else if (a->dtype == HAL_BF16) {
        ADD(bf16);
    } else {
        ADD(f16);
    }
#endif
#undef ADD
}
