// logits [rows, v] contiguous: the part of the vocabulary with ids start .. start + v - 1. targets: int64 global ids.
// stats, real [4, rows]: maximum, sum of exp(logit - maximum), the target's logit (0 if its id is outside), sum of
// the logits (only when smoothing; else 0).
void hal_cross_entropy_stats(int dtype, uintptr_t logits, uintptr_t targets, uintptr_t stats, int smoothing, int64_t rows,
                             int64_t v, int64_t start);
// The complete loss of an unsharded vocabulary: loss = (1 - eps) (lse - x_target) + eps (lse - mean(x)); real [rows].
// sums, real [2, rows]: maximum, sum of exp(logit - maximum); lse = maximum + log(sum).
void hal_cross_entropy_fwd(int dtype, uintptr_t logits, uintptr_t targets, uintptr_t loss, uintptr_t sums, double eps,
                           int64_t rows, int64_t v, int64_t start);
// dlogits = dloss (exp(x - lse) - (1 - eps) [id = target] - eps / total); dlogits may be logits.
void hal_cross_entropy_bwd(int dtype, uintptr_t logits, uintptr_t targets, uintptr_t sums, uintptr_t dloss,
                           uintptr_t dlogits, double eps, int64_t rows, int64_t v, int64_t start, int64_t total);
