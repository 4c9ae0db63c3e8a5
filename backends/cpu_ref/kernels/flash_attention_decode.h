// Forward pass of one arithmetic kind for few queries, as in decoding, which is bound by the memory traffic of K and V:
// they are read once.
//
// In flash_attention_forward.h queries fill the lanes: a single query would leave 15 lanes of 16 idle, and every head
// of a group would read K and V again. Here the queries of all heads of a group are rows, up to 48. For 96 keys at a
// time
//   S [row][key] = Q K^T      channels fill the lanes; the lanes of W keys' products are summed by a transposition
//   P = exp(scale S - max)    keys fill the lanes
//   O [row][d] += P V         P's scalars are broadcast, channels fill the lanes (gemm.h)
// Visibility, infinities, NaN and huge scores are handled as in flash_attention_forward.h. Heads with separate masks
// run unbatched: in a shared product, a NaN that one head masks out would reach the other heads, because 0 times NaN is
// NaN. The keys of a head are not divided among threads.
// Dot products at a time: two multiply-adds per cycle with a latency of four cycles.
enum { DECODE_DOTS = W < 8 ? W : 8 };

HAL_INLINE void add_pairs(uvec r[16], int s) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i += 2 * s) r[i] = (uvec)((vec)r[i] + (vec)r[i + s]);
}

// Lane l of the result is the sum of the lanes of r[l]: a transposition that adds the halves after every step.
HAL_INLINE vec add_across(uvec r[16]) {
    interleave(r, 1);
    add_pairs(r, 1);
    if (PART == 4) {
        interleave(r, 2);
        add_pairs(r, 2);
    }
    if (W > (int)PART) {
        gather_parts(r, PART);
        add_pairs(r, PART);
    }
    if (W > 2 * (int)PART) {
        gather_parts(r, 2 * PART);
        add_pairs(r, 2 * PART);
    }
    return (vec)r[0];
}

// The products of a row of Q with W rows of K, of which `count` exist; the last existing row is repeated.
HAL_INLINE vec dots(const unit *q, const unit *k, int64_t ld, int count, int64_t depth) {
    uvec r[16];
#pragma GCC unroll 4
    for (int first = 0; first < W; first += DECODE_DOTS) {
        const unit *rows[DECODE_DOTS];
        vec sum[DECODE_DOTS];
#pragma GCC unroll 8
        for (int i = 0; i < DECODE_DOTS; i++) rows[i] = k + least(first + i, count - 1) * ld, sum[i] = (vec){0};
        for (int64_t e = 0; e < depth; e += W) {
            const uvec qe = load_units(q + e);
#pragma GCC unroll 8
            for (int i = 0; i < DECODE_DOTS; i++) sum[i] = MAC_LANES(sum[i], qe, load_units(rows[i] + e));
        }
#pragma GCC unroll 8
        for (int i = 0; i < DECODE_DOTS; i++) r[first + i] = (uvec)sum[i];
    }
    return add_across(r);
}

// The state of a sweep over the keys. Its rows are all queries of the heads from `head` on; its current tile of keys
// begins at k0.
struct decode_state {
    int64_t head, k0;
    int rows, keys;
    unit *q;  // [rows][padded(units(d))]
    real *s;  // [rows][96] scores, then probabilities (as units, in place)
    real *o;  // [rows][padded(d)]
    vec top[FA_QUERIES], l[FA_QUERIES];  // maxima of the tile, and sums; each lane covers every W-th key
    real m[FA_QUERIES];
    uint8_t hidden[FA_QUERIES][FA_KEYS];  // hidden by the mask (the window is applied separately)
};

// Reads the mask under the tile; only keys [*from, *to) are visible to any row.
static void decode_mask(struct decode_state *state, const struct fa_call *call, const struct fa_sequence *seq, int *from,
                        int *to) {
    const int64_t *step = call->shape->mask;
    *from = state->keys, *to = 0;
    for (int r = 0; r < state->rows; r++) {
        const uint8_t *mask = call->mask + mask_offset(call, seq, state->head + r / seq->sq) + r % seq->sq * step[2];
        uint8_t *hidden = state->hidden[r];
        for (int k = 0; k < state->keys; k++) hidden[k] = mask[(state->k0 + k) * step[3]] != 0;
        int first = 0, end = state->keys;
        while (first < *from && hidden[first]) first++;
        while (end > *to && hidden[end - 1]) end--;
        *from = first, *to = end;
    }
}

// S of the W keys from `at` on, -inf where hidden and for keys >= `to`.
static void decode_scores(struct decode_state *state, const struct fa_call *call, const struct fa_sequence *seq, int at,
                          int to, const struct operand *k) {
    const int64_t depth = (units(call->shape->head_size) + W - 1) / W * W, ldq = padded(units(call->shape->head_size));
    const real sign = scaling_of(call).sign;
    ivec key;
    vec lanes;
    for (int l = 0; l < W; l++) key[l] = at + l, lanes[l] = (real)l;
    for (int r = 0; r < state->rows; r++) {
        const int64_t i = r % seq->sq - state->k0;
        vec s = dots(state->q + r * ldq, k->p + at * k->ld, k->ld, to - at, depth) * sign;
        if (call->adjusted) {
            const struct adjust a = adjust_of(call, seq, state->head + r / seq->sq);
            vec unused;
            s = adjusted(&a, s, splat((real)(i + a.shift - at)) - lanes, &unused);
            store(state->s + r * FA_KEYS + at, s);
            if (a.bias) add_bias(&a, r % seq->sq, state->k0 + at, least(to - at, W), state->s + r * FA_KEYS + at, 1);
            s = load(state->s + r * FA_KEYS + at);
        }
        ivec hide = key < splat_lane(clamp(i + seq->lo, 0, FA_KEYS));
        hide |= key >= splat_lane(clamp(i + seq->hi + 1, 0, to));
        if (call->mask) hide |= lanes_of(&state->hidden[r][at]);
        const vec shown = select(hide, splat(-(real)INFINITY), s);
        store(state->s + r * FA_KEYS + at, shown);
        state->top[r] = max(state->top[r], shown);
    }
}

