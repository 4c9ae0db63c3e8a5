// out = x scale, float32 [rows, width], for x of float8_e4m3fn, or of float8_e5m2 if e5m2. Element (i, j) has the scale
// (i / row_block, j / block) of a matrix with ceil(width / block) columns. Everything is contiguous.
void hal_dequantize(int e5m2, uintptr_t x, uintptr_t scale, uintptr_t out, int64_t rows, int64_t width,
                    int64_t row_block, int64_t block);
