// Attention with windows, masks, packed sequences, grouped heads and HAL's dropout, forward and backward.
//
// Forward (Dao, arXiv 2307.08691): a block of 256 threads owns FQ queries of a head and iterates over tiles of FK keys:
// S = Q K^T, running maximum and sum per row, P = dropout(exp(S - max)), O = O exp(old - new maximum) + P V. Backward
// recomputes P from the log-sum-exp in two kernels, so that every element is summed by one thread in a fixed order and
// results repeat bit for bit: attention_dq owns queries, attention_dkv owns keys and iterates over the query heads of
// their group. With delta = sum(dO O): dS = P (dropout(dO V^T) - delta) scale, dQ = dS K, dK = dS^T Q, dV = P^T dO.
//
// Every query sees an interval of keys, from its window and, if packed, from cu_seqlens; tiles outside of the intervals
// of all rows of a tile are skipped, and a mask is applied on top. Dropout's bits are those of element (b, n, i, j) of
// the draw, four adjacent keys per Philox block, drawn again in the backward pass.
//
// Tiles are kept in static shared memory, below the 48 KiB that need no opting in; Sizes lists them. P and dS are
// rounded to the element type before their products, as in FlashAttention. Memory traffic: q, out and lse once, k and v
// once per FQ queries (mostly from L2); backward reads k and v per B queries, and q and dout per B keys. Scores pass
// through shared memory between the tensor cores and the softmax: about 40 KiB per tile of 64 x 32 x 64, the limit of
// this kernel.
#include "attention_tiles.h"

// FQ, FK: queries and keys of a tile of the forward pass; B: both, of the backward passes. D: the largest head size.
template <class T, int D> struct Sizes;
template <class T> struct Sizes<T, 64> {
    static constexpr int FQ = 64, FK = 32, B = 32;
};
template <class T> struct Sizes<T, 128> {
    static constexpr int FQ = 64, FK = 32, B = 32;
};
template <class T> struct Sizes<T, 256> {
    static constexpr int FQ = 32, FK = 16, B = 16;
};
template <> struct Sizes<f32, 64> {
    static constexpr int FQ = 32, FK = 32, B = 32;
};
template <> struct Sizes<f32, 128> {
    static constexpr int FQ = 32, FK = 16, B = 16;
};

// The forward kernel's tiles: Q queries, K keys, of which STAGES tiles are in memory; BLOCKS of a multiprocessor.
template <class T, int D> struct Forward {
    static constexpr int BYTES = D * (int)sizeof(T);  // of a row
    static constexpr int Q = 64, K = BYTES == 128 ? 64 : BYTES == 256 ? 32 : 16, STAGES = BYTES == 512 ? 1 : 2;
    static constexpr int BLOCKS = BYTES == 512 ? 2 : 3;
};

// [batch, heads, length, d] through strides in elements; the stride of d is 1.
struct View {
    void *at;
    i64 b, n, s;
    template <class T> INLINE T *head(i64 batch, i64 number) const { return (T *)at + batch * b + number * n; }
};

// One byte per element, 1 = masked out, through strides in bytes; at = 0: no mask.
struct Mask {
    const u8 *at;
    i64 b, n, q, k;
};

struct Shape {
    i64 batch, heads, group, sq, skv, d, dv;  // d: of q and k; dv: of v and out
    double scale;
    i64 pre, next, sequences, top_left;  // sequences: 0 if dense
    const int *cu_q, *cu_k;
    i64 vec;  // whether rows start on 16-byte boundaries, with d and dv multiples of 16 bytes
};

// threshold 0: no dropout. draw.strides: of batch, head and query.
struct Dropout {
    Draw draw;
    i64 threshold;
    double scale;
};

// The keys [low, high) that query i sees.
struct Interval {
    int low, high;
};

INLINE i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : x < high ? x : high; }

