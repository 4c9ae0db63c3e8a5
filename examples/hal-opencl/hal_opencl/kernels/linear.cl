// c = a b^T + bias, for a [m, k] and b [n, k] of any strides: both are packed, then multiplied tile by tile.
//
// Packed: panels of TILE rows, [panels][k][TILE] floats, missing rows 0; so whatever the strides and the element type,
// the product reads both operands in order. A work-item makes MR x NR results (NR = NV vectors) in registers: with 16
// lanes, 8 x 2 vectors take 16 of 32 registers, and one step over k is 16 multiply-adds for 2 vector loads. Sums run
// over k in order, in pieces of PIECE terms: the rounding error of a single sum of n terms grows as n, because its
// partial sums grow as sqrt(n).
//
// Memory traffic: packing reads an operand once and writes it once as floats; tiles that follow each other share b's
// panel, which stays in cache (k x NR floats), and stream a.
#define NR (NV * LANES)
#define PIECE 1024

// Element (r, i) of the operand is x[r * rs + i * ks], r < rows, i < k. One work-item packs a panel.
kernel void pack(IN(T, x), OUT(f32, packed), const long tile, const long rows, const long k, const long rs,
                 const long ks) {
    const long panel = get_global_id(0), r0 = panel * tile, n = min(rows - r0, tile);
    if (n <= 0) return;
    global const T *x = TENSOR(x) + r0 * rs;
    global f32 *to = TENSOR(packed) + panel * tile * k;
    if (rs == 1 && n == tile && tile % LANES == 0) {
        for (long i = 0; i < k; i++)
            for (long r = 0; r < tile; r += LANES) STORE(f32, to + i * tile + r, LOAD(T, x + i * ks + r));
    } else {
        for (long i = 0; i < k; i++)
            for (long r = 0; r < tile; r++) to[i * tile + r] = r < n ? GET(T, x + r * rs + i * ks) : 0;
    }
}

kernel void multiply(IN(f32, a), IN(f32, b), IN(T, bias), OUT(T, c), const long m, const long n, const long k) {
    const long i0 = (long)get_global_id(0) * MR, j0 = (long)get_global_id(1) * NR;
    if (i0 >= m) return;
    global const f32 *a = TENSOR(a) + i0 * k, *b = TENSOR(b) + j0 * k;
    global const T *bias = TENSOR(bias);
    global T *c = TENSOR(c);
    vec result[MR][NV];  // indexed by variables below, for which `sum` would have to leave the registers
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) result[r][v] = 0;
    for (long start = 0; start < k; start += PIECE) {
        vec sum[MR][NV];
#pragma unroll
        for (int r = 0; r < MR; r++)
#pragma unroll
            for (int v = 0; v < NV; v++) sum[r][v] = 0;
        const long end = min(k, start + PIECE);
        for (long i = start; i < end; i++, a += MR, b += NR) {
            vec row[NV];
#pragma unroll
            for (int v = 0; v < NV; v++) row[v] = LOAD(f32, b + v * LANES);
#pragma unroll
            for (int r = 0; r < MR; r++)
#pragma unroll
                for (int v = 0; v < NV; v++) sum[r][v] = fma((vec)a[r], row[v], sum[r][v]);
        }
#pragma unroll
        for (int r = 0; r < MR; r++)
#pragma unroll
            for (int v = 0; v < NV; v++) result[r][v] += sum[r][v];
    }
    for (int r = 0; r < MR && i0 + r < m; r++)
        for (int v = 0; v < NV; v++) {
            const long j = j0 + v * LANES, left = n - j;
            if (left <= 0) break;
            const vec value = bias ? result[r][v] + LOAD_N(T, bias + j, left) : result[r][v];
            STORE_N(T, c + (i0 + r) * n + j, value, left);
        }
}
