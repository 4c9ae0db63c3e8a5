// One tile of scores: which 16 x 16 blocks are visible, masks, dropout, and the softmax steps.
//
// Queries i0 ... fill the lanes (three blocks of FA_SUB), keys k0 ... the rows. Block column v sees the row blocks
// [from[v], to[v]); of those, [whole_from[v], whole_to[v]) lie inside the band for all their queries and need no
// masking.
struct tile {
    int64_t i0, k0;
    int rows, keys;  // valid queries and keys
    int from[FA_SUBS], to[FA_SUBS], whole_from[FA_SUBS], whole_to[FA_SUBS];
    uint8_t some_masked[FA_GROUPS][FA_SUBS];
    int has_mask, has_keep;
    int seen[FA_SUBS];  // whether a block column has had a visible key, so that its sums exist
};

struct bytes_tile {
    uint8_t masked[FA_KEYS][FA_QUERIES] __attribute__((aligned(64)));
    uint8_t keep[FA_KEYS][FA_QUERIES] __attribute__((aligned(64)));
    uint8_t rows[FA_SUB][FA_KEYS + 8] __attribute__((aligned(64)));
};

// Adjacent row blocks with the same visible columns: keys [k_from, k_to) of the tile, block columns [v0, v1).
struct run {
    int k_from, k_to, v0, v1;
};

_Static_assert(FA_SUBS == 3, "tile_mask fills the hole between the outer of three columns");
typedef uint8_t bytes_16 __attribute__((vector_size(16)));

static int clamp(int64_t x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }
static int least(int a, int b) { return a < b ? a : b; }

// Sets the visible blocks of the tile; returns whether there are any.
static int tile_visible(struct tile *t, const struct fa_sequence *seq) {
    int any = 0;
    for (int v = 0; v < FA_SUBS; v++) {
        t->from[v] = t->to[v] = t->whole_from[v] = t->whole_to[v] = 0;
        if (v * FA_SUB >= t->rows) continue;
        const int64_t first = t->i0 + v * FA_SUB, last = t->i0 + least(t->rows, (v + 1) * FA_SUB) - 1;
        const int low = clamp(first + seq->lo - t->k0, 0, t->keys), high = clamp(last + seq->hi + 1 - t->k0, 0, t->keys);
        if (low >= high) continue;
        t->from[v] = low / FA_SUB;
        t->to[v] = (high + FA_SUB - 1) / FA_SUB;
        t->whole_from[v] = (clamp(last + seq->lo - t->k0, 0, FA_KEYS) + FA_SUB - 1) / FA_SUB;
        const int whole = clamp(first + seq->hi + 1 - t->k0, 0, t->keys);
        t->whole_to[v] = whole == t->keys ? t->to[v] : whole / FA_SUB;
        any = 1;
    }
    return any;
}

// The next run from row block *group on; returns 0 at the end of the tile.
static int next_run(const struct tile *t, int *group, struct run *run) {
    for (int g = *group; g < FA_GROUPS; g++) {
        int v0 = FA_SUBS, v1 = 0;
        for (int v = FA_SUBS; v-- > 0;)
            if (t->from[v] <= g && g < t->to[v]) v0 = v, v1 = v1 ? v1 : v + 1;
        if (v0 >= v1) continue;
        int end = g + 1;
        for (; end < FA_GROUPS; end++) {
            int same = 1;
            for (int v = 0; v < FA_SUBS; v++) same &= (t->from[v] <= end && end < t->to[v]) == (v >= v0 && v < v1);
            if (!same) break;
        }
        *run = (struct run){g * FA_SUB, least(end * FA_SUB, t->keys), v0, v1};
        *group = end;
        return 1;
    }
    return 0;
}
#define FOR_RUNS(t, r) \
    for (struct { int group; struct run r; } it = {0, {0, 0, 0, 0}}; next_run(t, &it.group, &it.r);)

// dst[k][q] = src[q][k] for an 8 x 8 block of bytes.
static void transpose_bytes(uint8_t *dst, int64_t dst_stride, const uint8_t *src, int64_t src_stride) {
    uint64_t r[8];
    for (int i = 0; i < 8; i++) memcpy(&r[i], src + i * src_stride, 8);
    static const uint64_t low[3] = {0x00ff00ff00ff00ff, 0x0000ffff0000ffff, 0x00000000ffffffff};
#pragma GCC unroll 3
    for (int step = 0; step < 3; step++) {
        const int s = 1 << step, shift = 8 * s;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            if (i & s) continue;
            const uint64_t a = r[i], b = r[i + s];
            r[i] = (a & low[step]) | (b & low[step]) << shift;
            r[i + s] = (a >> shift & low[step]) | (b & ~low[step]);
        }
    }
    for (int i = 0; i < 8; i++) memcpy(dst + i * dst_stride, &r[i], 8);
}

