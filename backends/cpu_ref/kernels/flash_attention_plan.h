// Division of a flash attention call: sequences, the keys visible to a tile of queries, and an even split over
// threads that depends only on the shape and the number of threads, so that results are bit-equal from run to run.
#pragma once
#include "common.h"
#include "flash_attention_api.h"

#include <stdatomic.h>

enum {
    FA_QUERIES = 48,  // queries of a tile: three 512-bit vectors of float
    FA_SUB = 16,      // the band is trimmed in blocks of 16 keys x 16 queries
    FA_SUBS = FA_QUERIES / FA_SUB,
    FA_KEYS = 96,     // keys of a tile: its scores (96 x 48 floats, 18 KiB) stay in L1
    FA_GROUPS = FA_KEYS / FA_SUB,
    FA_AHEAD = 256 << 10,  // rows that are prefetched extend over no more bytes: a quarter of a small L2 per tensor
    FA_DECODE_QUERIES = 8,  // with more queries, vectors of queries are filled better than vectors of channels
    FA_SWEEP = 4,     // most tiles of queries that share a sweep over the keys; all but the first find the keys in L2
};

struct fa_call {
    const struct hal_flash_attention *shape;
    const char *q, *k, *v, *out, *rest, *dout;
    char *out_w, *rest_w, *dq, *dk, *dv;
    const uint8_t *mask;
    const char *bias;
    const float *slopes;
    const void *sinks;
    int adjusted;  // whether a softcap, ALiBi or a bias changes the scores
    void *dbias, *dsinks;
    const int32_t *cu_q, *cu_k;
    void *lse;
    uint64_t seed, offset;
};

// One sequence (a batch entry, or a packed sequence): its first token in q and k, and its lengths. Query i sees the
// keys i + lo ... i + hi; ALiBi measures the distance from i + shift.
struct fa_sequence {
    int64_t batch, q0, k0, sq, sk, lo, hi, shift;
};

struct fa_sequence fa_sequence(const struct fa_call *call, int64_t batch);

// The keys [*first, *end) visible to any of the `rows` queries from row i0 on. *first is even, because bfloat16 keys
// are multiplied in pairs.
void fa_visible(const struct fa_sequence *seq, int64_t i0, int64_t rows, int64_t *first, int64_t *end);

// Tiles [t0, t1) share a sweep over the keys [first, end). Sweeps are aligned to tile 0 wherever a head is cut, so that
// the order of summation is the same for any number of threads, and the output and dQ are bit-equal.
struct fa_sweep {
    int64_t t0, t1, first, end;
};
struct fa_sweep fa_sweep(const struct fa_sequence *seq, int64_t t0, int64_t limit);

static inline int64_t fa_tiles(const struct fa_sequence *seq) {
    // An empty sequence still has to write its gradients.
    return seq->sq > 0 ? (seq->sq + FA_QUERIES - 1) / FA_QUERIES : 1;
}

// The first row of a tile. A last tile of at most FA_SUB rows takes FA_SUB more from the tile before it: products with
// a single vector of queries are slow, and with a causal window the last tile sees the most keys.
static inline int64_t fa_first(const struct fa_sequence *seq, int64_t tile) {
    const int64_t first = tile * FA_QUERIES;
    return tile > 0 && seq->sq > first && seq->sq - first <= FA_SUB ? first - FA_SUB : first;
}

static inline int64_t fa_rows(const struct fa_sequence *seq, int64_t tile) {
    const int64_t end = fa_first(seq, tile + 1);
    return (end < seq->sq ? end : seq->sq) - fa_first(seq, tile);
}

// Tiles [t0, t1) of all query heads of one (sequence, kv head). slot >= 0: the head is cut, its dK and dV are partial.
struct fa_piece {
    int64_t batch, kv_head, t0, t1;
    int64_t slot, k_first, k_end;  // the keys that its scratch covers, set by the backward pass
};

struct fa_plan {
    struct fa_piece *pieces;
    int64_t *segments;  // segment s is pieces [segments[s], segments[s + 1]); one thread runs it
    int64_t segment_count, piece_count, slot_count, longest_sk;
    _Atomic int64_t *next;  // for each thread, the next of its own segments
    int threads;
};

// Returns 0, or 1 when out of memory; fa_plan_free releases it.
int fa_plan_make(const struct fa_call *call, int forward, struct fa_plan *plan);
void fa_plan_free(struct fa_plan *plan);

// The next segment for a thread, or -1 at the end. A thread first runs its own segments, which together are the same
// part of the call in the forward and the backward pass, so that it finds their operands in its cache. Then it takes
// those of threads that are late because other processes use their cores.
static inline int64_t fa_next_segment(const struct fa_plan *plan, int thread) {
    for (int i = 0; i < plan->threads; i++) {
        const int owner = (thread + i) % plan->threads;
        const int64_t segment = atomic_fetch_add(&plan->next[owner], 1);
        if (segment < plan->segment_count * (owner + 1) / plan->threads) return segment;
    }
    return -1;
}

// A workspace of at least `bytes`, 64-byte aligned, or NULL; flash_attention.c describes its ownership.
void *fa_acquire(size_t bytes);
void fa_release(void *workspace);

// The arithmetic kinds (flash_attention_<kind>.c). bf16 exists where the CPU multiplies bfloat16 (FA_HAVE_BF16).
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define FA_HAVE_BF16 1
#endif
#define FA_DECLARE(kind)                                                             \
    int fa_forward_##kind(const struct fa_call *call, const struct fa_plan *plan);   \
    int fa_backward_##kind(const struct fa_call *call, const struct fa_plan *plan);
FA_DECLARE(f32)
FA_DECLARE(f64)
FA_DECLARE(bf16)

// Makes the passes for a dtype known. f32 (float32 and float16) is known from the start; the other kinds are libraries of
// their own, which are compiled and loaded at the first call that needs them.
typedef int fa_pass(const struct fa_call *call, const struct fa_plan *plan);
void fa_add(int64_t dtype, fa_pass *forward, fa_pass *backward);
