// Shared by all kernels: element types, 16-byte accesses, iteration over a row, block reductions, Philox.
//
// Written in the subset of CUDA C++17 that two compilers accept: NVRTC, and g++ with simulator/cuda_host.h, which
// supplies the execution model on a CPU. No CUDA header is included, so NVRTC needs no toolkit.
//
// Kernel parameters are pointers, i64, double, and structs of those: always multiples of 8 bytes, so that the launcher
// packs them one after the other (launch.py). EXPORT(name<types>) lists an instantiation; launch.py and compile.py read
// the list. Blocks have a multiple of 32 threads. Statistics and sums are float32 for all element types, and the
// order of every reduction depends on the shape only, so results are bit-equal from run to run.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

typedef float f32;
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

#ifdef HAL_SIMULATE
#include "cuda_host.h"
#else
#define EXPORT(...)
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
__device__ __forceinline__ float f16_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ u16 float_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ u16 float_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// Two values in one word, `low` in its lower half.
__device__ __forceinline__ u32 floats_to_bf16(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ u32 floats_to_f16(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
// 2^x with a relative error of 2^-22; 0 where the result is subnormal. This is one instruction. expf takes a dozen,
// which would make the cross entropy of a large vocabulary bound by arithmetic instead of by memory.
__device__ __forceinline__ float power_of_2(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
// 1 / x with a relative error of 2^-23; 0 where the result is subnormal. One instruction, where a division takes ten.
__device__ __forceinline__ float reciprocal(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
// The 64 bits of a product. As a product of 64-bit numbers, ptxas adds the zero upper half of `a` times b to it.
__device__ __forceinline__ u64 wide_product(u32 a, u32 b) {
    u64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}
// *p = v, 16 bytes, in one access: in most loops NVRTC compiles the assignment to one store per element. The "memory"
// clobber keeps the compiler from reordering it with other accesses.
template <class V> __device__ __forceinline__ void store16(V *p, const V &v) {
    const uint4 bits = *reinterpret_cast<const uint4 *>(&v);
    asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w) : "memory");
}
#endif

#define INLINE __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)

INLINE float to_float(f32 x) { return x; }
INLINE float to_float(bf16 x) { return __int_as_float((int)((u32)x.bits << 16)); }
INLINE float to_float(f16 x) { return f16_to_float(x.bits); }
INLINE void from_float(float value, f32 &x) { x = value; }
INLINE void from_float(float value, bf16 &x) { x.bits = float_to_bf16(value); }
INLINE void from_float(float value, f16 &x) { x.bits = float_to_f16(value); }

// Elements of T in one 16-byte access.
template <class T> struct Lanes {
    static constexpr int count = 16 / (int)sizeof(T);
};
// 16 bytes of T as 32-bit words, each one float32 or two 16-bit elements, the first in the lower half.
template <class T> struct alignas(16) Vector {
    u32 word[4];
};
INLINE float element(const Vector<f32> &x, int i) { return __int_as_float((int)x.word[i]); }
INLINE float element(const Vector<bf16> &x, int i) {
    const u32 word = x.word[i / 2];
    return __int_as_float((int)(i % 2 ? word & 0xffff0000u : word << 16));
}
INLINE float element(const Vector<f16> &x, int i) { return f16_to_float((u16)(x.word[i / 2] >> 16 * (i % 2))); }
INLINE u32 word_of(const float *v, f32) { return (u32)__float_as_int(v[0]); }
INLINE u32 word_of(const float *v, bf16) { return floats_to_bf16(v[0], v[1]); }
INLINE u32 word_of(const float *v, f16) { return floats_to_f16(v[0], v[1]); }
template <int N> struct Width {
    static constexpr int count = N;
};

// N elements as they lie in memory. A loop that fetches several of them before it converts the first one has as many
// loads in flight; float32 values would take twice the registers.
template <class T, int N, bool VECTORS = sizeof(T) * N % 16 == 0> struct Raw {
    T lane[N];
};
template <class T, int N> struct Raw<T, N, true> {
    Vector<T> part[N / Lanes<T>::count];
};

// p[0 .. N), in 16-byte accesses if N elements are a multiple of 16 bytes (p is then 16-byte aligned), otherwise
// element by element.
template <int N, class T> INLINE Raw<T, N> fetch(const T *p) {
    Raw<T, N> raw;
    if constexpr (sizeof(T) * N % 16 == 0) {
        constexpr int lanes = Lanes<T>::count;
#pragma unroll
        for (int i = 0; i < N / lanes; i++) raw.part[i] = *reinterpret_cast<const Vector<T> *>(p + i * lanes);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) raw.lane[i] = p[i];
    }
    return raw;
}

template <class T, int N> INLINE void floats(const Raw<T, N> &raw, float (&v)[N]) {
    constexpr int lanes = Lanes<T>::count;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if constexpr (sizeof(T) * N % 16 == 0) v[i] = element(raw.part[i / lanes], i % lanes);
        else v[i] = to_float(raw.lane[i]);
    }
}