INLINE Interval interval_of(const Shape &s, i64 i) {
    if (i >= s.sq) return {0, 0};
    i64 first = 0, last = s.skv, shift = s.skv - s.sq;
    if (s.sequences) {
        i64 low = 0, high = s.sequences;
#pragma unroll 1
        while (high - low > 1) {  // the last sequence that starts at or before i; empty ones before it start there, too
            const i64 middle = (low + high) / 2;
            if (s.cu_q[middle] <= i) low = middle;
            else high = middle;
        }
        first = s.cu_k[low], last = s.cu_k[low + 1];
        i -= s.cu_q[low];
        shift = s.top_left ? 0 : last - first - (s.cu_q[low + 1] - s.cu_q[low]);
    }
    const i64 low = clamp(i + shift - s.pre, 0, last - first), high = clamp(i + shift + s.next + 1, low, last - first);
    return {(int)(first + low), (int)(first + high)};
}

// What the 16 queries of a warp from `first` on see. Intervals begin and end in the order of their queries, so those of the
// first and last query bound all of them. Queries beyond the last one count as the last one.
struct Seen {
    Interval row[2], any, all;  // row: of rows g and g + 8 of a fragment
    INLINE Seen(const Shape &s, i64 first) {
#pragma unroll
        for (int r = 0; r < 2; r++) row[r] = interval_of(s, query(s, first, r));
        any = {__shfl_sync(0xffffffffu, row[0].low, 0), __shfl_sync(0xffffffffu, row[1].high, 31)};
        all = {__shfl_sync(0xffffffffu, row[1].low, 31), __shfl_sync(0xffffffffu, row[0].high, 0)};
    }
    INLINE static i64 query(const Shape &s, i64 first, int r) {
        return clamp(first + threadIdx.x % 32 / 4 + 8 * r, 0, s.sq - 1);
    }
};

// tile[ROWS][D] = rows [first, first + ROWS) of x; zeros outside of `length` rows and d columns. Complete for this thread
// after finish_copies(), for others after a barrier.
template <int ROWS, int D, class T>
INLINE void load_rows(T *tile, const T *x, i64 stride, i64 first, i64 length, i64 d, i64 vec) {
    constexpr int L = Lanes<T>::count, PIECES = D / L, STEP = THREADS / PIECES;
    const u32 rows = (u32)clamp(length - first, 0, ROWS), thread = here(threadIdx.x);
    if (vec) {
        const u32 top = thread / PIECES, column = thread % PIECES * L;
        const T *from = x + (first + top) * stride + column;
#pragma unroll
        for (u32 row = 0; row < ROWS; row += STEP) {
            copy16(tile + swizzled<T, D>(top + row, column), from, top + row < rows && column < (u32)d);
            from += STEP * stride;
        }
        return;
    }
#pragma unroll 1
    for (u32 at = thread; at < ROWS * D; at += THREADS) {
        const u32 row = at / D, column = at % D;
        T value = {};
        if (row < rows && column < (u32)d) value = x[(first + row) * stride + column];
        tile[swizzled<T, D>(row, column)] = value;
    }
}

// The opposite: rows [first, first + ROWS) of x, as far as it has them, become those of tile. A thread reads what it writes
// in load_rows, so that the tile may be loaded again without a barrier.
template <int ROWS, int D, class T>
INLINE void store_rows(const T *tile, T *x, i64 stride, i64 first, i64 length, i64 d, i64 vec) {
    constexpr int L = Lanes<T>::count, PIECES = D / L;
    const u32 rows = (u32)clamp(length - first, 0, ROWS), thread = here(threadIdx.x);
    if (vec) {
#pragma unroll 2
        for (u32 at = thread; at < ROWS * PIECES; at += THREADS) {
            const u32 row = at / PIECES, column = at % PIECES * L;
            if (row >= rows || column >= (u32)d) continue;
            store16(reinterpret_cast<Vector<T> *>(x + (first + row) * stride + column),
                    *reinterpret_cast<const Vector<T> *>(tile + swizzled<T, D>(row, column)));
        }
        return;
    }
#pragma unroll 1
    for (u32 at = thread; at < ROWS * D; at += THREADS) {
        const u32 row = at / D, column = at % D;
        if (row < rows && column < (u32)d) x[(first + row) * stride + column] = tile[swizzled<T, D>(row, column)];
    }
}

