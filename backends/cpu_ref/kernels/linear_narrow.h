// Linear layers with few outputs or inputs in float32 (a router's experts, the rank of LoRA). Packing the operands
// would take as long as multiplying them, so the large ones are read and written in place. Included by linear_f32.c
// after linear_kind.h.
enum {
    STEP = 64,           // tokens per block
    CHUNK = 10 * PANEL,  // columns of the wide side of a weight gradient at a time
    SPAN = 512,          // columns of X per block of a forward product: a multiple of W
};

// A panel of PANEL columns: C [m][ldc] = A^T B or, with `add`, C += A^T B, for A [tokens][m] and B [tokens][ldb]. Not
// inlined: beside other loops the compiler would keep operands in memory (test_machine_code.py).
static __attribute__((noinline)) void narrow_tile(const float *a, int64_t m, const float *b, int64_t ldb, float *c,
                                                  int64_t ldc, int64_t tokens, int add) {
    stripe(MR, 3, m, tokens, a, 1, m, b, ldb, c, ldc, add, NULL);
}

// The same for n columns and any number of tokens, m <= LINEAR_NARROW.
static void narrow_columns(const float *a, int64_t m, const float *b, int64_t ldb, int64_t n, float *c, int64_t ldc,
                           int64_t tokens, int add) {
    float part[STEP * PANEL] __attribute__((aligned(64))), sums[LINEAR_NARROW * PANEL] __attribute__((aligned(64)));
    for (int64_t t = 0; t < tokens; t += STEP, a += STEP * m, b += STEP * ldb, add = 1) {
        const int64_t count = tokens - t < STEP ? tokens - t : STEP, whole = n / PANEL * PANEL, rest = n - whole;
        for (int64_t j = 0; j < whole; j += PANEL) narrow_tile(a, m, b + j, ldb, c + j, ldc, count, add);
        if (rest == 0) continue;
        for (int64_t k = 0; k < count; k++)
            for (int64_t i = 0; i < PANEL; i++) part[k * PANEL + i] = i < rest ? b[k * ldb + whole + i] : 0;
        narrow_tile(a, m, part, PANEL, sums, PANEL, count, 0);
        for (int64_t i = 0; i < m; i++)
            for (int64_t k = 0; k < rest; k++)
                c[i * ldc + whole + k] = sums[i * PANEL + k] + (add ? c[i * ldc + whole + k] : 0);
    }
}

// See linear_wgrad_f32; the narrower of dY and X has at most LINEAR_NARROW columns. If it is X, dW^T = X^T dY is
// computed and transposed. Every element is a sum over blocks of STEP tokens in order, and threads divide the wide side,
// so the result does not depend on their number.
void linear_wgrad_narrow(const float *dy, const float *x, float *dw, float *dbias, int64_t rows, int64_t n_out,
                         int64_t n_in, int add) {
    const int tall = n_in < n_out;
    const int64_t wide = tall ? n_out : n_in, panels = (wide + PANEL - 1) / PANEL, threads = omp_get_max_threads();
    const int64_t own = tall ? n_in * CHUNK : 0;
    double *sums = hal_scratch((size_t)n_out * sizeof(double) + (size_t)(threads * own) * sizeof(float));
    memset(sums, 0, (size_t)n_out * sizeof(double));
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t j0 = panels * me / team * PANEL, end = panels * (me + 1) / team * PANEL;
        const int64_t j1 = end < wide ? end : wide;
        float *transposed = (float *)(sums + n_out) + me * own;
        for (int64_t j = j0; j < j1; j += CHUNK) {
            const int64_t n = j1 - j < CHUNK ? j1 - j : CHUNK;
            if (!tall) {
                narrow_columns(dy, n_out, x + j, n_in, n, dw + j, n_in, rows, add);
                continue;
            }
            narrow_columns(x, n_in, dy + j, n_out, n, transposed, CHUNK, rows, 0);
            for (int64_t o = 0; o < n; o++)
                for (int64_t i = 0; i < n_in; i++) {
                    float *at = dw + (j + o) * n_in + i;
                    *at = transposed[i * CHUNK + o] + (add ? *at : 0);
                }
        }
        if (dbias) {
            const int64_t i0 = tall ? j0 : 0, i1 = tall ? j1 : me == 0 ? n_out : 0;
            for (int64_t k = 0; k < rows; k += STEP)
                for (int64_t i = i0; i < i1; i += ROWS)
                    add_sums(sums + i, dy + k * n_out + i, n_out, rows - k < STEP ? rows - k : STEP,
                             i1 - i < ROWS ? i1 - i : ROWS);
            for (int64_t i = i0; i < i1; i++) dbias[i] = (float)((add ? dbias[i] : 0) + sums[i]);
        }
    }
}