template <class T, int N> INLINE void load(const T *p, float (&v)[N]) { floats(fetch<N>(p), v); }

// What a loop fetches of two or three streams.
template <class A, class B> struct Pair {
    A a;
    B b;
};
template <class A, class B, class C> struct Triple {
    A a;
    B b;
    C c;
};

template <class T, int N> INLINE void store(T *p, const float (&v)[N]) {
    if constexpr (sizeof(T) * N % 16 == 0) {
        constexpr int lanes = Lanes<T>::count;
#pragma unroll
        for (int i = 0; i < N; i += lanes) {
            Vector<T> part;
#pragma unroll
            for (int k = 0; k < 4; k++) part.word[k] = word_of(v + i + k * lanes / 4, T{});
            store16(reinterpret_cast<Vector<T> *>(p + i), part);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) from_float(v[i], p[i]);
    }
}

// The number of elements before the first 16-byte boundary at or after p (at most n).
template <class T> INLINE int head_of(const T *p, int n) {
    const int head = (int)((16 - ((u64)p & 15)) & 15) / (int)sizeof(T);
    return head < n ? head : n;
}

// use(k, fetch(k)) for k = first, first + step, ... below end, in groups of U whose loads are all issued before the first
// of them is used: a load takes several hundred cycles, and U of them per thread are what fills the memory system.
template <int U, class I, class Fetch, class Use> INLINE void staged(I first, I end, I step, Fetch fetch, Use use) {
    for (I k = first; k < end; k += U * step) {
        decltype(fetch(k)) held[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (k + u * step < end) held[u] = fetch(k + u * step);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (k + u * step < end) use(k + u * step, held[u]);
    }
}

// Divides [0, n) among the threads of a block: f(j, Width<V>) for vectors from `head` on, f(j, Width<1>) for the
// remaining elements on both sides. With head = n all accesses are scalar.
template <int V, class F> INLINE void walk(int head, int n, F f) {
    const int vectors = (n - head) / V;
    for (int j = threadIdx.x; j < head; j += blockDim.x) f(j, Width<1>{});
    for (int k = threadIdx.x; k < vectors; k += blockDim.x) f(head + k * V, Width<V>{});
    for (int j = head + vectors * V + threadIdx.x; j < n; j += blockDim.x) f(j, Width<1>{});
}

// The same in groups of U vectors: use(j, fetch(j, Width), Width), see `staged`.
template <int V, int U, class Fetch, class Use> INLINE void walk(int head, int n, Fetch fetch, Use use) {
    const int vectors = (n - head) / V, step = (int)blockDim.x;
    const auto one = [&](int j) { use(j, fetch(j, Width<1>{}), Width<1>{}); };
    for (int j = threadIdx.x; j < head; j += step) one(j);
    staged<U>((int)threadIdx.x, vectors, step, [&](int k) { return fetch(head + k * V, Width<V>{}); },
              [&](int k, const auto &held) { use(head + k * V, held, Width<V>{}); });
    for (int j = head + vectors * V + (int)threadIdx.x; j < n; j += step) one(j);
}

// A thread's vectors of a row of `vectors` of them, at most U: f(u, j) for the u-th, which begins at element j. Unrolled,
// so that f may keep them in an array of registers.
template <int V, int U, class F> INLINE void own(int vectors, F f) {
#pragma unroll
    for (int u = 0; u < U; u++) {
        const int k = (int)threadIdx.x + u * (int)blockDim.x;
        if (k < vectors) f(u, k * V);
    }
}

// Divides the columns [0, n) among the threads of a grid (its x dimension): vectors first if `vec`, then single
// columns.
template <int V, class F> INLINE void columns(i64 vec, i64 n, F f) {
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    const i64 vectors = vec ? n / V : 0;
    for (i64 k = first; k < vectors; k += step) f(k * V, Width<V>{});
    for (i64 j = vectors * V + first; j < n; j += step) f(j, Width<1>{});
}

// The rows of a column that belong to this block (its y coordinate): use(r, fetch(r)), see `staged`.
template <int U, class I, class Fetch, class Use> INLINE void column_rows(I rows, Fetch fetch, Use use) {
    staged<U>((I)blockIdx.y, rows, (I)gridDim.y, fetch, use);
}

template <int N> struct Floats {
    float v[N];
};

// merge(a, b) merges b into a. Returns the merged value of all threads, in a fixed order, to every thread of the block.
// Ends with a barrier, so it may be called again immediately. All threads of the block must call it. A block of one warp
// needs neither barriers nor shared memory.
template <int N, class F> INLINE Floats<N> block_reduce(Floats<N> value, F merge) {
    __shared__ float partial[32 * N];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Floats<N> other;
#pragma unroll
        for (int i = 0; i < N; i++) other.v[i] = __shfl_down_sync(0xffffffffu, value.v[i], distance);
        merge(value, other);
    }
    if (warps == 1) {
#pragma unroll
        for (int i = 0; i < N; i++) value.v[i] = __shfl_sync(0xffffffffu, value.v[i], 0);
        return value;
    }
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) partial[warp * N + i] = value.v[i];
    }
    __syncthreads();
    Floats<N> result;
