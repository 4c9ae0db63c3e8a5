// Tells the C library to keep freed memory in the process; returns whether it could (glibc only).
int hal_keep_freed_memory(void);

// A block for a tensor, aligned to 64 bytes within a larger one of the C library's malloc; 0: out of memory.
void *hal_allocate(size_t bytes);
void hal_free(void *block);
