// Multi-tensor optimizer kernels: AdamW, sum of squares, unscale-and-check. One call processes all tensors of a model.
//
// The tensors are cut into tasks of at most 32768 elements, so that threads share the work evenly for all sizes of
// the tensors; a table of tasks is built first. AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization"):
//   g = grad_scale grad;  p -= lr weight_decay p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g g
//   p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
// The sum of squares is accumulated in double (no overflow of squares, no loss over millions of terms): one partial sum
// per task, added up in the order of the tasks, so that the result does not depend on the number of threads.
//
// Memory traffic per parameter: AdamW reads p, g, m, v and writes p, m, v (28 bytes with float gradients, + 2 for a
// 16-bit model copy); the sum reads one element; unscale reads and writes one.
#ifndef HAL_BODY
#include "common.h"

#include "optimizer_api.h"

enum { TASK = 32768, MODEL_BLOCK = 1024 };

typedef struct {
    int64_t tensor, begin, end;
} task_t;

typedef struct {
    double decay, beta1, beta2, eps, step_size, root_correction2, grad_scale;
    int model_dtype;
} adamw_t;

// Builds the table of tasks in the calling thread's scratch memory, followed by *extra, extra_per_task bytes per task.
static task_t *make_tasks(int64_t count, const int64_t *sizes, size_t extra_per_task, int64_t *tasks, void **extra) {
    int64_t total = 0;
    for (int64_t t = 0; t < count; t++) total += (sizes[t] + TASK - 1) / TASK;
    task_t *table = hal_scratch((size_t)total * (sizeof(task_t) + extra_per_task));
    *extra = table + total;
    *tasks = 0;
    for (int64_t t = 0; t < count; t++)
        for (int64_t begin = 0; begin < sizes[t]; begin += TASK)
            table[(*tasks)++] = (task_t){t, begin, begin + TASK < sizes[t] ? begin + TASK : sizes[t]};
    return table;
}

#define HAL_SELF "optimizer.c"
#include "dtypes.h"

void hal_adamw(int grad_dtype, int model_dtype, int64_t count, uintptr_t sizes, uintptr_t params, uintptr_t grads,
               uintptr_t m, uintptr_t v, uintptr_t models, double lr, double beta1, double beta2, double eps,
               double weight_decay, double correction1, double correction2, double grad_scale) {
    const adamw_t how = {1 - lr * weight_decay, beta1, beta2, eps, lr / correction1, sqrt(correction2), grad_scale,
                         model_dtype};
    HAL_DISPATCH(grad_dtype, adamw, &how, count, (const int64_t *)sizes, (const uintptr_t *)params,
                 (const uintptr_t *)grads, (const uintptr_t *)m, (const uintptr_t *)v, (const uintptr_t *)models);
}

double hal_sum_of_squares(int dtype, int64_t count, uintptr_t sizes, uintptr_t tensors) {
    double sum = 0;
    HAL_DISPATCH(dtype, sum_of_squares, count, (const int64_t *)sizes, (const uintptr_t *)tensors, &sum);
    return sum;
}

int hal_unscale(int dtype, int64_t count, uintptr_t sizes, uintptr_t tensors, double inv_scale) {
    int nonfinite = 0;
    HAL_DISPATCH(dtype, unscale, count, (const int64_t *)sizes, (const uintptr_t *)tensors, inv_scale, &nonfinite);
    return nonfinite;
}

#else

HAL_INLINE void NAME(adamw_range)(const adamw_t *how, real *restrict p, const T *restrict grad, real *restrict m,
                                  real *restrict v, int64_t count) {
    const real decay = (real)how->decay, beta1 = (real)how->beta1, keep1 = (real)(1 - how->beta1), beta2 = (real)how->beta2,
               keep2 = (real)(1 - how->beta2), eps = (real)how->eps, step_size = (real)how->step_size,
               root = (real)how->root_correction2, scale = (real)how->grad_scale;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const real g = LOAD(grad + i) * scale;
        const real first = beta1 * m[i] + keep1 * g, second = beta2 * v[i] + keep2 * g * g;
        m[i] = first;
        v[i] = second;
        p[i] = p[i] * decay - step_size * first / (RNAME(sqrt)(second) / root + eps);
    }
}

