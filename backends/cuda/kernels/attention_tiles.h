// Products of tiles for attention.cu. A warp owns 16 rows of a product and keeps it in registers.
//
// Fragments: lane 4 g + t of a warp has of c[i] rows g and g + 8, columns 8 i + 2 t and 8 i + 2 t + 1, in the order
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). This is the layout of mma.sync m16n8k16 (sm_80 and later), whose
// results are also in the layout of its first operand, so that scores become the operand of the next product without
// leaving the registers. float32 products use the same layout and FMAs: TF32 would lose 13 bits.
//
// Tiles in shared memory have rows of D elements without padding. The 16-byte pieces of a row change places with the
// row's number (swizzled), so that eight rows of one piece, which ldmatrix reads at once, lie in different banks.
//
// On the simulator the lanes of ldmatrix and mma exchange addresses and registers in the layouts that PTX documents, so
// that a fragment that is loaded wrongly gives a wrong result there, too; and asynchronous copies arrive when they are
// waited for, not before.
#pragma once
#include "common.h"

constexpr int THREADS = 128;  // of a block

// x, computed where this is written: the compiler would otherwise compute what follows from it ahead of all loops, and
// keep it in registers that the accumulators need.
INLINE u32 here(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The place of an element in a tile.
template <class T, int D> INLINE u32 swizzled(u32 row, u32 column) {
    constexpr u32 L = Lanes<T>::count;
    return row * D + ((column / L) ^ (row & 7)) * L + column % L;
}

// The same in bytes, for the 16 or 32 bytes of a row from a constant `column` on: the lane's place is `row` and `bytes`
// in them. As the column changes bits of one number of the lane only, all columns share a few registers.
template <class T, int D> INLINE u32 place(u32 row, u32 bytes, u32 column) {
    constexpr u32 SIZE = sizeof(T);
    const u32 lane = row * D * SIZE + ((bytes / 16) ^ (row & 7)) * 16 + bytes % 16;
    return (lane ^ column * SIZE % 128) + column * SIZE / 128 * 128;
}

#ifdef HAL_SIMULATE
template <class T> INLINE float element(u32 bits, int high) {
    T x;
    x.bits = (u16)(high ? bits >> 16 : bits);
    return to_float(x);
}

// What the lanes of each warp exchange. Consecutive operations use different halves, so that one vote per operation is
// enough to keep a lane from overwriting what another one has yet to read.
struct Exchange {
    u32 word[32][6];
    const u16 *row[32];
};
inline Exchange exchanges[2][8];
INLINE Exchange &exchange() { return exchanges[hal_sim::warp_operations() % 2][threadIdx.x / 32]; }

// What a copy will overwrite is NaN until it is waited for.
template <class T> INLINE void copy16(T *to, const T *from, bool inside) {
    Vector<T> nothing;
    for (u32 &word : nothing.word) word = 0xffffffffu;
    *reinterpret_cast<Vector<T> *>(to) = nothing;
    hal_sim::Copies &started = hal_sim::copies();
    started.list[started.count++] = {to, inside ? from : 0};
}
INLINE void finish_copies() {
    hal_sim::Copies &started = hal_sim::copies();
    for (u32 i = 0; i < started.count; i++) {
        Vector<f32> part = {};
        if (started.list[i].from) part = *static_cast<const Vector<f32> *>(started.list[i].from);
        *static_cast<Vector<f32> *>(started.list[i].to) = part;
    }
    started.count = 0;
}

template <bool TRANSPOSED> INLINE void ldmatrix(u32 (&x)[4], const void *tile, u32 bytes) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Exchange &all = exchange();
    all.row[lane] = static_cast<const u16 *>(tile) + bytes / 2;
    (void)__any_sync(0xffffffffu, 0);
    for (int i = 0; i < 4; i++)
        x[i] = TRANSPOSED ? all.row[8 * i + 2 * t][g] | (u32)all.row[8 * i + 2 * t + 1][g] << 16
                          : all.row[8 * i + g][2 * t] | (u32)all.row[8 * i + g][2 * t + 1] << 16;
}
template <class T> INLINE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32(&all)[32][6] = exchange().word;
    for (int i = 0; i < 6; i++) all[lane][i] = i < 4 ? a[i] : b[i - 4];
    (void)__any_sync(0xffffffffu, 0);
    for (int k = 0; k < 16; k += 2) {
        const int from = k % 8 / 2, half = k / 8;
        const u32 top = all[4 * g + from][2 * half], bottom = all[4 * g + from][2 * half + 1];
        const u32 left = all[4 * (2 * t) + from][4 + half], right = all[4 * (2 * t + 1) + from][4 + half];
        for (int i = 0; i < 2; i++) {
            c[0] += element<T>(top, i) * element<T>(left, i);
            c[1] += element<T>(top, i) * element<T>(right, i);
            c[2] += element<T>(bottom, i) * element<T>(left, i);
            c[3] += element<T>(bottom, i) * element<T>(right, i);
        }
    }
}
#else
INLINE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// *to = *from, 16 bytes, or zeros unless inside. Complete for this thread after finish_copies(), for others after a
// barrier.
template <class T> INLINE void copy16(T *to, const T *from, bool inside) {
    const u32 bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}