// dst[k][q] = src[q * sq + k * sk] for rows x keys <= 16 x 16 valid bytes; returns bit 0: some are set, bit 1: all are.
static int load_bytes(uint8_t *dst, const uint8_t *src, int64_t sq, int64_t sk, int rows, int keys) {
    uint8_t any = 0, all = 1;
    if (sk == 1 && sq != 0 && rows == FA_SUB && keys == FA_SUB) {
        for (int q = 0; q < FA_SUB; q += 8)
            for (int k = 0; k < FA_SUB; k += 8) transpose_bytes(dst + k * FA_QUERIES + q, FA_QUERIES, src + q * sq + k, sq);
        bytes_16 some = {0}, every = ~(bytes_16){0};
        for (int k = 0; k < FA_SUB; k++) {
            bytes_16 row;
            memcpy(&row, dst + k * FA_QUERIES, sizeof row);
            some |= row;
            every &= (bytes_16)(row != 0);
        }
        for (int q = 0; q < FA_SUB; q++) any |= some[q] != 0, all &= every[q] != 0;
    } else if (sq == 0) {  // one byte per key: a padding mask
        for (int k = 0; k < keys; k++) {
            const uint8_t byte = src[k * sk] != 0;
            memset(dst + k * FA_QUERIES, byte, FA_SUB);
            any |= byte;
            all &= byte;
        }
    } else {
        for (int k = 0; k < keys; k++)
            for (int q = 0; q < rows; q++) {
                const uint8_t byte = src[q * sq + k * sk] != 0;
                dst[k * FA_QUERIES + q] = byte;
                any |= byte;
                all &= byte;
            }
    }
    return any | all << 1;
}

// Reads the part of the mask that belongs to the tile and trims fully masked blocks; returns whether any block is
// visible.
static int tile_mask(struct tile *t, struct bytes_tile *bytes, const uint8_t *mask, int64_t sq, int64_t sk) {
    int visible = 0;
    for (int v = 0; v < FA_SUBS; v++) {
        const int rows = least(t->rows - v * FA_SUB, FA_SUB);
        int from = t->to[v], to = t->from[v];
        for (int g = t->from[v]; g < t->to[v]; g++) {
            const int state = load_bytes(&bytes->masked[g * FA_SUB][v * FA_SUB],
                                         mask + (t->i0 + v * FA_SUB) * sq + (t->k0 + g * FA_SUB) * sk, sq, sk, rows,
                                         least(t->keys - g * FA_SUB, FA_SUB));
            t->some_masked[g][v] = state & 1;
            if (state & 2) continue;
            from = least(from, g);
            to = g + 1;
        }
        t->from[v] = from;
        t->to[v] = to > from ? to : from;
        visible |= to > from;
    }
    // Trimming a row block in the middle column only would split a run, so it is kept, fully masked.
    const int from = t->from[0] > t->from[2] ? t->from[0] : t->from[2], to = least(t->to[0], t->to[2]);
    if (from < to) {
        t->from[1] = t->from[1] < t->to[1] ? least(t->from[1], from) : from;
        t->to[1] = t->to[1] > to ? t->to[1] : to;
    }
    return visible;
}

// Computes the tile's dropout decisions.
static void tile_keep(const struct tile *t, struct bytes_tile *bytes, const struct fa_call *call, int64_t index0) {
    const struct hal_flash_attention *g = call->shape;
    const philox_t rng = {call->seed, call->offset};
    for (int v = 0; v < FA_SUBS; v++) {
        const int rows = least(t->rows - v * FA_SUB, FA_SUB), k_from = t->from[v] * FA_SUB;
        const int k_to = least(t->to[v] * FA_SUB, t->keys);
        if (k_from >= k_to) continue;
        for (int q = 0; q < rows; q++) {
            const int64_t element = index0 + (t->i0 + v * FA_SUB + q) * g->dropout_index[3] + t->k0 + k_from;
            philox_keep(rng, (uint64_t)element, k_to - k_from, (uint32_t)g->dropout_threshold, bytes->rows[q]);
        }
        for (int k = k_from; k < k_to; k += FA_SUB)
            load_bytes(&bytes->keep[k][v * FA_SUB], bytes->rows[0] + k - k_from, sizeof bytes->rows[0], 1, rows,
                       least(k_to - k, FA_SUB));
    }
}

