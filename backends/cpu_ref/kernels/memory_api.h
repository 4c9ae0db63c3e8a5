// Tells the C library to keep freed memory in the process; returns whether it could (glibc only).
int hal_keep_freed_memory(void);

// malloc and free of the C library, for tensors.
void *hal_allocate(size_t bytes);
void hal_free(void *block);