// Rows `row`, ... of a tile, from `column` (a multiple of 64) on, become the fragment of a warp; rows g times `top`, rows
// g + 8 times `bottom`.
template <class T, int D, int C>
INLINE void put_rows(T *tile, const Fragment<C> &x, int row, int column, float top, float bottom) {
    const u32 thread = here(threadIdx.x), g = thread % 32 / 4, t = thread % 4;
    T *const own = tile + row * D + column;
#pragma unroll
    for (int i = 0; i < C / 8; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float factor = r ? bottom : top;
            const float two[2] = {x.c[i][2 * r] * factor, x.c[i][2 * r + 1] * factor};
            T *to = own + (8 * r * D * sizeof(T) + place<T, D>(g, 2 * t * sizeof(T), 8 * i)) / sizeof(T);
            if constexpr (sizeof(T) == 4) to[0] = two[0], to[1] = two[1];
            else *reinterpret_cast<u32 *>(to) = word_of(two, T{});
        }
}

// Probabilities are power(x factor - maximum) of products x, where maximum is that of x factor.
template <class T> struct Softmax {
    static constexpr float UNIT = sizeof(T) == 4 ? 1.0f : LOG2_E;  // of exponents, per natural one
    float factor;
    bool negative;  // whether the scale is: then products change their signs, so that the largest has the largest product
    INLINE explicit Softmax(double scale) : negative(reinterpret_cast<const i64 &>(scale) < 0) {
        factor = fmaxf(fabsf((float)scale) * UNIT, 1e-30f);  // not 0, so that the -inf of a masked key stays -inf
    }
    template <int N> INLINE void sign(Fragment<N> &x) const {
        if (!negative) return;
        x.each([](int, int, float &value) { value = -value; });
    }
    // exp, in one instruction where the result is rounded to 16 bits.
    INLINE static float power(float x) { return sizeof(T) == 4 ? expf(x) : power_of_2(x); }
};

// A bit for each element of a fragment that a lane has: of row g or g + 8 and column 8 i + 2 t + j, bit 4 i + j of a word.
struct Bits {
    u32 row[2];
    INLINE bool operator()(int i, int j) const { return row[j / 2] >> (4 * i + j % 2) & 1; }
};

// The elements that dropout keeps of rows of 16 queries, drawn where their products with keys will be.
template <int N> struct Keep {
    u64 row;  // of the element in column t / 2 * 4 of the row that this lane draws; its key is 0
    u32 most;  // the largest number that drops an element
    INLINE Keep(const Dropout &dropout, i64 b, i64 n, i64 first) {
        // Lanes 2 a and 2 a + 1 share the four keys of a Philox block: one draws those of row g, the other those of g + 8.
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const i64 *steps = dropout.draw.strides;
        row = (u64)(dropout.draw.index0 + b * steps[0] + n * steps[1] + (first + g + t % 2 * 8) * steps[2] + t / 2 * 4);
        most = (u32)((dropout.threshold << 8) - 1);
    }
    INLINE Bits operator()(const Dropout &dropout, i64 key) const {
        if (!dropout.threshold) return {{0xffffffffu, 0xffffffffu}};
        const u64 at = row + key, block = dropout.draw.offset + at / 4;
        const u32 shift = (u32)at % 4;
        u32 own = 0;
        const auto add = [&](u32 bits, int place) {
            if (bits > most) own |= 1u << place;
        };
        if (!shift) {
#pragma unroll 2
            for (int i = 0; i < N / 8; i++) {
                u32 x[1][4];
                philox(dropout.draw.seed, block + 2 * i, x);
#pragma unroll
                for (int c = 0; c < 4; c++) add(x[0][c], 4 * i + c);
            }
        } else {  // four keys have numbers of two blocks; selected by comparisons, as a run-time index needs local memory
#pragma unroll 1
            for (int i = 0; i < N / 8; i++) {
                u32 x[2][4];
                philox(dropout.draw.seed, block + 2 * i, x);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const u32 one = x[(c + 1) / 4][(c + 1) % 4], two = x[(c + 2) / 4][(c + 2) % 4];
                    add(shift == 1 ? one : shift == 2 ? two : x[(c + 3) / 4][(c + 3) % 4], 4 * i + c);
                }
            }
        }
        const u32 odd = threadIdx.x % 2, other = __shfl_xor_sync(0xffffffffu, own, 1);
        return {{(odd ? other : own) >> 2 * odd, (odd ? own : other) >> 2 * odd}};
    }
};

