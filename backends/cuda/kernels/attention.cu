// Attention with windows, masks, packed sequences, grouped heads and HAL's dropout, forward and backward.
//
// Forward (Dao, arXiv 2307.08691): a block of four warps owns Q queries of a head, 16 per warp, and iterates over tiles
// of K keys: S = Q K^T, running maximum and sum per row, P = dropout(exp(S - max)), O = O exp(old - new maximum) + P V.
// A warp keeps its scores in registers from one product to the next, so that only tiles of the tensors pass through
// shared memory. Backward recomputes P from the log-sum-exp in two kernels, so that every element is summed by one
// thread in a fixed order and results repeat bit for bit: attention_dq owns queries, attention_dkv owns keys and
// iterates over the query heads of their group, with S^T = K Q^T. With delta = sum(dO O): dS = P (dropout(dO V^T) -
// delta), dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO.
//
// Every query sees an interval of keys, from its window and, if packed, from cu_seqlens; tiles outside of the intervals
// of all rows of a tile are skipped, as are the products of a warp whose rows see none of the tile. A tile that all
// rows of a warp see whole needs no comparisons; otherwise, and if there is a mask, what is visible is collected in
// bits first. Dropout's bits are those of element (b, n, i, j) of the draw, four adjacent keys per Philox block. A lane
// draws as many blocks as it has scores divided by four, and gets those of its own scores from its neighbours as bits,
// by shuffles. They are drawn again in the backward pass.
//
// Tiles are copied asynchronously (cp.async) into static shared memory, below the 48 KiB that need no opting in; with
// two stages, a tile is copied while the one before it is computed. P and dS are rounded to the element type before
// their products, as in FlashAttention, and the factor of dropout is applied to sums. Memory traffic: q, out and lse
// once, k and v once per Q queries (mostly from L2); backward reads k and v per OWN queries, and q and dout per OWN
// keys.
#include "attention_tiles.h"

// The forward kernel's tiles: Q queries, K keys, of which STAGES tiles are in memory; BLOCKS of a multiprocessor.
template <class T, int D> struct Forward {
    static constexpr int BYTES = D * (int)sizeof(T);  // of a row
    static constexpr int Q = 64, K = BYTES == 128 ? 64 : BYTES == 256 ? 32 : 16, STAGES = BYTES == 512 ? 1 : 2;
    static constexpr int BLOCKS = BYTES == 512 ? 2 : 3;
};

// Those of the backward kernels: OWN queries or keys of a block, OTHER keys or queries, of which STAGES tiles are in
// memory. The warps of 16 rows are SPLIT, each of which has C columns of the sums (and computes all scores again).
template <class T, int D> struct Backward {
    static constexpr int BYTES = D * (int)sizeof(T);
    static constexpr int OWN = BYTES == 512 ? 32 : 64, OTHER = BYTES == 512 ? 16 : 32, STAGES = BYTES == 128 ? 2 : 1;
    static constexpr int SPLIT = BYTES == 512 ? 2 : 1, C = D / SPLIT;
    static constexpr int DQ_BLOCKS = 3, DKV_BLOCKS = C == 128 || sizeof(T) == 4 ? 2 : 3;
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

// What the 16 queries of a warp from `first` on see. Intervals begin and end in the order of their queries, so those of
// the first and last query bound all of them. Queries beyond the last one count as the last one.
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

// tile[ROWS][D] = rows [first, first + ROWS) of x; zeros outside of `length` rows and d columns. Complete for this
// thread after finish_copies(), for others after a barrier.
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

// The opposite: rows [first, first + ROWS) of x, as far as it has them, become those of tile. A thread reads what it
// writes in load_rows, so that the tile may be loaded again without a barrier.
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

// Rows `row`, ... of a tile, from `column` (a multiple of 64) on, become the fragment of a warp; rows g times `top`,
// rows g + 8 times `bottom`.
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
    bool negative;  // whether the scale is: then products change their signs, so that a larger one is more probable
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

// A bit for each element of a fragment that a lane has: of row g or g + 8 and column 8 i + 2 t + j, bit 4 i + j of a
// word.
struct Bits {
    u32 row[2];
    INLINE bool operator()(int i, int j) const { return row[j / 2] >> (4 * i + j % 2) & 1; }
};

// Which of four adjacent keys dropout keeps, for N / 8 places in the draw, in four bits each: the first of them is
// element `at`, each next one `step` elements, a multiple of 4, further. threshold is not 0.
template <int N> INLINE u32 kept(const Dropout &dropout, u64 at, u64 step) {
    const u32 most = (u32)((dropout.threshold << 8) - 1);  // the largest number that drops an element
    const u32 shift = (u32)at % 4;
    u64 block = dropout.draw.offset + at / 4;
    u32 result = 0;
    if (!shift) {
#pragma unroll 2
        for (int i = 0; i < N / 8; i++, block += step / 4) {
            u32 x[1][4], four = 0;
            philox(dropout.draw, block, x);
#pragma unroll
            for (int c = 0; c < 4; c++) four |= x[0][c] > most ? 1u << c : 0;
            result |= four << 4 * i;
        }
    } else {  // four keys have numbers of two blocks; selected by comparisons, as a run-time index needs local memory
#pragma unroll 1
        for (int i = 0; i < N / 8; i++, block += step / 4) {
            u32 x[2][4], four = 0;
            philox(dropout.draw, block, x);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 one = x[(c + 1) / 4][(c + 1) % 4], two = x[(c + 2) / 4][(c + 2) % 4];
                const u32 bits = shift == 1 ? one : shift == 2 ? two : x[(c + 3) / 4][(c + 3) % 4];
                four |= bits > most ? 1u << c : 0;
            }
            result |= four << 4 * i;
        }
    }
    return result;
}

