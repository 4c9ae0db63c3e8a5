// Collectives between the processes of one machine, through a segment of memory that all of them map.
//
// Every rank owns two slots and two counters. A collective is a number of steps, one per chunk of data; in step s a
// rank
//   (1) waits until every peer has read step s-2, whose slot it is about to overwrite (implied for a peer that is known
// to       have posted step s-1),
//   (2) copies its chunk into slot s % 2 and publishes posted = s + 1,
//   (3) waits until the peers have posted, copies or reduces their slots into its result, and publishes read = s + 1.
// Counters only grow and every rank writes only its own, so nothing is ever reset and there are no races. Every rank
// reduces in rank order: results are bit-equal on every rank and from run to run. Slots are small enough to stay in the
// second-level caches, so memory is read and written only once for tensors of any size. Large results are written
// with non-temporal stores, because an ordinary store would read memory a second time and evict the slots.
//
// Between cores that share a cache, this runs at the speed of memory. Between other cores, reading data from the
// writer's cache takes longer than reading it from memory (64 MB: 13 ms against 7), so there the slots are written with
// non-temporal stores as well, which is slower between cores that share a cache (10 ms against 8). Which case applies
// is not known beforehand and can change under a hypervisor. Therefore a large collective tries both variants on some
// chunks and continues with the faster one. Every rank decides for its own slots.
//
// A wait spins for some microseconds, then yields, then sleeps (20 us at a time, later 200 us), so that more ranks than
// processors make progress. It ends with a fault on timeout, when a peer has died (its pidfd is readable), when the
// peer is in another collective (each slot carries its purpose), or when this process closes the handle.
#define _GNU_SOURCE
#ifndef HAL_BODY
#include "common.h"

#include "shared_memory_api.h"

#include <poll.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, BARRIER };
enum { SUM, MAX, MIN, AVG };
enum { FAULT_TIMEOUT = 1, FAULT_DEAD, FAULT_MISMATCH, FAULT_CLOSED };
// These follow the dtypes of common.h. Booleans are reduced as U8: sum and max are "or", min is "and".
enum { SHM_I8 = 4, SHM_U8, SHM_I16, SHM_I32, SHM_I64 };

// Smaller slots mean more steps, and each step costs a context switch if ranks share a processor.
enum { SLOT = 256 << 10, MAX_RANKS = 64 };
// Values that are added at a time. A sum of two ranks' 64 MB took 20 ms with this many, 28 with 256, 42 with 128.
enum { BLOCK = 1024 };
// Bytes copied at a time, and the distance in bytes of the prefetch ahead of them (from memory or the peer's cache).
enum { PIECE = 1024, AHEAD = 4096 };
enum { TRIAL = 6 };  // chunks per variant; only a collective of at least eight times as many runs the trial

// One rank's part of the segment. Counters that another core polls are on separate cache lines (128 bytes, because
// adjacent lines are fetched in pairs).
typedef struct {
    _Alignas(128) uint64_t posted;  // steps whose chunk is in a slot
    uint64_t purpose[2];            // of each slot; in the same line as posted
    _Alignas(128) uint64_t read;    // steps that this rank has finished
    _Alignas(128) char slot[2][SLOT];
} member;

typedef struct {
    member *members;
    int rank, size, patience, pidfds[MAX_RANKS];
    uint64_t seen[MAX_RANKS];  // the last value of each peer's `posted` that this rank has waited for
    double timeout;
    int closed;
    int past;  // whether a large collective's slots use non-temporal stores, as the last trial decided
} group;

int64_t hal_shm_bytes(int size) { return size <= MAX_RANKS ? (int64_t)size * (int64_t)sizeof(member) : 0; }

uintptr_t hal_shm_open(uintptr_t segment, int rank, int size, double timeout, uintptr_t pidfds) {
    group *g = calloc(1, sizeof *g);
    if (!g) return 0;
    g->members = (member *)segment;
    g->rank = rank;
    g->size = size;
    g->timeout = timeout;
    // With more ranks than processors, spinning would keep the peer from running.
    g->patience = size <= sysconf(_SC_NPROCESSORS_ONLN) ? 4000 : 0;
    memcpy(g->pidfds, (const int *)pidfds, sizeof(int) * (size_t)size);
    return (uintptr_t)g;
}

void hal_shm_close(uintptr_t handle) { __atomic_store_n(&((group *)handle)->closed, 1, __ATOMIC_RELEASE); }