// For A with m rows lda apart and B [depth][ldb], ldb <= LINEAR_FEW: C [m][ldb] = A B or, with `add`, C += A B. Not
// inlined for the same reason, nor is the next one.
static __attribute__((noinline)) void narrow_rows(int64_t m, int64_t depth, const float *a, int64_t lda, const float *b,
                                                  int64_t ldb, float *c, int add) {
    stripes(m, ldb / W, depth, a, lda, 1, b, ldb, c, ldb, add, NULL);
}

// MR rows at most of a panel: C [m][ldc] = A B.
static __attribute__((noinline)) void shallow_tile(int64_t m, int64_t depth, const float *a, int64_t lda,
                                                   const float *b, int64_t ldb, float *c, int64_t ldc) {
    stripe(MR, 3, m, depth, a, lda, 1, b, ldb, c, ldc, 0, NULL);
}

// The operands of linear_narrow, and W packed, transposed: `columns` [n_in][ld], zero beyond the last output.
struct narrow {
    const float *x, *bias, *columns;
    float *y;
    int64_t ldx, rows, n_in, n_out, ld;
};

// STEP rows of Y from row r on, for few outputs. Every element is a sum over blocks of SPAN columns in order.
static void few_outputs(const struct narrow *s, int64_t r) {
    float sums[STEP * LINEAR_FEW] __attribute__((aligned(64)));
    const int64_t m = s->rows - r < STEP ? s->rows - r : STEP;
    for (int64_t k = 0; k < s->n_in; k += SPAN) {
        const int64_t depth = s->n_in - k < SPAN ? s->n_in - k : SPAN;
        narrow_rows(m, depth, s->x + r * s->ldx + k, s->ldx, s->columns + k * s->ld, s->ld, sums, k > 0);
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t o = 0; o < s->n_out; o++)
            s->y[(r + i) * s->n_out + o] = sums[i * s->ld + o] + (s->bias ? s->bias[o] : 0);
}

// MR rows of Y from row r on, for few inputs.
static void few_inputs(const struct narrow *s, int64_t r) {
    float sums[MR * PANEL] __attribute__((aligned(64)));
    const int64_t m = s->rows - r < MR ? s->rows - r : MR;
    for (int64_t o = 0; o < s->n_out; o += PANEL) {
        const int64_t n = s->n_out - o < PANEL ? s->n_out - o : PANEL;
        const int buffered = n < PANEL || s->bias;
        float *y = s->y + r * s->n_out + o, *c = buffered ? sums : y;
        shallow_tile(m, s->n_in, s->x + r * s->ldx, s->ldx, s->columns + o, s->ld, c, buffered ? PANEL : s->n_out);
        for (int64_t i = 0; i < m && buffered; i++, c += PANEL, y += s->n_out)
            for (int64_t j = 0; j < n; j++) y[j] = c[j] + (s->bias ? s->bias[o + j] : 0);
    }
}

// See linear_plan.h.
void linear_narrow(const float *x, int64_t ldx, const float *w, int64_t w_out, int64_t w_in, const float *bias,
                   float *y, int64_t rows, int64_t n_in, int64_t n_out) {
    const int few = n_out <= LINEAR_FEW, step = few ? STEP : MR;
    const int64_t width = few ? W : PANEL, ld = (n_out + width - 1) / width * width;
    float *columns = hal_scratch((size_t)(n_in * ld) * sizeof(float));
    const struct narrow all = {x, bias, columns, y, ldx, rows, n_in, n_out, ld};
#pragma omp parallel
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t k0 = 0; k0 < n_in; k0 += W)
            for (int64_t o0 = 0; o0 < ld; o0 += W)
                for (int64_t o = o0; o < o0 + W; o++)
                    for (int64_t k = k0; k < k0 + W && k < n_in; k++)
                        columns[k * ld + o] = o < n_out ? w[o * w_out + k * w_in] : 0;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r += step)
            if (few) few_outputs(&all, r);
            else few_inputs(&all, r);
    }
}