// Divides a tile among the threads: f(its place in the tile, row and column of x, whether x has them, Width), in pieces
// of 16 bytes where rows start on such boundaries.
template <int ROWS, int D, int LD, class T, class F> INLINE void pieces(i64 first, i64 length, i64 d, i64 vec, F f) {
    const auto in_steps_of = [&](auto w) {
        constexpr int W = decltype(w)::count;
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * (D / W); at += 256) {
            const int row = at / (D / W), j = at % (D / W) * W;
            f(row * LD + j, first + row, j, first + row < length && j < (int)d, w);
        }
    };
    if (vec) in_steps_of(Width<Lanes<T>::count>{});
    else in_steps_of(Width<1>{});
}

// tile[ROWS][LD] = rows [first, first + ROWS) of x; zero outside of `length` rows and d columns.
template <int ROWS, int D, int LD, class T>
INLINE void load_tile(T *tile, const T *x, i64 stride, i64 first, i64 length, i64 d, i64 vec) {
    pieces<ROWS, D, LD, T>(first, length, d, vec, [&](int at, i64 row, int j, bool inside, auto w) {
        if constexpr (decltype(w)::count == 1) {
            T value = {};
            if (inside) value = x[row * stride + j];
            tile[at] = value;
        } else {
            Vector<T> part = {};
            if (inside) part = *reinterpret_cast<const Vector<T> *>(x + row * stride + j);
            store16(reinterpret_cast<Vector<T> *>(tile + at), part);
        }
    });
}

// The opposite: rows [first, first + ROWS) of x, as far as it has them, become those of tile.
template <int ROWS, int D, int LD, class T>
INLINE void store_tile(const T *tile, T *x, i64 stride, i64 first, i64 length, i64 d, i64 vec) {
    pieces<ROWS, D, LD, T>(first, length, d, vec, [&](int at, i64 row, int j, bool inside, auto w) {
        if (!inside) return;
        T *to = x + row * stride + j;
        if constexpr (decltype(w)::count == 1) *to = tile[at];
        else store16(reinterpret_cast<Vector<T> *>(to), *reinterpret_cast<const Vector<T> *>(tile + at));
    });
}

// exp(x) for x <= 0; in one instruction where the result is rounded to 16 bits.
template <class T> INLINE float exponential(float x) { return sizeof(T) == 4 ? expf(x) : power_of_2(x * LOG2_E); }

// For four adjacent keys from j on: which of them query i (row of the tile) sees, and their factors by dropout.
INLINE void look(const Interval &seen, const Mask &mask, const Dropout &dropout, i64 b, i64 n, i64 i, i64 j,
                 bool (&visible)[4], float (&factor)[4]) {
    bool any = false;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        visible[c] = j + c >= seen.low && j + c < seen.high;
        if (visible[c] && mask.at) visible[c] = !mask.at[b * mask.b + n * mask.n + i * mask.q + (j + c) * mask.k];
        any = any || visible[c];
        factor[c] = 1.0f;
    }
    if (!dropout.threshold || !any) return;
    const Draw &draw = dropout.draw;
    u32 bits[4];
    const i64 row = b * draw.strides[0] + n * draw.strides[1] + i * draw.strides[2];
    philox_bits(draw, (u64)(draw.index0 + row + j), bits);
#pragma unroll
    for (int c = 0; c < 4; c++) factor[c] = bits[c] >> 8 >= (u32)dropout.threshold ? (float)dropout.scale : 0.0f;
}

// The smallest low and the largest high of intervals in shared memory; {0, 0} if no row sees a key.
template <int ROWS> INLINE Interval range_of(const Interval *rows) {
    int low = 2147483647, high = 0;
#pragma unroll 1
    for (int r = 0; r < ROWS; r++) {
        if (rows[r].low >= rows[r].high) continue;
        low = rows[r].low < low ? rows[r].low : low;
        high = rows[r].high > high ? rows[r].high : high;
    }
    return {low < high ? low : 0, high};
}