int hal_shm_arrived(uintptr_t handle, int peer) {
    const group *g = (const group *)handle;
    const uint64_t mine = __atomic_load_n(&g->members[g->rank].posted, __ATOMIC_RELAXED);
    return __atomic_load_n(&g->members[peer].posted, __ATOMIC_ACQUIRE) >= mine;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

HAL_INLINE void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int has_died(const group *g, int peer) {
    struct pollfd ended = {.fd = g->pidfds[peer], .events = POLLIN};
    return ended.fd >= 0 && poll(&ended, 1, 0) == 1 && (ended.revents & POLLIN);
}

// Waits until *counter >= target; returns 0 or a fault. The fast path is one load.
static int wait_for(group *g, int peer, const uint64_t *counter, uint64_t target) {
    for (int i = 0; i <= g->patience; i++) {
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) return 0;
        breathe();
    }
    const double deadline = now() + g->timeout;
    for (int64_t round = 0;; round++) {
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) return 0;
        if (round < 64) {
            sched_yield();
            continue;
        }
        if (__atomic_load_n(&g->closed, __ATOMIC_ACQUIRE)) return 256 * FAULT_CLOSED + peer;
        // A peer may have posted its data before it exited, so the counter is read once more.
        if (has_died(g, peer)) return __atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target ? 0 : 256 * FAULT_DEAD + peer;
        if (now() > deadline) return 256 * FAULT_TIMEOUT + peer;
        const struct timespec pause = {.tv_nsec = (round < 128 ? 20 : 200) * 1000};
        nanosleep(&pause, NULL);
    }
}

#define HAL_SELF "shared_memory.c"
#include "dtypes.h"

// Integers wrap around (unsigned arithmetic), averages round towards zero.
#define DEFINE_INTEGER(T, unsigned_t)                                                                           \
    static void reduce_##T(const void *const *from, int size, T *out, int64_t n, int reduction) {                \
        for (int64_t i = 0; i < n; i++) {                                                                         \
            T a = ((const T *)from[0])[i];                                                                        \
            for (int r = 1; r < size; r++) {                                                                      \
                const T v = ((const T *)from[r])[i];                                                              \
                if (reduction == MAX) a = v > a ? v : a;                                                          \
                else if (reduction == MIN) a = v < a ? v : a;                                                     \
                else a = (T)((unsigned_t)a + (unsigned_t)v);                                                      \
            }                                                                                                     \
            out[i] = reduction == AVG ? (T)(a / (T)size) : a;                                                     \
        }                                                                                                         \
    }
DEFINE_INTEGER(int8_t, uint8_t)
DEFINE_INTEGER(uint8_t, uint8_t)
DEFINE_INTEGER(int16_t, uint16_t)
DEFINE_INTEGER(int32_t, uint32_t)
DEFINE_INTEGER(int64_t, uint64_t)

static void reduce(int dtype, const void *const *from, int size, char *out, int64_t n, int reduction, int stream) {
    switch (dtype) {
        case SHM_I8: reduce_int8_t(from, size, (int8_t *)out, n, reduction); break;
        case SHM_U8: reduce_uint8_t(from, size, (uint8_t *)out, n, reduction); break;
        case SHM_I16: reduce_int16_t(from, size, (int16_t *)out, n, reduction); break;
        case SHM_I32: reduce_int32_t(from, size, (int32_t *)out, n, reduction); break;
        case SHM_I64: reduce_int64_t(from, size, (int64_t *)out, n, reduction); break;
        default: HAL_DISPATCH(dtype, reduce, from, size, out, n, reduction, stream);
    }
}

static void copy(char *to, const char *from, int64_t bytes, int stream) {
    for (int64_t begin = 0; begin < bytes; begin += PIECE) {
        const int64_t length = begin + PIECE < bytes ? PIECE : bytes - begin;
        PREFETCH((uintptr_t)from + (uintptr_t)begin + AHEAD, PIECE, 3);
        if (stream) {
            stream_copy(to + begin, from + begin, length);
        } else {
            // The slot's lines are in the peer's cache as well, which must invalidate them first.
            for (int64_t i = begin + AHEAD; i < begin + AHEAD + PIECE && i < bytes; i += 64)
                __builtin_prefetch(to + i, 1, 3);
            memcpy(to + begin, from + begin, (size_t)length);
        }
    }
}

// Times the chunks of a large collective from the third on, TRIAL with ordinary and TRIAL with non-temporal stores to
// the slots, and records the faster variant in g->past.
static void try_both(group *g, int64_t chunk, double *began, double *took) {
    if (chunk < 2 || chunk > 2 + 2 * TRIAL || (chunk - 2) % TRIAL) return;
    const double time = now();
    if (chunk == 2) g->past = 0;
    if (chunk == 2 + TRIAL) *took = time - *began, g->past = 1;
    if (chunk == 2 + 2 * TRIAL) g->past = time - *began < *took;
    *began = time;
}

