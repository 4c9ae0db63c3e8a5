// Flash attention (Dao et al., 2022): entry points, the split over threads, and the workspace.
//
// Scores are computed transposed. For a tile of 48 queries (two smaller tiles at the end if the last one would have at
// most 16), Q^T is packed once; then for each tile of 96 keys
//   S^T [key][query] = K Q^T        K's scalars are broadcast from memory, queries fill the vector lanes,
//   P^T = exp(scale S^T - max)      so maxima and sums over keys are purely vertical: no horizontal reductions,
//   O [query][d] += P V             P^T's scalars are broadcast, channels fill the lanes: O needs no transposition. It
//                                   is rescaled when a maximum has grown.
// Where all queries see all keys of a tile and the maxima stay, the first two are one step (flash_attention_fused.h).
// Backward, with P recomputed from the saved log-sum-exp (whose rounding error limits P's accuracy for scores beyond
// about 10^5, as in every implementation that saves only the log-sum-exp) and delta = rowsum(dO * O):
//   dP^T = V dO^T;  dS^T = P^T (dP^T - delta);  dQ += dS K;  dV += P^T dO;  dK += dS^T Q
// in one pass: queries outside, keys inside, dQ of the tile local, dK and dV of the head in a float scratch. All seven
// products use one micro-kernel (gemm.h). Only tiles inside the pre/next band are visited; at the edge of the band, 16
// x 16 blocks outside are skipped and the rest is masked (flash_attention_tile.h). The products for O and dQ also skip
// what lies outside the band of each block of 4 to 8 queries.
//
// Calls with a softcap, ALiBi or a bias compute each score tile's logits, in base 2, between the first product and the
// mask (flash_attention_scores.h); all other calls skip that by one test per tile. A sink enters the sums when a tile of
// queries is finished. The head sizes D of q and k and E of v are independent.
//
// Tiles: 48 queries are three 512-bit vectors of floats, which with 8 rows of keys fill 24 of 32 registers with
// accumulators. 96 keys make a score tile of 18 KiB, which stays in L1 between the two products, and O is loaded and
// stored once per 96 keys (48 keys were about 4 % slower, 128 no faster).
//
// Memory traffic per head: K and V are read once per sweep (FA_SWEEP tiles, 192 queries; 96 in a window), from cache: at
// most S (D + E) elements, packed once by each thread that works on the head if their rows are not adjacent or need
// conversion. Q, dO and O are read once, out and dQ written once; backward adds one read and write of the dK, dV scratch
// per sweep. The S x S matrices are never formed. Scratch: per thread packed K and V of one head (backward: also dK and dV
// in float, with a window those of the keys around it), plus dK and dV of the heads that are cut between threads.
//
// Three arithmetic kinds instantiate the same code (flash_attention_kind.h): f32 (float32, and 16-bit types converted
// on packing), bf16 (bfloat16 pairs through vdpbf16ps, float accumulation), f64. Files: _plan for the split over
// threads, vectors.h and gemm.h for the micro-kernel, _pack for conversion and transposition, _tile for masks and
// scores, _scores for what changes them, _forward and _backward for the passes, _fused for tiles without an edge,
// _decode for the forward pass of up to 8 queries, which is bound by memory traffic.
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE  // madvise
#endif
#include "flash_attention_plan.h"

#include <omp.h>
#include <stdatomic.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

// The workspace. Between calls this module owns at most one buffer of at most FA_KEEP_BYTES. A call takes it
// (concurrent calls allocate their own) and returns it, or a larger one. Fresh memory costs a page fault per 4 KiB,
// which would be most of the time of a short call.
#define FA_KEEP_BYTES ((size_t)1 << 30)
#define FA_HEADER 64
static _Atomic(void *) cached;

static size_t *capacity_of(void *buffer) { return (size_t *)buffer; }

void *fa_acquire(size_t bytes) {
    char *buffer = atomic_exchange(&cached, NULL);
    if (buffer && *capacity_of(buffer) < bytes) {
        free(buffer);
        buffer = NULL;
    }
    if (!buffer) {
        const size_t huge = (size_t)2 << 20, page = bytes > huge ? huge : 4096;
        const size_t size = (bytes + FA_HEADER + page - 1) / page * page;
        buffer = aligned_alloc(page, size);
        if (!buffer) return NULL;
#ifdef MADV_HUGEPAGE
        if (page == huge) madvise(buffer, size, MADV_HUGEPAGE);
#endif
        *capacity_of(buffer) = size - FA_HEADER;
    }
    return buffer + FA_HEADER;
}

static size_t drop(void *buffer) {
    const size_t bytes = buffer ? *capacity_of(buffer) : 0;
    free(buffer);
    return bytes;
}

void fa_release(void *workspace) {
    char *buffer = (char *)workspace - FA_HEADER;
    if (*capacity_of(buffer) <= FA_KEEP_BYTES) buffer = atomic_exchange(&cached, buffer);
    drop(buffer);
}

int64_t hal_flash_attention_trim(void) { return (int64_t)drop(atomic_exchange(&cached, NULL)); }

