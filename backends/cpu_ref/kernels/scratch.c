// Per-thread scratch memory, reused from call to call (see common.h). OpenMP's workers live as long as the process, so
// nothing is freed; a thread that ends leaves its buffer behind.
#include "common.h"

#include <stdio.h>

void *hal_scratch(size_t bytes) {
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
    }
    return buffer;
}
