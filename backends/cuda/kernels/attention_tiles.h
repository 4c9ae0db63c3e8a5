// Products of tiles in shared memory, for attention.cu: C[M][N] += A B, with C in the registers of 256 threads.
//
// Tile<T, M, N> for 16-bit elements uses the tensor cores (mma.sync m16n8k16, sm_80 and later): C is divided into
// fragments of 16 x 8, which the 8 warps take in turn, so that all fragments of a warp have the same rows and share the
// loads of A. For float32 a thread computes every 16th row and column with FMAs: TF32 would lose 13 bits.
//
// On the simulator a lane of an mma collects its rows of A and columns of B from the registers of the other lanes, in
// the layout that PTX documents, so that a fragment that is loaded wrongly gives a wrong result there, too.
#pragma once
#include "common.h"

template <class T> INLINE u32 pair(const T *first, int step) {
    if (step == 1) return *reinterpret_cast<const u32 *>(first);
    return (u32)first[0].bits | (u32)first[step].bits << 16;
}

#ifdef HAL_SIMULATE
template <class T> INLINE float element(u32 bits, int high) {
    T x;
    x.bits = (u16)(high ? bits >> 16 : bits);
    return to_float(x);
}
// Lane 4 g + t has rows g and g + 8, columns 2t and 2t + 1 of C. A vote before and after keeps the lanes together.
inline u32 fragments[8][32][6];
template <class T> INLINE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32(&all)[32][6] = fragments[threadIdx.x / 32];
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
    (void)__any_sync(0xffffffffu, 0);
}
#else
#define HAL_MMA(type)                                                                                                  \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "          \
        "{%0,%1,%2,%3};"                                                                                               \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <class T> INLINE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <> INLINE void mma<bf16>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { HAL_MMA("bf16"); }
template <> INLINE void mma<f16>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { HAL_MMA("f16"); }
#endif

template <class T, int M, int N> struct Tile {
    static constexpr int ROWS = M / 16, ALL = ROWS * (N / 8), OWN = (ALL + 7) / 8;
    static_assert(8 % ROWS == 0 && N % 8 == 0, "the fragments of a warp share their rows");
    float c[OWN][4];

    INLINE void zero() {
#pragma unroll
        for (int i = 0; i < OWN; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
    }

    // C += A B over k in [0, depth), a multiple of 16. Element (m, k) of A is a[m lda + k], or a[k lda + m] if A_T;
    // element (k, n) of B is b[k ldb + n], or b[n ldb + k] if B_T. Leading dimensions are even.
    template <bool A_T, bool B_T> INLINE void add(const T *a, int lda, const T *b, int ldb, int depth) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
        const int m = warp % ROWS * 16 + g, row = A_T ? 1 : lda, column = A_T ? lda : 1;
        if (warp >= ALL) return;
#pragma unroll 1
        for (int k = 0; k < depth; k += 16) {
            u32 x[4], y[2];
            const T *at = a + m * row + (k + 2 * t) * column;
            x[0] = pair(at, column), x[1] = pair(at + 8 * row, column);
            x[2] = pair(at + 8 * column, column), x[3] = pair(at + 8 * row + 8 * column, column);
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                if (warp + 8 * i >= ALL) break;
                const int n = (warp + 8 * i) / ROWS * 8 + g, down = B_T ? 1 : ldb;
                const T *from = b + (k + 2 * t) * down + n * (B_T ? ldb : 1);
                y[0] = pair(from, down), y[1] = pair(from + 8 * down, down);
                mma<T>(c[i], x, y);
            }
        }
    }

    // f(row, column, value by reference) for every element of this thread.
    template <class F> INLINE void each(F f) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (warp + 8 * i >= ALL) break;
            const int m = warp % ROWS * 16 + g, n = (warp + 8 * i) / ROWS * 8 + 2 * t;
            f(m, n, c[i][0]), f(m, n + 1, c[i][1]), f(m + 8, n, c[i][2]), f(m + 8, n + 1, c[i][3]);
        }
    }
};

template <int M, int N> struct Tile<f32, M, N> {
    static constexpr int DOWN = M / 16, ACROSS = N / 16;
    static_assert(M % 16 == 0 && N % 16 == 0, "16 x 16 threads");
    float c[DOWN][ACROSS];

    INLINE void zero() {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++) c[i][j] = 0.0f;
    }

    template <bool A_T, bool B_T> INLINE void add(const f32 *a, int lda, const f32 *b, int ldb, int depth) {
        const int m = threadIdx.x / 16, n = threadIdx.x % 16;
#pragma unroll 2
        for (int k = 0; k < depth; k++) {
            float x[DOWN], y[ACROSS];
#pragma unroll
            for (int i = 0; i < DOWN; i++) x[i] = A_T ? a[k * lda + m + 16 * i] : a[(m + 16 * i) * lda + k];
#pragma unroll
            for (int j = 0; j < ACROSS; j++) y[j] = B_T ? b[(n + 16 * j) * ldb + k] : b[k * ldb + n + 16 * j];
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++) c[i][j] += x[i] * y[j];
        }
    }

    template <class F> INLINE void each(F f) {
        const int m = threadIdx.x / 16, n = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++) f(m + 16 * i, n + 16 * j, c[i][j]);
    }
};