// The elements that are visible of N keys from `key` on. Not unrolled: few tiles are visible in part, unless there is a mask.
template <int N>
INLINE Bits visible(const Shape &s, const Seen &seen, const Mask &mask, int b, int n, int first, int key) {
    Bits result = {};
    const int t = (int)(here(threadIdx.x) % 4);
    first = (int)here((u32)first);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int low = seen.row[r].low, high = seen.row[r].high;
        const u8 *masked = mask.at + b * mask.b + n * mask.n + Seen::query(s, first, r) * mask.q;
#pragma unroll 1
        for (int at = 0; at < N / 4; at++) {
            const int j = key + at / 2 * 8 + 2 * t + at % 2;
            bool is = j >= low && j < high;
            if (is && mask.at) is = !masked[j * mask.k];
            if (is) result.row[r] |= 1u << (at / 2 * 4 + at % 2);
        }
    }
    return result;
}

// The sum of x of the four lanes of a row.
INLINE float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
INLINE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// lse [batch][heads][sq], -inf for a query that sees no key. sinks [heads] or 0: a sink is one more key, whose value is
// 0 and which dropout keeps, so the running maximum and sum start from it. The backward pass needs it in lse only.
template <class T, int D>
__global__ void __launch_bounds__(THREADS, Forward<T, D>::BLOCKS)
    attention_fwd(View q, View k, View v, View out, float *lse, Shape s, Mask mask, Dropout dropout, const float *sinks) {
    using Size = Forward<T, D>;
    constexpr int Q = Size::Q, K = Size::K, STAGES = Size::STAGES, AHEAD = (STAGES - 1) * K;
    alignas(16) __shared__ T qs[Q * D], ks[STAGES][K * D], vs[STAGES][K * D];
    const Softmax<T> softmax(s.scale);
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    const u32 tiles = (u32)((s.sq + Q - 1) / Q), heads = (u32)s.heads, work = (u32)s.batch * heads * tiles;
    for (u32 item = blockIdx.x; item < work; item += gridDim.x) {
        // The last queries first: in causal attention they see most keys.
        const int first = (int)((tiles - 1 - item % tiles) * Q), n = (int)(item / tiles % heads);
        const int b = (int)(item / tiles / heads), group = n / (int)s.group;
        const T *keys = k.head<T>(b, group), *values = v.head<T>(b, group);
        load_rows<Q, D>(qs, q.head<T>(b, n), q.s, first, s.sq, s.d, s.vec);
        const Interval range = {interval_of(s, first).low, interval_of(s, clamp(first + Q, 0, s.sq) - 1).high};
        const Seen seen(s, first + own);
        const Keep<K> keep(dropout, b, n, first + own);
        float top[2], sum[2];
        top[0] = top[1] = sinks ? sinks[n] * Softmax<T>::UNIT : -INFINITE;
        sum[0] = sum[1] = sinks && lane % 4 == 0 ? 1.0f : 0.0f;  // of this lane; the four of a row are added at the end
        Fragment<D> o;
        o.zero();
        const int start = range.low / K * K;
        // With two stages a tile is loaded while the one before it is computed, so the first round only loads.
        for (int key = start - AHEAD; key < range.high; key += K) {
            if (AHEAD && key >= start) finish_copies();
            __syncthreads();
            const int next = key + AHEAD;
            T *const k_next = ks[next / K % STAGES], *const v_next = vs[next / K % STAGES];
            if (next < range.high) {
                load_rows<K, D>(k_next, keys, k.s, next, s.skv, s.d, s.vec);
                load_rows<K, D>(v_next, values, v.s, next, s.skv, s.dv, s.vec);
            }
            if (!AHEAD) {
                finish_copies();
                __syncthreads();
            }
            if (key < start) continue;
            const T *const k_tile = ks[key / K % STAGES], *const v_tile = vs[key / K % STAGES];
            if (seen.any.low < key + K && seen.any.high > key) {
                const Bits kept = keep(dropout, key);
                Fragment<K> p;
                multiply_rows<T, D>(p, qs + own * D, k_tile, s.d);
                softmax.sign(p);
                if (mask.at || seen.all.low > key || seen.all.high < key + K) {
                    const Bits shown = visible<K>(s, seen, mask, b, n, first + own, key);
                    p.each([&](int i, int j, float &x) { x = shown(i, j) ? x : -INFINITE; });
                }
                float base[2], shrink[2];
                bool grows = false;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float most = -INFINITE;
#pragma unroll
                    for (int i = 0; i < K / 8; i++) most = fmaxf(most, fmaxf(p.c[i][2 * r], p.c[i][2 * r + 1]));
                    const float now = fmaxf(top[r], row_max(most) * softmax.factor);
                    base[r] = now == -INFINITE ? 0.0f : now;  // -inf - -inf would be NaN
                    shrink[r] = softmax.power(top[r] - base[r]);
                    grows = grows || now > top[r];
                    top[r] = now;
                }
                if (__any_sync(0xffffffffu, grows)) {
                    sum[0] *= shrink[0], sum[1] *= shrink[1];
                    o.each([&](int, int j, float &x) { x *= shrink[j / 2]; });
                }
                p.each([&](int i, int j, float &x) {
                    x = softmax.power(x * softmax.factor - base[j / 2]);
                    sum[j / 2] += x;
                    if (!kept(i, j)) x = 0.0f;
                });
                add_product<T, D>(o, p, v_tile, 0);
            }
        }
        sum[0] = row_sum(sum[0]), sum[1] = row_sum(sum[1]);
        const float scale = (float)dropout.scale;
        finish_copies();  // of q, if no key is seen
        __syncthreads();
        put_rows<T, D>(qs, o, own, 0, sum[0] == 0.0f ? 0.0f : scale / sum[0], sum[1] == 0.0f ? 0.0f : scale / sum[1]);
        __syncthreads();
        store_rows<Q, D>(qs, out.head<T>(b, n), out.s, first, s.sq, s.dv, s.vec);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const i64 i = first + own + lane / 4 + 8 * r;
            if (lane % 4 == 0 && i < s.sq)
                lse[((i64)b * s.heads + n) * s.sq + i] = sum[r] == 0.0f ? -INFINITE : top[r] / Softmax<T>::UNIT + logf(sum[r]);
        }
    }
}

