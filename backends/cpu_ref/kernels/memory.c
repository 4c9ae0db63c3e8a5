// Memory reuse: per-thread scratch for kernels, the setting that makes the C library reuse freed blocks, and plain
// malloc for large results (see memory.py).
//
// A large tensor in fresh memory costs a page fault per 4 KiB (about 4 GB/s), more than most kernels. By default glibc
// maps and unmaps such blocks at every allocation. A thread's scratch lives as long as the thread; OpenMP's worker
// threads live as long as the thread whose parallel regions they run.
#include "common.h"

#include "memory_api.h"

#include <pthread.h>
#include <stdio.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

static pthread_key_t scratch;  // only for its destructor
static void make_key(void) { pthread_key_create(&scratch, free); }

void *hal_scratch(size_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static _Thread_local void *buffer;
    static _Thread_local size_t capacity;
    if (bytes > capacity) {
        free(buffer);
        capacity = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        buffer = aligned_alloc(64, capacity);
        if (!buffer) {
            fprintf(stderr, "hal: cpu_ref is out of memory (scratch buffer of %zu bytes)\n", capacity);
            abort();
        }
        pthread_once(&once, make_key);
        pthread_setspecific(scratch, buffer);
    }
    return buffer;
}

int hal_keep_freed_memory(void) {
#ifdef __GLIBC__
    // Never use mmap, never trim the top of the heap, grow it in steps of 64 MiB.
    return mallopt(M_MMAP_MAX, 0) && mallopt(M_TRIM_THRESHOLD, -1) && mallopt(M_TOP_PAD, 64 << 20);
#else
    return 0;
#endif
}

enum { ALIGNMENT = 64 };

// The address of the plain block is kept in front of the aligned one.
void *hal_allocate(size_t bytes) {
    void *plain = malloc(bytes + ALIGNMENT);
    if (!plain) return 0;
    void **block = (void **)(((uintptr_t)plain + ALIGNMENT) & ~(uintptr_t)(ALIGNMENT - 1));
    block[-1] = plain;
    return block;
}

void hal_free(void *block) { free(((void **)block)[-1]); }