struct fa_sequence fa_sequence(const struct fa_call *call, int64_t batch) {
    const struct hal_flash_attention *g = call->shape;
    struct fa_sequence s = {batch, 0, 0, g->sq, g->sk, 0, 0, 0};
    if (call->cu_q) {
        s.q0 = call->cu_q[batch], s.sq = call->cu_q[batch + 1] - s.q0;
        s.k0 = call->cu_k[batch], s.sk = call->cu_k[batch + 1] - s.k0;
    }
    s.shift = g->top_left ? 0 : s.sk - s.sq;
    s.lo = s.shift - g->pre;
    s.hi = s.shift + g->next;
    return s;
}

void fa_visible(const struct fa_sequence *seq, int64_t i0, int64_t rows, int64_t *first, int64_t *end) {
    int64_t from = i0 + seq->lo, to = i0 + rows + seq->hi;
    from = from > 0 ? from : 0;
    to = to < seq->sk ? to : seq->sk;
    *first = (from < seq->sk ? from : seq->sk) & ~(int64_t)1;
    *end = rows > 0 && to > from && seq->lo <= seq->hi ? to : *first;
}

struct fa_sweep fa_sweep(const struct fa_sequence *seq, int64_t t0, int64_t limit) {
    // In a window, the gradients of a sweep's keys stay in L2, and more tiles were not faster.
    const int window = seq->lo + seq->sq > 1;  // whether the last query does not see the first key
    const int64_t most = window ? 2 : FA_SWEEP, begin = t0 / most * most;
    struct fa_sweep sweep = {t0, begin + most < limit ? begin + most : limit, 0, 0};
    int64_t first, end;
    fa_visible(seq, fa_first(seq, begin), fa_rows(seq, begin), &sweep.first, &end);
    sweep.end = sweep.first;
    for (int64_t tile = t0; tile < sweep.t1; tile++) {
        fa_visible(seq, fa_first(seq, tile), fa_rows(seq, tile), &first, &end);
        if (end > sweep.end) sweep.end = end;
    }
    return sweep;
}

static int64_t tile_cost(const struct fa_sequence *seq, int64_t tile) {
    int64_t first, end;
    fa_visible(seq, fa_first(seq, tile), fa_rows(seq, tile), &first, &end);
    return end - first + 32;  // packing and unpacking a tile of queries takes as long as about 32 keys
}

static int64_t head_cost(const struct fa_sequence *seq) {
    int64_t cost = 0;
    for (int64_t tile = 0, tiles = fa_tiles(seq); tile < tiles; tile++) cost += tile_cost(seq, tile);
    return cost;
}

// Segments per thread: several, so that a thread whose core is slow, or which other processes share, leaves some to the
// others. Backward, a cut head costs a reduction, so there are at most four, and none that would cut an additional head.
// Forward, cuts are nearly free, but a segment should take much longer than its start: 10^6 multiplications are about
// 10 us.
static int64_t segments_per_thread(int forward, int64_t heads, int64_t multiplications, int64_t threads) {
    const int64_t wanted = forward ? multiplications / 1000000 / threads : heads / threads, most = forward ? 16 : 4;
    return wanted < 1 ? 1 : wanted > most ? most : wanted;
}

// Divides the sequence of the tiles of all heads into segments of equal cost. A head is cut only where a segment ends
// inside it, so most heads are not cut backward, and there are at most two partial results per segment.
int fa_plan_make(const struct fa_call *call, int forward, struct fa_plan *plan) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t heads = g->batch * g->kv_heads;
    int64_t total = 0;
    plan->longest_sk = 0;
    for (int64_t batch = 0; batch < (call->cu_q ? g->batch : 1); batch++) {
        const struct fa_sequence seq = fa_sequence(call, batch);
        total += head_cost(&seq) * g->kv_heads * (call->cu_q ? 1 : g->batch);
        if (seq.sk > plan->longest_sk) plan->longest_sk = seq.sk;
    }
    const int64_t group = g->heads / g->kv_heads;
    // Below about 10^6 multiplications a parallel region costs more than it saves.
    const int64_t multiplications = total * group * FA_QUERIES * (g->head_size + g->value_size);
    plan->threads = multiplications < 2000000 ? 1 : omp_get_max_threads();
    plan->segment_count = plan->threads * segments_per_thread(forward, heads, multiplications, plan->threads);
    plan->pieces = malloc((size_t)(heads + plan->segment_count) * sizeof *plan->pieces);
    plan->segments = malloc((size_t)(plan->segment_count + 1) * sizeof *plan->segments);
    plan->next = malloc((size_t)plan->threads * sizeof *plan->next);
    if (!plan->pieces || !plan->segments || !plan->next) return 1;
    for (int t = 0; t < plan->threads; t++) plan->next[t] = plan->segment_count * t / plan->threads;

    int64_t passed = 0, segment = 0, count = 0, slots = 0;
    plan->segments[0] = 0;
    for (int64_t batch = 0; batch < g->batch; batch++) {
        const struct fa_sequence seq = fa_sequence(call, batch);
        const int64_t tiles = fa_tiles(&seq), cost = head_cost(&seq);
        for (int64_t head = 0; head < g->kv_heads; head++) {
            int64_t t0 = 0, at = passed;
            for (int64_t tile = 0; tile < tiles; tile++) {
                while (segment + 1 < plan->segment_count && at >= total * (segment + 1) / plan->segment_count) {
                    if (tile > t0) plan->pieces[count++] = (struct fa_piece){batch, head, t0, tile, slots++, 0, 0};
                    t0 = tile;
                    plan->segments[++segment] = count;
                }
                // The rest of this head fits into the segment.
                if (passed + cost <= total * (segment + 1) / plan->segment_count) break;
                at += tile_cost(&seq, tile);
            }
            plan->pieces[count++] = (struct fa_piece){batch, head, t0, tiles, t0 > 0 ? slots++ : -1, 0, 0};
            passed += cost;
        }
    }
    while (segment < plan->segment_count) plan->segments[++segment] = count;
    plan->piece_count = count;
    plan->slot_count = slots;
    return 0;
}