// Sets the scores of hidden (query, key) pairs of block column v to -inf.
static void tile_hide(const struct tile *t, int v, const struct fa_sequence *seq, const struct bytes_tile *bytes, real *s) {
    const vec hidden = splat(-(real)INFINITY);
    ivec lanes;
    for (int l = 0; l < W; l++) lanes[l] = l;
    for (int g = t->from[v]; g < t->to[v]; g++) {
        const int edge = g < t->whole_from[v] || g >= t->whole_to[v], masked = t->has_mask && t->some_masked[g][v];
        if (!edge && !masked) continue;
        for (int n = v * SUB_VECTORS; n < (v + 1) * SUB_VECTORS; n++) {
            // First and last visible key per lane, relative to k0; clamped values still lie outside the tile.
            const int64_t i = t->i0 + n * W - t->k0;
            const ivec low = lanes + splat_lane(clamp(i + seq->lo, -FA_QUERIES, FA_KEYS));
            const ivec high = lanes + splat_lane(clamp(i + seq->hi, -FA_QUERIES, FA_KEYS));
            for (int k = g * FA_SUB; k < least((g + 1) * FA_SUB, t->keys); k++) {
                real *at = s + k * FA_QUERIES + n * W;
                const ivec key = splat_lane(k);
                ivec hide = (key < low) | (key > high);
                if (masked) hide |= lanes_of(&bytes->masked[k][n * W]);
                store(at, select(hide, hidden, load(at)));
            }
        }
    }
}

// Replaces the scores of a run of blocks by logits in base 2. cap, if not NULL, receives the derivatives of the softcap.
// (Not inlined: its constants would take registers from the exponentials of calls without it.)
__attribute__((noinline)) static void tile_adjust(const struct tile *t, const struct run *r, const struct adjust *a, real *s, real *cap) {
    vec lanes;
    for (int l = 0; l < W; l++) lanes[l] = (real)l;
    for (int k = r->k_from; k < r->k_to; k++)
        for (int n = r->v0 * SUB_VECTORS; n < r->v1 * SUB_VECTORS; n++) {
            const int at = k * FA_QUERIES + n * W;
            vec slope;
            store(s + at, adjusted(a, load(s + at), lanes + (real)(t->i0 + n * W + a->shift - t->k0 - k), &slope));
            if (cap && a->softcap > 0) store(cap + at, slope);
        }
    if (!a->bias) return;
    for (int q = r->v0 * FA_SUB; q < least(r->v1 * FA_SUB, t->rows); q++)
        add_bias(a, t->i0 + q, t->k0 + r->k_from, r->k_to - r->k_from, s + r->k_from * FA_QUERIES + q, FA_QUERIES);
}

// S^T of the tile's visible blocks = sign K Q^T (sign is 1 unless the scale is 0 or negative), -inf where hidden. a: NULL,
// or what changes the scores, with sign 1.
static void tile_scores(const struct tile *t, const struct fa_sequence *seq, const struct bytes_tile *bytes,
                        const unit *k, int64_t ldk, const unit *qt, int64_t depth, real sign, const struct adjust *a, real *s, real *cap) {
    FOR_RUNS(t, r) {
        const struct run r = it.r;
        real *c = s + r.k_from * FA_QUERIES + r.v0 * FA_SUB;
        multiply_rows(r.k_to - r.k_from, (r.v1 - r.v0) * SUB_VECTORS, depth, k + (t->k0 + r.k_from) * ldk, ldk,
                      qt + r.v0 * FA_SUB, FA_QUERIES, c, FA_QUERIES);
        if (sign != 1)
            for (int key = 0; key < r.k_to - r.k_from; key++)
                for (int q = 0; q < (r.v1 - r.v0) * FA_SUB; q++) c[key * FA_QUERIES + q] *= sign;
        if (a) tile_adjust(t, &r, a, s, cap);
    }
    for (int v = 0; v < FA_SUBS; v++) tile_hide(t, v, seq, bytes, s);
}