int hal_shm_run(uintptr_t handle, uintptr_t in_, uintptr_t out_, int64_t count, int root, int kind, int bytes, int dtype,
                int reduction) {
    group *g = (group *)handle;
    const int me = g->rank, size = g->size;
    member *mine = &g->members[me];
    const char *in = (const char *)in_;
    char *out = (char *)out_;
    const int divides = kind == REDUCE_SCATTER || kind == ALL_TO_ALL;
    const int64_t share = divides ? SLOT / size / 64 * 64 : SLOT;  // of a slot for one piece
    const int64_t most = share / bytes;
    const int whole = kind == ALL_GATHER || kind == ALL_TO_ALL ? size : 1;  // pieces of a result
    const int stream = streams(out_, whole * count * bytes, whole == 1 ? 64 : count * bytes);
    const uint64_t purpose = (uint64_t)count << 16 | (uint64_t)(kind << 12 | dtype << 6 | reduction << 2 | 1);
    const void *from[MAX_RANKS];
    const int tries = stream && count >= 8 * TRIAL * most;
    double began = 0, took = 0;
    int64_t done = 0;
    do {
        if (tries) try_both(g, done / most, &began, &took);
        const int past = stream && g->past;
        const int64_t n = count - done < most ? count - done : most, length = n * bytes;
        const uint64_t step = mine->posted;
        const int which = step & 1;
        for (int r = 0; r < size; r++) {
            if (r == me || step < 2 || g->seen[r] >= step) continue;
            const int fault = wait_for(g, r, &g->members[r].read, step - 1);
            if (fault) return fault;
        }
        if (divides) {
            for (int r = 0; r < size; r++)
                if (r != me) copy(mine->slot[which] + r * share, in + (r * count + done) * bytes, length, past);
        } else if (kind != BARRIER && (kind != BROADCAST || me == root)) {
            copy(mine->slot[which], in + done * bytes, length, past);
        }
        if (past) stream_end();
        mine->purpose[which] = purpose;  // written here, because a waiting peer would otherwise fetch the line twice
        __atomic_store_n(&mine->posted, step + 1, __ATOMIC_RELEASE);
        for (int r = 0; r < size; r++) {
            from[r] = in + (divides ? me * count + done : done) * bytes;
            if (r == me || (kind == BROADCAST && r != root)) continue;
            const int fault = wait_for(g, r, &g->members[r].posted, step + 1);
            if (fault) return fault;
            if (g->members[r].purpose[which] != purpose) return 256 * FAULT_MISMATCH + r;
            g->seen[r] = step + 1;
            from[r] = g->members[r].slot[which] + (divides ? me * share : 0);
        }
        switch (kind) {
            case ALL_REDUCE:
            case REDUCE_SCATTER: reduce(dtype, from, size, out + done * bytes, n, reduction, stream); break;
            case BROADCAST: copy(out + done * bytes, from[root], length, stream); break;
            case BARRIER: break;
            default:
                for (int r = 0; r < size; r++) copy(out + (r * count + done) * bytes, from[r], length, stream);
        }
        __atomic_store_n(&mine->read, step + 1, __ATOMIC_RELEASE);
        done += n;
    } while (done < count);
    if (stream) stream_end();
    return 0;
}

#else

// out = the reduction of from[0..size), size >= 1, in that order, rounded to T once. Max and min propagate NaN.
static void NAME(reduce)(const void *const *from, int size, char *out_, int64_t n, int reduction, int stream) {
    T *out = (T *)out_;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
        real sum[BLOCK];
        const T *next = (const T *)from[0] + begin;
        PREFETCH((uintptr_t)next + AHEAD, BLOCK * sizeof(T), 3);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sum[i] = LOAD(next + i);
        for (int r = 1; r < size; r++) {
            next = (const T *)from[r] + begin;
            PREFETCH((uintptr_t)next + AHEAD, BLOCK * sizeof(T), 3);
            if (reduction == MAX) {
#pragma omp simd
                for (int64_t i = 0; i < count; i++) {
                    const real v = LOAD(next + i);
                    sum[i] = v > sum[i] || v != v ? v : sum[i];
                }
            } else if (reduction == MIN) {
#pragma omp simd
                for (int64_t i = 0; i < count; i++) {
                    const real v = LOAD(next + i);
                    sum[i] = v < sum[i] || v != v ? v : sum[i];
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < count; i++) sum[i] += LOAD(next + i);
            }
        }
        if (reduction == AVG) {
#pragma omp simd
            for (int64_t i = 0; i < count; i++) sum[i] /= (real)size;
        }
        STORE_ROW(stream, out + begin, count, i, sum[i]);
    }
}

#endif