#pragma unroll
    for (int i = 0; i < N; i++) result.v[i] = partial[i];
    for (int w = 1; w < warps; w++) {
        Floats<N> other;
#pragma unroll
        for (int i = 0; i < N; i++) other.v[i] = partial[w * N + i];
        merge(result, other);
    }
    __syncthreads();
    return result;
}

template <int N> struct Add {
    INLINE void operator()(Floats<N> &a, const Floats<N> &b) const {
#pragma unroll
        for (int i = 0; i < N; i++) a.v[i] += b.v[i];
    }
};

// The running maximum (v[0]) and sum of exp(value - maximum) (v[1]) of a set of numbers; {-inf, 0} for the empty set.
struct LogSum {
    INLINE void operator()(Floats<2> &a, const Floats<2> &b) const {
        const float top = fmaxf(a.v[0], b.v[0]);
        // Both sets are empty: -inf - -inf would be NaN.
        const float of_a = a.v[0] == top ? 1.0f : expf(a.v[0] - top), of_b = b.v[0] == top ? 1.0f : expf(b.v[0] - top);
        a.v[1] = a.v[1] * of_a + b.v[1] * of_b;
        a.v[0] = top;
    }
};

// Such a pair, and the sum of other numbers in v[2].
struct LogSumAndSum {
    INLINE void operator()(Floats<3> &a, const Floats<3> &b) const {
        Floats<2> top = {{a.v[0], a.v[1]}};
        LogSum()(top, {{b.v[0], b.v[1]}});
        a.v[0] = top.v[0], a.v[1] = top.v[1], a.v[2] += b.v[2];
    }
};

constexpr float LOG2_E = 1.44269504f;

// Adds N numbers to such a pair. NaN propagates through the sum, because fmaxf ignores it; +inf makes the sum NaN.
template <int N> INLINE void log_sum_add(Floats<2> &acc, const float (&s)[N]) {
    float top = acc.v[0];
#pragma unroll
    for (int i = 0; i < N; i++) top = fmaxf(top, s[i]);
    const float base = top == -INFINITE ? 0.0f : top;  // only -inf so far: -inf - -inf would be NaN
    float sum = acc.v[1] * power_of_2((acc.v[0] - base) * LOG2_E);
#pragma unroll
    for (int i = 0; i < N; i++) sum += power_of_2((s[i] - base) * LOG2_E);
    acc.v[0] = top;
    acc.v[1] = sum;
}

