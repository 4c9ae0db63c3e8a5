// Lists of `count` tensors: arrays of addresses and of element counts; every tensor is contiguous.
// params, m, v: real (float; double when grad_dtype is float64). models: addresses of low-precision copies of the
// parameters, written in the same pass, or 0. Decoupled weight decay; see optimizer.c for the formula.
void hal_adamw(int grad_dtype, int model_dtype, int64_t count, uintptr_t sizes, uintptr_t params, uintptr_t grads,
               uintptr_t m, uintptr_t v, uintptr_t models, double lr, double beta1, double beta2, double eps,
               double weight_decay, double correction1, double correction2, double grad_scale);
// The sum of squares of all elements of all tensors.
double hal_sum_of_squares(int dtype, int64_t count, uintptr_t sizes, uintptr_t tensors);
// grads *= inv_scale in place; returns whether any product (rounded) is inf or NaN.
int hal_unscale(int dtype, int64_t count, uintptr_t sizes, uintptr_t tensors, double inv_scale);