// Online softmax of row r: S -> P, in place, from key `from` (a multiple of W) on; m, l and O as in softmax_columns.
static void decode_softmax(struct decode_state *state, int r, int from, int to, real c, int64_t ldo) {
    const real old = state->m[r];
    real now = old;
    if (exceeds(state->top[r] * c, splat(old * c + SLACK)))
        for (int l = 0; l < W; l++) now = state->top[r][l] > now ? state->top[r][l] : now;
    const vec top = splat(now == -(real)INFINITY ? 0 : now), shift = top * c;
    const int coarse = exceeds(max(shift, splat(0) - shift), splat(COARSE));
    if (now > old) {
        const vec alpha = exp2_of(coarse ? (splat(old) - top) * c : splat(old) * c - shift);
        state->l[r] *= alpha;
        for (int64_t e = 0; e < ldo; e += W) store(state->o + r * ldo + e, load(state->o + r * ldo + e) * alpha);
        state->m[r] = now;
    }
    real *row = state->s + r * FA_KEYS;
    for (int at = from; at < to; at += W) {
        const vec s = load(row + at), p = exp2_of(coarse ? (s - top) * c : s * c - shift);
        state->l[r] += p;
        store_rounded((unit *)row + at / KU, p);
    }
}

// Adds the contribution of the keys [k0, k0 + keys) to the rows' sums.
static void decode_keys(struct decode_state *state, const struct fa_call *call, const struct fa_sequence *seq,
                        const char *ks, const char *vs, const struct forward_space *w) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t e = g->value_size, size = element_size(g->dtype);
    int from = 0, to = state->keys;
    if (call->mask) decode_mask(state, call, seq, &from, &to);
    if (from >= to) return;
    const int first = from / W * W;
    const struct operand k = operand_of(ks + state->k0 * g->k[1] * size, g->k[1], g->head_size, g, 0, 1, w->k);
    const struct operand v = operand_of(vs + state->k0 * g->v[1] * size, g->v[1], e, g, 1, 1, w->v);
    operand_fill(&k, g, first, to);
    for (int r = 0; r < state->rows; r++) state->top[r] = splat(state->m[r]);
    for (int at = first; at < to; at += W) decode_scores(state, call, seq, at, to, &k);
    for (int r = 0; r < state->rows; r++) decode_softmax(state, r, first, to, scaling_of(call).c, padded(e));
    from -= from % KU;
    operand_fill(&v, g, from, to);
    const unit *p = (unit *)state->s + from / KU;
    add_rows(state->rows, (e + W - 1) / W, units(to - from), p, FA_KEYS, v.p + from / KU * v.ld, v.ld, state->o,
             padded(e));
}

// Processes all heads of a group, which are a complete piece, because their queries are one tile.
static void decode_piece(const struct fa_call *call, const struct fa_sequence *seq, int64_t kv_head,
                         const struct forward_space *w) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t d = g->head_size, ldq = padded(units(d)), ldo = padded(g->value_size), group = g->heads / g->kv_heads;
    const int64_t sweep = call->mask && g->mask[1] ? 1 : FA_QUERIES / seq->sq;  // heads
    const char *ks = rows_of(call->k, g->k, g->dtype, seq->batch, seq->k0, kv_head);
    const char *vs = rows_of(call->v, g->v, g->dtype, seq->batch, seq->k0, kv_head);
    struct decode_state state = {.q = w->rows, .s = w->s, .o = w->o};
    int64_t first, end;
    fa_visible(seq, 0, seq->sq, &first, &end);
    if (first < seq->lo) first = seq->lo;  // fa_visible rounds it down to even
    for (state.head = kv_head * group; state.head < (kv_head + 1) * group; state.head += sweep) {
        const int64_t left = (kv_head + 1) * group - state.head, heads = left < sweep ? left : sweep;
        state.rows = (int)(heads * seq->sq);
        for (int r = 0; r < state.rows; r++) state.m[r] = -(real)INFINITY, state.l[r] = splat(0);
        for (int64_t h = 0; h < heads; h++)
            pack_rows(state.q + h * seq->sq * ldq, ldq,
                      rows_of(call->q, g->q, g->dtype, seq->batch, seq->q0, state.head + h),
                      g->q[1] * element_size(g->dtype), g->dtype, seq->sq, d);
        memset(state.o, 0, (size_t)(state.rows * ldo) * sizeof(real));
        for (state.k0 = first; state.k0 < end; state.k0 += FA_KEYS) {
            state.keys = (int)(end - state.k0 < FA_KEYS ? end - state.k0 : FA_KEYS);
            decode_keys(&state, call, seq, ks, vs, w);
        }
        for (int64_t h = 0; h < heads; h++) {
            struct forward_state q = {.t = {.rows = (int)seq->sq, .seen = {1, 1, 1}}};
            q.o = state.o + h * seq->sq * ldo;
            for (int64_t i = 0, r = h * seq->sq; i < seq->sq; i++, r++) {
                q.m[i] = state.m[r];
                for (int l = 0; l < W; l++) q.l[i] += state.l[r][l];
            }
            forward_close(call, seq, state.head + h, &q);
        }
    }
}