// delta [batch][heads][sq] = sum over d of dout out; a warp per row.
template <class T>
__global__ void __launch_bounds__(256) attention_delta(View dout, View out, float *delta, Shape s) {
    const i64 rows = s.batch * s.heads * s.sq;
    const int lane = threadIdx.x % 32;
    for (i64 r = (i64)blockIdx.x * 8 + threadIdx.x / 32; r < rows; r += (i64)gridDim.x * 8) {
        const i64 i = r % s.sq, n = r / s.sq % s.heads, b = r / s.sq / s.heads;
        const T *x = dout.head<T>(b, n) + i * dout.s, *y = out.head<T>(b, n) + i * out.s;
        float total = 0.0f;
        for (int j = lane; j < s.dv; j += 32) total += to_float(x[j]) * to_float(y[j]);
#pragma unroll
        for (int other = 16; other > 0; other /= 2) total += __shfl_xor_sync(0xffffffffu, total, other);
        if (lane == 0) delta[r] = total;
    }
}

// The tiles of a backward pass in shared memory. For float32, P and dS take the place of the products they come from.
template <class T, int D> struct Backward {
    static constexpr int B = Sizes<T, D>::B, LD = D + Lanes<T>::count, LS = B + 1, LP = sizeof(T) == 4 ? LS : B + 2;
    static constexpr int OWN = sizeof(T) == 4 ? 1 : B * LP;
    alignas(16) T q[B * LD], dout[B * LD], k[B * LD], v[B * LD], p_[OWN], ds_[OWN];
    alignas(16) float s[B * LS], dp[B * LS];
    float lse[B], delta[B];
    Interval seen[B];
    INLINE T *p() { return sizeof(T) == 4 ? (T *)s : p_; }
    INLINE T *ds() { return sizeof(T) == 4 ? (T *)dp : ds_; }
};