INLINE void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Four matrices of 8 x 8 elements of 16 bits: lane 8 i + r has the place in a tile of row r of matrix i, and lane
// 4 g + t gets elements 2t and 2t + 1 of row g of each, or of column g if transposed.
template <bool TRANSPOSED> INLINE void ldmatrix(u32 (&x)[4], const void *tile, u32 bytes) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(shared_address(tile) + bytes));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(shared_address(tile) + bytes));
}
#define HAL_MMA(type)                                                                                                  \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "          \
        "{%0,%1,%2,%3};"                                                                                               \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
// c += a b. Lane 4 g + t has of a, in the order of its registers, rows g, g + 8, g, g + 8 and columns 2t, 2t, 2t + 8,
// 2t + 8 with the next one; of b column g and rows 2t, 2t + 8 with the next one.
template <class T> INLINE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <> INLINE void mma<bf16>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { HAL_MMA("bf16"); }
template <> INLINE void mma<f16>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { HAL_MMA("f16"); }
#endif

// The columns of a fragment.
template <int N> struct Fragment {
    static constexpr int COUNT = N / 8;
    float c[COUNT][4];

    INLINE void zero() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
    }
    // f(i, j, value by reference): j / 2 is 1 for row g + 8, j % 2 the second of two columns.
    template <class F> INLINE void each(F f) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) f(i, j, c[i][j]);
    }
};

// Rows of a tile times rows of another: c = A B^T, summed over the first `depth` columns, in steps of 64. A: the tile
// from the 16 rows of the warp on; B: N rows.
template <class T, int D, int N> INLINE void multiply_rows(Fragment<N> &c, const T *a, const T *b, i64 depth) {
    const u32 lane = threadIdx.x % 32;
    c.zero();
    if constexpr (sizeof(T) == 4) {
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll 1
        for (int k = 0; k < (int)depth; k += 4) {
            const Raw<f32, 4> x = fetch<4>(a + swizzled<T, D>(g, k)), y = fetch<4>(a + swizzled<T, D>(g + 8, k));
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const Raw<f32, 4> left = fetch<4>(b + swizzled<T, D>(8 * i + 2 * t, k));
                const Raw<f32, 4> right = fetch<4>(b + swizzled<T, D>(8 * i + 2 * t + 1, k));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    c.c[i][0] += element(x.part[0], j) * element(left.part[0], j);
                    c.c[i][1] += element(x.part[0], j) * element(right.part[0], j);
                    c.c[i][2] += element(y.part[0], j) * element(left.part[0], j);
                    c.c[i][3] += element(y.part[0], j) * element(right.part[0], j);
                }
            }
        }
    } else {
#pragma unroll 1
        for (int step = 0; step < (int)depth; step += 64)  // of one step the columns of places are constants
#pragma unroll
            for (int k = 0; k < 64; k += 16) {
                u32 x[4], y[4];
                ldmatrix<false>(x, a, step * 2 + place<T, D>(lane % 16, lane / 16 * 16, k));
#pragma unroll
                for (int i = 0; i < N / 8; i += 2) {
                    const u32 row = lane / 16 * 8 + lane % 8;
                    ldmatrix<false>(y, b, 8 * i * D * 2 + step * 2 + place<T, D>(row, lane / 8 % 2 * 16, k));
                    mma<T>(c.c[i], x, {y[0], y[1]});
                    mma<T>(c.c[i + 1], x, {y[2], y[3]});
                }
            }
    }
}

// c += P B for N rows and, from `column` on, a multiple of 64, C columns of the tile B. 16-bit products round P to T.
template <class T, int D, int C, int N>
INLINE void add_product(Fragment<C> &c, const Fragment<N> &p, const T *b, int column) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 4) {
        const u32 t = lane % 4;
#pragma unroll 1
        for (u32 from = 0; from < 4; from++)  // this lane of those with the same g has rows 8 i + 2 from and the next
#pragma unroll
            for (int at = 0; at < N / 4; at++) {
                const float x = __shfl_sync(0xffffffffu, p.c[at / 2][at % 2], (int)((lane & ~3u) + from));
                const float y = __shfl_sync(0xffffffffu, p.c[at / 2][at % 2 + 2], (int)((lane & ~3u) + from));
                const u32 row = at / 2 * 8 + 2 * from + at % 2;
#pragma unroll
                for (int i = 0; i < C / 8; i++) {
                    const u32 place_of = place<T, D>(row, 2 * t * sizeof(T), 8 * i) / sizeof(T);
                    const float left = b[column + place_of], right = b[column + place_of + 1];
                    c.c[i][0] += x * left, c.c[i][1] += x * right, c.c[i][2] += y * left, c.c[i][3] += y * right;
                }
            }
    } else {
#pragma unroll
        for (int k = 0; k < N; k += 16) {
            const float(&left)[4] = p.c[k / 8], (&right)[4] = p.c[k / 8 + 1];
            const u32 x[4] = {word_of(left, T{}), word_of(left + 2, T{}), word_of(right, T{}), word_of(right + 2, T{})};
#pragma unroll
            for (int i = 0; i < C / 8; i += 2) {
                u32 y[4];
                ldmatrix<true>(y, b, k * D * 2 + column * 2 + place<T, D>(lane % 16, lane / 16 * 16, 8 * i));
                mma<T>(c.c[i], x, {y[0], y[1]});
                mma<T>(c.c[i + 1], x, {y[2], y[3]});
            }
        }
    }
}