constexpr Bits ALL = {{0xffffffffu, 0xffffffffu}};

// The element of the draw for query i and key j.
INLINE u64 element_of(const Dropout &dropout, int b, int n, i64 i, i64 j) {
    const i64 *steps = dropout.draw.strides;
    return (u64)(dropout.draw.index0 + b * steps[0] + n * steps[1] + i * steps[2] + j);
}

// The elements that dropout keeps of products of 16 queries with N keys. row: element_of the first query and key 0.
template <int N> INLINE Bits keep(const Dropout &dropout, u64 row, int key) {
    if (!dropout.threshold) return ALL;
    // Lanes with t = 2 a and 2 a + 1 share the four keys of a Philox block: one draws those of row g, the other those
    // of row g + 8.
    const u32 lane = threadIdx.x % 32, t = lane % 4, odd = t % 2;
    const u64 at = row + (lane / 4 + odd * 8) * (u64)dropout.draw.strides[2] + t / 2 * 4;
    const u32 own = kept<N>(dropout, at + key, 8), other = __shfl_xor_sync(0xffffffffu, own, 1);
    return {{(odd ? other : own) >> 2 * odd, (odd ? own : other) >> 2 * odd}};
}

// The same for products of 16 keys with N queries. at: element_of the first of both.
template <int N> INLINE Bits keep_transposed(const Dropout &dropout, u64 at) {
    if (!dropout.threshold) return ALL;
    // The lanes with one t share two queries of every eight: lane g draws keys 4 (g % 4), ... of query g / 4 of them.
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 step = (u64)dropout.draw.strides[2];
    const u32 own = kept<N>(dropout, at + (2 * t + g / 4) * step + g % 4 * 4, 8 * step);
    Bits result;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int from = (int)((g / 4 + 2 * r) * 4 + t);
        const u32 first = __shfl_sync(0xffffffffu, own, from), second = __shfl_sync(0xffffffffu, own, from + 16);
        result.row[r] = (first >> g % 4 & 0x11111111u) | (second >> g % 4 & 0x11111111u) << 1;
    }
    return result;
}