template <class T, int D>
INLINE void load_queries(Backward<T, D> &m, const View &q, const View &dout, const float *lse, const float *delta,
                         const Shape &s, i64 b, i64 n, i64 first) {
    constexpr int B = Backward<T, D>::B, LD = Backward<T, D>::LD;
    load_tile<B, D, LD>(m.q, q.head<T>(b, n), q.s, first, s.sq, s.d, s.vec);
    load_tile<B, D, LD>(m.dout, dout.head<T>(b, n), dout.s, first, s.sq, s.dv, s.vec);
    if (threadIdx.x < B && first + threadIdx.x < s.sq) {
        m.lse[threadIdx.x] = lse[(b * s.heads + n) * s.sq + first + threadIdx.x];
        m.delta[threadIdx.x] = delta[(b * s.heads + n) * s.sq + first + threadIdx.x];
    }
}

// p = dropout(P) and ds = dS of the tile of queries from `first` and keys from `key` on. Ends with a barrier.
template <class T, int D>
INLINE void scores_of(Backward<T, D> &m, const Shape &s, const Mask &mask, const Dropout &dropout, i64 b, i64 n, i64 first,
                      i64 key) {
    constexpr int B = Backward<T, D>::B, LD = Backward<T, D>::LD, LS = Backward<T, D>::LS, LP = Backward<T, D>::LP;
    const int depth = (int)(s.d + 15) / 16 * 16, depth_v = (int)(s.dv + 15) / 16 * 16;
    const float scale = (float)s.scale;
    Tile<T, B, B> x, y;
    x.zero(), y.zero();
    x.template add<false, true>(m.q, LD, m.k, LD, depth);
    y.template add<false, true>(m.dout, LD, m.v, LD, depth_v);
    x.each([&](int row, int column, float &value) { m.s[row * LS + column] = value; });
    y.each([&](int row, int column, float &value) { m.dp[row * LS + column] = value; });
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < B * (B / 4); at += 256) {
        const int row = at / (B / 4), column = at % (B / 4) * 4;
        bool visible[4];
        float factor[4];
        look(m.seen[row], mask, dropout, b, n, first + row, key + column, visible, factor);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float score = m.s[row * LS + column + c] * scale, dp = m.dp[row * LS + column + c] * factor[c];
            const float p = visible[c] ? exponential<T>(score - m.lse[row]) : 0.0f;
            from_float(p * factor[c], m.p()[row * LP + column + c]);
            from_float(visible[c] ? p * (dp - m.delta[row]) * scale : 0.0f, m.ds()[row * LP + column + c]);
        }
    }
    __syncthreads();
}

template <class T, int D>
__global__ void __launch_bounds__(256, 2) attention_dq(View q, View k, View v, View dout, View dq, const float *lse,
                                                    const float *delta, Shape s, Mask mask, Dropout dropout) {
    constexpr int B = Backward<T, D>::B, LD = Backward<T, D>::LD, LP = Backward<T, D>::LP;
    __shared__ Backward<T, D> m;
    const i64 tiles = (s.sq + B - 1) / B, work = s.batch * s.heads * tiles;
    for (i64 item = blockIdx.x; item < work; item += gridDim.x) {
        const i64 first = item % tiles * B, n = item / tiles % s.heads, b = item / tiles / s.heads;
        load_queries(m, q, dout, lse, delta, s, b, n, first);
        if (threadIdx.x < B) m.seen[threadIdx.x] = interval_of(s, first + threadIdx.x);
        __syncthreads();
        const Interval range = range_of<B>(m.seen);
        Tile<T, B, D> sum;
        sum.zero();
        for (i64 key = range.low / B * B; key < range.high; key += B) {
            load_tile<B, D, LD>(m.k, k.head<T>(b, n / s.group), k.s, key, s.skv, s.d, s.vec);
            load_tile<B, D, LD>(m.v, v.head<T>(b, n / s.group), v.s, key, s.skv, s.dv, s.vec);
            __syncthreads();
            scores_of(m, s, mask, dropout, b, n, first, key);
            sum.template add<false, false>(m.ds(), LP, m.k, LD, B);
            __syncthreads();
        }
        sum.each([&](int row, int column, float &x) { from_float(x, m.q[row * LD + column]); });
        __syncthreads();
        store_tile<B, D, LD>(m.q, dq.head<T>(b, n), dq.s, first, s.sq, s.d, s.vec);
        __syncthreads();
    }
}

