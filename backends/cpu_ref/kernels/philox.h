// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11), as HAL defines it:
// element e of a draw is word e % 4 of the block with key = seed and counter = offset + e / 4 (modulo 2^64).
// Blocks are computed 16 at a time, one per SIMD lane; each of the ten rounds is two 32x32->64 multiplications.
// Kernels use philox_words for a run of consecutive elements, philox_keep for dropout decisions.
#pragma once
#include <stdint.h>
#include <string.h>

enum { PHILOX_LANES = 16, PHILOX_CHUNK = 4 * PHILOX_LANES };

typedef struct {
    uint64_t seed, offset;
} philox_t;

// words[w][l] = word w of the block with counter first + l.
static inline void philox_blocks(philox_t rng, uint64_t first, uint32_t words[4][PHILOX_LANES]) {
#pragma omp simd
    for (int lane = 0; lane < PHILOX_LANES; lane++) {
        uint64_t counter = first + (uint64_t)lane;
        uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32), x2 = 0, x3 = 0;
        uint32_t k0 = (uint32_t)rng.seed, k1 = (uint32_t)(rng.seed >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)x0 * 0xD2511F53u, p1 = (uint64_t)x2 * 0xCD9E8D57u;
            x0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0;
            x2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
            x1 = (uint32_t)p1;
            x3 = (uint32_t)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        words[0][lane] = x0;
        words[1][lane] = x1;
        words[2][lane] = x2;
        words[3][lane] = x3;
    }
}

// The random bits of PHILOX_CHUNK elements, beginning with the first element of the block that holds `element`.
static inline void philox_chunk(philox_t rng, uint64_t element, uint32_t out[PHILOX_CHUNK]) {
    uint32_t words[4][PHILOX_LANES];
    philox_blocks(rng, rng.offset + element / 4, words);
#pragma omp simd
    for (int lane = 0; lane < PHILOX_LANES; lane++) {
        out[4 * lane] = words[0][lane];
        out[4 * lane + 1] = words[1][lane];
        out[4 * lane + 2] = words[2][lane];
        out[4 * lane + 3] = words[3][lane];
    }
}

// One step of a loop over the elements of a draw: the number of elements, at most `left`, whose bits are in the chunk.
// Those of `element` are at chunk + element % 4, and the next step begins with a whole block.
static inline int64_t philox_step(philox_t rng, uint64_t element, int64_t left, uint32_t chunk[PHILOX_CHUNK]) {
    philox_chunk(rng, element, chunk);
    const int64_t fresh = PHILOX_CHUNK - (int64_t)(element % 4);
    return fresh < left ? fresh : left;
}

// out[i] = the 32 random bits of element first + i, for 0 <= i < count.
static inline void philox_words(philox_t rng, uint64_t first, int64_t count, uint32_t *out) {
    uint32_t chunk[PHILOX_CHUNK];
    for (int64_t done = 0, fresh; done < count; done += fresh) {
        const uint64_t element = first + (uint64_t)done;
        fresh = philox_step(rng, element, count - done, chunk);
        memcpy(out + done, chunk + element % 4, (size_t)fresh * sizeof *out);
    }
}

// keep[i] = 1 where dropout keeps element first + i, else 0. threshold = ceil(p * 2^24).
static inline void philox_keep(philox_t rng, uint64_t first, int64_t count, uint32_t threshold, uint8_t *keep) {
    uint32_t chunk[PHILOX_CHUNK];
    for (int64_t done = 0, fresh; done < count; done += fresh) {
        const uint64_t element = first + (uint64_t)done;
        fresh = philox_step(rng, element, count - done, chunk);
        const uint32_t *bits = chunk + element % 4;
#pragma omp simd
        for (int64_t i = 0; i < fresh; i++) keep[done + i] = (uint8_t)(bits[i] >> 8 >= threshold);
    }
}