static void NAME(adamw)(const adamw_t *how, int64_t count, const int64_t *sizes, const uintptr_t *params,
                        const uintptr_t *grads, const uintptr_t *ms, const uintptr_t *vs, const uintptr_t *models) {
    int64_t tasks;
    void *none;
    const task_t *table = make_tasks(count, sizes, 0, &tasks, &none);
#pragma omp parallel for schedule(static) if (tasks > 1)
    for (int64_t t = 0; t < tasks; t++) {
        const int64_t tensor = table[t].tensor;
        real *p = (real *)params[tensor], *m = (real *)ms[tensor], *v = (real *)vs[tensor];
        const T *grad = (const T *)grads[tensor];
        for (int64_t i = table[t].begin; i < table[t].end; i += MODEL_BLOCK) {
            const int64_t n = i + MODEL_BLOCK < table[t].end ? MODEL_BLOCK : table[t].end - i;
            NAME(adamw_range)(how, p + i, grad + i, m + i, v + i, n);
            if (models && how->model_dtype == HAL_BF16) {
                bf16 *model = (bf16 *)models[tensor] + i;
#pragma omp simd
                for (int64_t j = 0; j < n; j++) store_bf16(model + j, (float)p[i + j]);
            } else if (models && how->model_dtype == HAL_F16) {
                f16 *model = (f16 *)models[tensor] + i;
#pragma omp simd
                for (int64_t j = 0; j < n; j++) store_f16(model + j, (float)p[i + j]);
            } else if (models) {
                memcpy((real *)models[tensor] + i, p + i, (size_t)n * sizeof(real));
            }
        }
    }
}

static void NAME(sum_of_squares)(int64_t count, const int64_t *sizes, const uintptr_t *tensors, double *out) {
    int64_t tasks;
    void *extra;
    const task_t *table = make_tasks(count, sizes, sizeof(double), &tasks, &extra);
    double *partial = extra;
#pragma omp parallel for schedule(static) if (tasks > 1)
    for (int64_t t = 0; t < tasks; t++) {
        const T *x = (const T *)tensors[table[t].tensor] + table[t].begin;
        const int64_t n = table[t].end - table[t].begin;
        double sum;
        ROW_SUM(double, sum, n, i, (double)LOAD(x + i) * (double)LOAD(x + i));
        partial[t] = sum;
    }
    double sum = 0;
    for (int64_t t = 0; t < tasks; t++) sum += partial[t];
    *out = sum;
}

static void NAME(unscale)(int64_t count, const int64_t *sizes, const uintptr_t *tensors, double inv_scale, int *out) {
    int64_t tasks;
    void *none;
    const task_t *table = make_tasks(count, sizes, 0, &tasks, &none);
    const real factor = (real)inv_scale;
    int nonfinite = 0;
#pragma omp parallel for schedule(static) reduction(| : nonfinite) if (tasks > 1)
    for (int64_t t = 0; t < tasks; t++) {
        T *x = (T *)tensors[table[t].tensor] + table[t].begin;
        const int64_t n = table[t].end - table[t].begin;
        int bad = 0;
#pragma omp simd reduction(| : bad)
        for (int64_t i = 0; i < n; i++) {
            STORE(x + i, LOAD(x + i) * factor);
            // Read back after rounding: the product may overflow in the 16-bit type only.
            const real scaled = LOAD(x + i);
            bad |= !(scaled - scaled == 0);   // true for inf and NaN
        }
        nonfinite |= bad;
    }
    *out |= nonfinite;
}

#endif
