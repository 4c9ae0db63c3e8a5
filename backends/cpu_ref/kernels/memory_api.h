// Tells the C library to keep freed memory in the process; returns whether it could (glibc only).
int hal_keep_freed_memory(void);