template <class T, int D>
__global__ void __launch_bounds__(256, D == 64 ? 2 : 1) attention_dkv(View q, View k, View v, View dout, View dk, View dv, const float *lse,
                                                     const float *delta, Shape s, Mask mask, Dropout dropout) {
    constexpr int B = Backward<T, D>::B, LD = Backward<T, D>::LD, LP = Backward<T, D>::LP;
    __shared__ Backward<T, D> m;
    const i64 tiles = (s.skv + B - 1) / B, kv_heads = s.heads / s.group, work = s.batch * kv_heads * tiles;
    for (i64 item = blockIdx.x; item < work; item += gridDim.x) {
        const i64 key = item % tiles * B, g = item / tiles % kv_heads, b = item / tiles / kv_heads;
        load_tile<B, D, LD>(m.k, k.head<T>(b, g), k.s, key, s.skv, s.d, s.vec);
        load_tile<B, D, LD>(m.v, v.head<T>(b, g), v.s, key, s.skv, s.dv, s.vec);
        Tile<T, B, D> of_k, of_v;
        of_k.zero(), of_v.zero();
        for (i64 n = g * s.group; n < (g + 1) * s.group; n++)
            for (i64 first = 0; first < s.sq; first += B) {
                bool meets = false;
                if (threadIdx.x < B) {
                    const Interval seen = interval_of(s, first + threadIdx.x);
                    m.seen[threadIdx.x] = seen;
                    meets = seen.low < seen.high && seen.low < key + B && seen.high > key;
                }
                if (!__syncthreads_or(meets)) continue;
                load_queries(m, q, dout, lse, delta, s, b, n, first);
                __syncthreads();
                scores_of(m, s, mask, dropout, b, n, first, key);
                of_v.template add<true, false>(m.p(), LP, m.dout, LD, B);
                of_k.template add<true, false>(m.ds(), LP, m.q, LD, B);
                __syncthreads();
            }
        of_k.each([&](int row, int column, float &x) { from_float(x, m.k[row * LD + column]); });
        of_v.each([&](int row, int column, float &x) { from_float(x, m.v[row * LD + column]); });
        __syncthreads();
        store_tile<B, D, LD>(m.k, dk.head<T>(b, g), dk.s, key, s.skv, s.d, s.vec);
        store_tile<B, D, LD>(m.v, dv.head<T>(b, g), dv.s, key, s.skv, s.dv, s.vec);
        __syncthreads();
    }
}

EXPORT(attention_fwd<f32, 64>)
EXPORT(attention_fwd<f32, 128>)
EXPORT(attention_fwd<bf16, 64>)
EXPORT(attention_fwd<bf16, 128>)
EXPORT(attention_fwd<bf16, 256>)
EXPORT(attention_fwd<f16, 64>)
EXPORT(attention_fwd<f16, 128>)
EXPORT(attention_fwd<f16, 256>)
EXPORT(attention_delta<f32>)
EXPORT(attention_delta<bf16>)
EXPORT(attention_delta<f16>)
EXPORT(attention_dq<f32, 64>)
EXPORT(attention_dq<f32, 128>)
EXPORT(attention_dq<bf16, 64>)
EXPORT(attention_dq<bf16, 128>)
EXPORT(attention_dq<bf16, 256>)
EXPORT(attention_dq<f16, 64>)
EXPORT(attention_dq<f16, 128>)
EXPORT(attention_dq<f16, 256>)
EXPORT(attention_dkv<f32, 64>)
EXPORT(attention_dkv<f32, 128>)
EXPORT(attention_dkv<bf16, 64>)
EXPORT(attention_dkv<bf16, 128>)
EXPORT(attention_dkv<bf16, 256>)
EXPORT(attention_dkv<f16, 64>)
EXPORT(attention_dkv<f16, 128>)
EXPORT(attention_dkv<f16, 256>)
