// Joins a group: the address of its segment (zeroed before first use), this rank, the number of ranks, the timeout of a
// wait in seconds, and one pidfd per rank (or -1), which shows that a peer has died. Returns a handle, or 0 when out of
// memory.
uintptr_t hal_shm_open(uintptr_t segment, int rank, int size, double timeout, uintptr_t pidfds);
// Bytes of a segment for `size` ranks.
int64_t hal_shm_bytes(int size);
// Makes every wait of this process on the handle return. The handle stays valid: a thread may still be in a call.
void hal_shm_close(uintptr_t handle);
// Runs one collective: `count` elements per piece (a piece is the entire input, except for reduce_scatter and
// all_to_all, whose input has one per rank). kind, reduction, dtype: the enums in shared_memory.c. root: the sender of
// a broadcast. bytes: the size of an element. Returns 0, or 256 * fault + peer.
int hal_shm_run(uintptr_t handle, uintptr_t in, uintptr_t out, int64_t count, int root, int kind, int bytes, int dtype,
                int reduction);
// Whether `peer` has posted its part of the step that this rank is in.
int hal_shm_arrived(uintptr_t handle, int peer);