// A draw as rows: element (a, b, c, column) has index index0 + a strides[0] + b strides[1] + c strides[2] + column.
// keys: the two keys of each of Philox's rounds (random.py). As kernel parameters they are operands of the instructions
// that use them; computed here, they cost two additions per round and block of numbers.
struct Draw {
    u32 keys[10][2];
    u64 offset;
    i64 index0, sizes[4], strides[3];
    INLINE i64 rows() const { return sizes[0] * sizes[1] * sizes[2]; }
};

// The index `at` in the draw of the first element of the rows first, first + step, ... Rows are counted in the digits a,
// b and c, of which c and b are kept: their carries take the place of two divisions per row. The launcher refuses 2^31
// rows or more.
struct DrawRows {
    u64 at, step, carry_b, carry_a;
    u32 b, c, step_b, step_c, size_b, size_c;
    INLINE DrawRows(const Draw &draw, u32 first, u32 by) : size_b((u32)draw.sizes[1]), size_c((u32)draw.sizes[2]) {
        const i64 *s = draw.strides;
        const u32 ab = first / size_c, step_ab = by / size_c;
        c = first % size_c, b = ab % size_b, step_c = by % size_c, step_b = step_ab % size_b;
        at = (u64)(draw.index0 + ab / size_b * s[0] + b * s[1] + c * s[2]);
        step = (u64)(step_ab / size_b * s[0] + step_b * s[1] + step_c * s[2]);
        carry_b = (u64)(s[1] - size_c * s[2]), carry_a = (u64)(s[0] - size_b * s[1]);
    }
    INLINE void next() {
        at += step, b += step_b, c += step_c;
        if (c >= size_c) c -= size_c, b += 1, at += carry_b;
        if (b >= size_b) b -= size_b, at += carry_a;
    }
};

// Philox4x32-10 (Salmon et al., SC 2011): the four words of B counters from `counter` on.
template <int B> INLINE void philox(const Draw &draw, u64 counter, u32 (&x)[B][4]) {
#pragma unroll
    for (int b = 0; b < B; b++) x[b][0] = (u32)(counter + b), x[b][1] = (u32)((counter + b) >> 32), x[b][2] = 0, x[b][3] = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
#pragma unroll
        for (int b = 0; b < B; b++) {
            const u64 p0 = wide_product(x[b][0], 0xD2511F53u), p1 = wide_product(x[b][2], 0xCD9E8D57u);
            const u32 y0 = (u32)(p1 >> 32) ^ x[b][1] ^ draw.keys[round][0];
            const u32 y2 = (u32)(p0 >> 32) ^ x[b][3] ^ draw.keys[round][1];
            x[b][0] = y0, x[b][1] = (u32)p1, x[b][2] = y2, x[b][3] = (u32)p0;
        }
    }
}

// bits[i] = the random word of element e + i of the draw, for e and N that are multiples of 4.
template <int N> INLINE void philox_blocks(const Draw &draw, u64 e, u32 (&bits)[N]) {
    u32 x[N / 4][4];
    philox(draw, draw.offset + e / 4, x);
#pragma unroll
    for (int i = 0; i < N; i++) bits[i] = x[i / 4][i % 4];
}

// The same for any e and N.
template <int N> INLINE void philox_bits(const Draw &draw, u64 e, u32 (&bits)[N]) {
    if constexpr (N % 4 == 0) {
        if (e % 4 == 0) return philox_blocks(draw, e, bits);
    }
    u32 x[1][4] = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32 word = (u32)(e + i) % 4;
        if (i == 0 || word == 0) philox(draw, draw.offset + (e + i) / 4, x);
        // Selected by comparisons, not as x[0][word]: a run-time index would put x into local memory.
        bits[i] = word == 0 ? x[0][0] : word == 1 ? x[0][1] : word == 2 ? x[0][2] : x[0][3];
    }
}