void fa_plan_free(struct fa_plan *plan) {
    free(plan->pieces);
    free(plan->segments);
    free((void *)plan->next);
}

static int rises(const int32_t *cu, int64_t batch, int64_t tokens) {
    int ok = cu[0] == 0 && cu[batch] == tokens;
    for (int64_t b = 0; b < batch; b++) ok &= cu[b] <= cu[b + 1];
    return ok;
}

// The passes of each dtype: [0] forward, [1] backward. NULL: see fa_add. A dtype's entries are written once, before its
// first call.
static fa_pass *passes[HAL_DTYPES][2] = {
    [HAL_F32] = {fa_forward_f32, fa_backward_f32}, [HAL_F16] = {fa_forward_f32, fa_backward_f32}};

void fa_add(int64_t dtype, fa_pass *forward, fa_pass *backward) {
    passes[dtype][0] = forward;
    passes[dtype][1] = backward;
}

static int run(const struct fa_call *call, int forward) {
    const struct hal_flash_attention *g = call->shape;
    if (call->cu_q && !(rises(call->cu_q, g->batch, g->sq) && rises(call->cu_k, g->batch, g->sk))) return 2;
    if (g->batch == 0 || g->heads == 0) return 0;
    fa_pass *pass = passes[g->dtype][forward ? 0 : 1];
    if (!pass) return 3;
    struct fa_plan plan = {0};
    int status = fa_plan_make(call, forward, &plan);
    if (!status) status = pass(call, &plan);
    fa_plan_free(&plan);
    return status;
}

int hal_flash_attention_forward(const struct hal_flash_attention *shape, uintptr_t q, uintptr_t k, uintptr_t v,
                                uintptr_t mask, uintptr_t bias, uintptr_t slopes, uintptr_t sinks, uintptr_t cu_seqlens_q,
                                uintptr_t cu_seqlens_k, uint64_t seed, uint64_t offset, uintptr_t out, uintptr_t rest,
                                uintptr_t lse) {
    const struct fa_call call = {
        .shape = shape, .q = (const char *)q, .k = (const char *)k, .v = (const char *)v,
        .mask = (const uint8_t *)mask, .bias = (const char *)bias, .slopes = (const float *)slopes,
        .sinks = (const void *)sinks, .adjusted = bias || slopes || shape->softcap > 0,
        .cu_q = (const int32_t *)cu_seqlens_q, .cu_k = (const int32_t *)cu_seqlens_k,
        .seed = seed, .offset = offset, .out_w = (char *)out, .rest_w = (char *)rest, .lse = (void *)lse};
    return run(&call, 1);
}

int hal_flash_attention_backward(const struct hal_flash_attention *shape, uintptr_t q, uintptr_t k, uintptr_t v,
                                 uintptr_t mask, uintptr_t bias, uintptr_t slopes, uintptr_t sinks, uintptr_t cu_seqlens_q,
                                 uintptr_t cu_seqlens_k, uint64_t seed, uint64_t offset, uintptr_t out, uintptr_t rest,
                                 uintptr_t lse, uintptr_t dout, uintptr_t dq, uintptr_t dk, uintptr_t dv,
                                 uintptr_t dbias, uintptr_t dsinks) {
    const struct fa_call call = {
        .shape = shape, .q = (const char *)q, .k = (const char *)k, .v = (const char *)v,
        .mask = (const uint8_t *)mask, .bias = (const char *)bias, .slopes = (const float *)slopes,
        .sinks = (const void *)sinks, .adjusted = bias || slopes || shape->softcap > 0,
        .cu_q = (const int32_t *)cu_seqlens_q, .cu_k = (const int32_t *)cu_seqlens_k,
        .seed = seed, .offset = offset, .out = (const char *)out, .rest = (const char *)rest,
        .lse = (void *)lse, .dout = (const char *)dout, .dq = (char *)dq, .dk = (char *)dk, .dv = (char *)dv,
        .dbias = (void *)dbias, .dsinks = (void *)dsinks};
    return run(&call, 0);
}