// The elements of a fragment of N columns for which f(0 for row g or 1 for g + 8, column) holds, in a loop that takes U
// columns at once.
template <int N, int U, class F> INLINE Bits bits_where(u32 t, F f) {
    Bits result = {};
#pragma unroll U
    for (int at = 0; at < N / 4; at++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (f(r, at / 2 * 8 + 2 * (int)t + at % 2)) result.row[r] |= 1u << (at / 2 * 4 + at % 2);
    return result;
}

// The elements that are visible of N keys from `key` on. In loops, because few tiles are visible in part unless there
// is a mask; of its bytes four are loaded at once.
template <int N>
INLINE Bits visible(const Shape &s, const Seen &seen, const Mask &mask, int b, int n, int first, int key) {
    const u32 t = here(threadIdx.x) % 4;
    const auto inside = [&](int r, int column) {
        return key + column >= seen.row[r].low && key + column < seen.row[r].high;
    };
    if (!mask.at) return bits_where<N, 1>(t, inside);
    const u8 *masked[2];
    first = (int)here((u32)first);
#pragma unroll
    for (int r = 0; r < 2; r++)
        masked[r] = mask.at + b * mask.b + n * mask.n + Seen::query(s, first, r) * mask.q + key * mask.k;
    return bits_where<N, 2>(t, [&](int r, int column) {
        return inside(r, column) && !masked[r][column * mask.k];
    });
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
    attention_fwd(View q, View k, View v, View out, float *lse, Shape s, Mask mask, Dropout dropout,
                  const float *sinks) {
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
        const u64 row = element_of(dropout, b, n, first + own, 0);
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
                const Bits kept = keep<K>(dropout, row, key);
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
                lse[((i64)b * s.heads + n) * s.sq + i] =
                    sum[r] == 0.0f ? -INFINITE : top[r] / Softmax<T>::UNIT + logf(sum[r]);
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

// What the exponent of a row's probabilities is less than that of its products; 0 for a query that sees no key.
template <class T> INLINE float base_of(float lse) { return lse == -INFINITE ? 0.0f : lse * Softmax<T>::UNIT; }

template <class T, int D>
__global__ void __launch_bounds__(THREADS, Backward<T, D>::DQ_BLOCKS)
    attention_dq(View q, View k, View v, View dout, View dq, const float *lse, const float *delta, Shape s, Mask mask,
                 Dropout dropout) {
    using Size = Backward<T, D>;
    constexpr int Q = Size::OWN, K = Size::OTHER, STAGES = Size::STAGES, AHEAD = (STAGES - 1) * K;
    alignas(16) __shared__ T qs[Q * D], dos[Q * D], ks[STAGES][K * D], vs[STAGES][K * D];
    const Softmax<T> softmax(s.scale);
    const float grow = (float)dropout.scale;
    const int own = threadIdx.x / 32 % (Q / 16) * 16;
    const int column = threadIdx.x / 32 / (Q / 16) * Size::C;
    const u32 tiles = (u32)((s.sq + Q - 1) / Q), heads = (u32)s.heads, work = (u32)s.batch * heads * tiles;
    for (u32 item = blockIdx.x; item < work; item += gridDim.x) {
        const int first = (int)((tiles - 1 - item % tiles) * Q), n = (int)(item / tiles % heads);
        const int b = (int)(item / tiles / heads), group = n / (int)s.group;
        const T *keys = k.head<T>(b, group), *values = v.head<T>(b, group);
        load_rows<Q, D>(qs, q.head<T>(b, n), q.s, first, s.sq, s.d, s.vec);
        load_rows<Q, D>(dos, dout.head<T>(b, n), dout.s, first, s.sq, s.dv, s.vec);
        const Interval range = {interval_of(s, first).low, interval_of(s, clamp(first + Q, 0, s.sq) - 1).high};
        const Seen seen(s, first + own);
        const u64 row = element_of(dropout, b, n, first + own, 0);
        float base[2], mean[2];  // mean: delta
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const i64 at = ((i64)b * s.heads + n) * s.sq + Seen::query(s, first + own, r);
            base[r] = base_of<T>(lse[at]), mean[r] = delta[at];
        }
        Fragment<Size::C> sum;
        sum.zero();
        const int start = range.low / K * K;
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
            if (key < start || seen.any.low >= key + K || seen.any.high <= key) continue;
            const T *const k_tile = ks[key / K % STAGES], *const v_tile = vs[key / K % STAGES];
            const Bits kept = keep<K>(dropout, row, key);
            Fragment<K> p, ds;
            multiply_rows<T, D>(p, qs + own * D, k_tile, s.d);
            softmax.sign(p);
            if (mask.at || seen.all.low > key || seen.all.high < key + K) {
                const Bits shown = visible<K>(s, seen, mask, b, n, first + own, key);
                p.each([&](int i, int j, float &x) { x = shown(i, j) ? x : -INFINITE; });
            }
            multiply_rows<T, D>(ds, dos + own * D, v_tile, s.dv);
            ds.each([&](int i, int j, float &x) {
                const float probability = softmax.power(p.c[i][j] * softmax.factor - base[j / 2]);
                x = probability * ((kept(i, j) ? x * grow : 0.0f) - mean[j / 2]);
            });
            add_product<T, D>(sum, ds, k_tile, column);
        }
        finish_copies();  // of q, if no key is seen
        __syncthreads();
        const float scale = (float)s.scale;
        put_rows<T, D>(qs, sum, own, column, scale, scale);
        __syncthreads();
        store_rows<Q, D>(qs, dq.head<T>(b, n), dq.s, first, s.sq, s.d, s.vec);
    }
}

// The first of n tiles for which `beyond` holds, or n. It holds for all tiles after one for which it does.
template <class F> INLINE int first_tile(int n, F beyond) {
    int low = 0, high = n;
#pragma unroll 1
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (beyond(middle)) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The elements that are visible of products of the 16 keys from `key` on with the N queries from `first` on. seen: what
// query first + lane % N sees.
template <int N>
INLINE Bits visible_transposed(const Shape &s, const Interval &seen, const Mask &mask, int b, int n, int first,
                               int key) {
    const u32 lane = here(threadIdx.x) % 32;
    const int own = key + (int)lane / 4;
    const auto inside = [&](int r, int column) {
        const int low = __shfl_sync(0xffffffffu, seen.low, column), high = __shfl_sync(0xffffffffu, seen.high, column);
        return own + 8 * r >= low && own + 8 * r < high;
    };
    if (!mask.at) return bits_where<N, 1>(lane % 4, inside);
    const u8 *masked = mask.at + b * mask.b + n * mask.n + own * mask.k;
    return bits_where<N, 2>(lane % 4, [&](int r, int column) {
        const i64 i = clamp(first + column, 0, s.sq - 1);
        return inside(r, column) && !masked[i * mask.q + 8 * r * mask.k];
    });
}

template <class T, int D>
__global__ void __launch_bounds__(THREADS, Backward<T, D>::DKV_BLOCKS)
    attention_dkv(View q, View k, View v, View dout, View dk, View dv, const float *lse, const float *delta, Shape s,
                  Mask mask, Dropout dropout) {
    using Size = Backward<T, D>;
    constexpr int K = Size::OWN, Q = Size::OTHER, STAGES = Size::STAGES, AHEAD = STAGES - 1;
    alignas(16) __shared__ T ks[K * D], vs[K * D], qs[STAGES][Q * D], dos[STAGES][Q * D];
    const Softmax<T> softmax(s.scale);
    const float grow = (float)dropout.scale;
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 % (K / 16) * 16;
    const int column = threadIdx.x / 32 / (K / 16) * Size::C;
    const u32 tiles = (u32)((s.skv + K - 1) / K), groups = (u32)(s.heads / s.group);
    const u32 work = (u32)s.batch * groups * tiles;
    for (u32 item = blockIdx.x; item < work; item += gridDim.x) {
        const int block = (int)(item % tiles * K), g = (int)(item / tiles % groups), b = (int)(item / tiles / groups);
        const int key = block + own;  // the first one of the warp
        load_rows<K, D>(ks, k.head<T>(b, g), k.s, block, s.skv, s.d, s.vec);
        load_rows<K, D>(vs, v.head<T>(b, g), v.s, block, s.skv, s.dv, s.vec);
        // Intervals begin and end in the order of the queries, so the queries that see a key of the block are adjacent.
        const int all = (int)((s.sq + Q - 1) / Q);
        const auto last_of = [&](int i) { return clamp((i64)(i + 1) * Q, 0, s.sq) - 1; };
        const int begin = first_tile(all, [&](int i) { return interval_of(s, last_of(i)).high > block; });
        const int end = first_tile(all, [&](int i) { return interval_of(s, (i64)i * Q).low >= block + K; });
        Fragment<Size::C> of_k, of_v;
        of_k.zero(), of_v.zero();
        int n = g * (int)s.group, tile = begin - AHEAD, stage = AHEAD;
        const int last = begin < end ? n + (int)s.group : n;
        while (n < last) {
            if (AHEAD && tile >= begin) finish_copies();
            __syncthreads();
            const bool wraps = AHEAD && tile + 1 == end;
            const int next = wraps ? begin : tile + AHEAD, next_n = wraps ? n + 1 : n, next_stage = stage ^ AHEAD;
            if (next_n < last) {
                load_rows<Q, D>(qs[next_stage], q.head<T>(b, next_n), q.s, (i64)next * Q, s.sq, s.d, s.vec);
                load_rows<Q, D>(dos[next_stage], dout.head<T>(b, next_n), dout.s, (i64)next * Q, s.sq, s.dv, s.vec);
            }
            if (!AHEAD) {
                finish_copies();
                __syncthreads();
            }
            const int first = tile * Q, head = n;
            const bool loaded = tile >= begin;
            const T *const q_tile = qs[stage], *const do_tile = dos[stage];
            stage = next_stage;
            if (++tile == end) tile = begin, n++;
            if (!loaded) continue;
            // A lane has what belongs to one query, of which a fragment's columns get copies by shuffles.
            const i64 query = clamp(first + lane % Q, 0, s.sq - 1), at = ((i64)b * s.heads + head) * s.sq + query;
            const float own_base = base_of<T>(lse[at]), own_mean = delta[at];
            const Interval seen = interval_of(s, query);
            const int low = __shfl_sync(0xffffffffu, seen.low, 0), high = __shfl_sync(0xffffffffu, seen.high, Q - 1);
            if (low >= key + 16 || high <= key) continue;
            const int all_low = __shfl_sync(0xffffffffu, seen.low, Q - 1);
            const int all_high = __shfl_sync(0xffffffffu, seen.high, 0);
            const Bits kept = keep_transposed<Q>(dropout, element_of(dropout, b, head, first, key));
            Fragment<Q> p, ds;
            multiply_rows<T, D>(p, ks + own * D, q_tile, s.d);
            softmax.sign(p);
            if (mask.at || all_low > key || all_high < key + 16) {
                const Bits shown = visible_transposed<Q>(s, seen, mask, b, head, first, key);
                p.each([&](int i, int j, float &x) { x = shown(i, j) ? x : -INFINITE; });
            }
            multiply_rows<T, D>(ds, vs + own * D, do_tile, s.dv);
#pragma unroll
            for (int i = 0; i < Q / 8; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int from = 8 * i + lane % 4 * 2 + c;
                    const float base = __shfl_sync(0xffffffffu, own_base, from);
                    const float mean = __shfl_sync(0xffffffffu, own_mean, from);
#pragma unroll
                    for (int j = c; j < 4; j += 2) {
                        const float probability = softmax.power(p.c[i][j] * softmax.factor - base);
                        p.c[i][j] = kept(i, j) ? probability : 0.0f;
                        ds.c[i][j] = probability * ((kept(i, j) ? ds.c[i][j] * grow : 0.0f) - mean);
                    }
                }
            add_product<T, D>(of_v, p, do_tile, column);
            add_product<T, D>(of_k, ds, q_tile, column);
        }
        finish_copies();  // of k and v, if no query sees them
        __syncthreads();
        const float scale = (float)s.scale;
        put_rows<T, D>(ks, of_k, own, column, scale, scale);
        put_rows<T, D>(vs, of_v, own, column, grow, grow);
        __syncthreads();
        store_rows<K, D>(ks, dk.head<T>(b, g), dk.s, block, s.skv, s.d, s.vec);
        store_rows<K, D>(vs, dv.head<T>(b, g), dv.s, block, s.skv, s.dv, s.vec);
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
