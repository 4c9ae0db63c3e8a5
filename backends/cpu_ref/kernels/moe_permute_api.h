// row_map [assignments] and sizes [experts] from indices [assignments], each an expert or -1 (dropped). capacity: rows of
// an expert, or -1; row_map is -1 for what is dropped. sizes are the rows that assignments fill. Returns their sum, or
// -1 if an index is not an expert.
int64_t hal_moe_plan(uintptr_t indices, uintptr_t row_map, uintptr_t sizes, int64_t assignments, int64_t experts,
                     int64_t capacity);
// Whether all elements of row_map are less than rows.
int hal_moe_map_fits(uintptr_t row_map, int64_t assignments, int64_t rows);
// out[row_map[t][j]] = x[t], rows of `bytes` bytes.
void hal_moe_scatter(uintptr_t x, uintptr_t row_map, uintptr_t out, int64_t tokens, int64_t topk, int64_t rows,
                     int64_t bytes);
// Zeroes the rows that assignments leave: those of each expert beyond its size (capacity >= 0), or those from `filled`.
void hal_moe_zero_rest(uintptr_t out, uintptr_t sizes, int64_t experts, int64_t capacity, int64_t filled, int64_t rows,
                       int64_t bytes);
// out[t] = sum over j of probs[t][j] rows[row_map[t][j]] (probs real, or 0 for 1), h channels.
void hal_moe_gather(int dtype, uintptr_t rows, uintptr_t row_map, uintptr_t probs, uintptr_t out, int64_t tokens,
                    int64_t topk, int64_t h);
// drows[row_map[t][j]] = probs[t][j] dout[t] and, if dprobs, dprobs[t][j] (real) = dout[t] . rows[row_map[t][j]].
void hal_moe_gather_bwd(int dtype, uintptr_t rows, uintptr_t row_map, uintptr_t probs, uintptr_t dout, uintptr_t drows,
                        uintptr_t dprobs, int64_t tokens, int64_t topk, int64_t row_count, int64_t h);
