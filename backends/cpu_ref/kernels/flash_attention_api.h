// Flash attention, forward and backward, for any dense layout and for packed sequences (see flash_attention.c).

// The shape of one call. Strides are in elements: [0] batch, [1] token, [2] head; the channels of a head are adjacent.
// A packed batch (TND) has batch = number of sequences, sq and sk = total tokens, batch strides 0, and cu_seqlens.
struct hal_flash_attention {
    int64_t dtype;  // HAL_F32 ... of q, k, v, out and their gradients
    int64_t batch, heads, kv_heads, sq, sk;
    int64_t head_size, value_size;    // of q and k; of v and out
    int64_t q[3], k[3], v[3], out[3];
    int64_t mask[4];                  // byte strides over [b, n, sq, sk]; 0 where broadcast
    int64_t bias[4];                  // element strides over [b, n, sq, sk]; 0 where broadcast
    int64_t slopes[2];                // element strides over [b, n]
    int64_t pre, next;                // key j is visible to query i iff i + d - pre <= j <= i + d + next
    int64_t top_left;                 // whether d = 0 instead of sk - sq (of each sequence)
    double scale;
    double softcap;                   // 0 = none
    int64_t dropout_threshold;        // keep iff (bits >> 8) >= threshold; 0 = no dropout
    double dropout_scale;             // 1 / (1 - p)
    int64_t dropout_index[4];         // element (b, n, i, j) has index [0] + [1] b + [2] n + [3] i + j in the draw
    int64_t dout[3], dq[3], dk[3], dv[3];  // backward only
};

// lse: [batch, heads, sq] ([heads, tokens] when packed), contiguous, float (double for HAL_F64).
// rest: the rounding error of out (exact minus rounded), in out's dtype and strides; 0 = not requested, or unknown. The
// difference in the gradient of the scores, P (dP - dO . out), cancels, so 16-bit gradients lose digits without rest.
// mask: bytes, non-zero = masked out. bias: in q's dtype; slopes: float; sinks: real [heads]. These, cu_seqlens_q and
// cu_seqlens_k (int32 [batch + 1]) may be 0.
// dbias: real [batch, heads, sq, sk], zeroed by the caller, receives the gradient of the scores after softcap; dsinks: real
// like lse, receives each query's part of the gradient of the sinks. Both may be 0 = not requested.
// The functions return 0, 1 when out of memory, 2 when cu_seqlens do not rise from 0 to the number of tokens, or 3 when
// the dtype's kind was not added.
int hal_flash_attention_forward(const struct hal_flash_attention *shape, uintptr_t q, uintptr_t k, uintptr_t v,
                                uintptr_t mask, uintptr_t bias, uintptr_t slopes, uintptr_t sinks, uintptr_t cu_seqlens_q,
                                uintptr_t cu_seqlens_k, uint64_t seed, uint64_t offset, uintptr_t out, uintptr_t rest,
                                uintptr_t lse);
int hal_flash_attention_backward(const struct hal_flash_attention *shape, uintptr_t q, uintptr_t k, uintptr_t v,
                                 uintptr_t mask, uintptr_t bias, uintptr_t slopes, uintptr_t sinks, uintptr_t cu_seqlens_q,
                                 uintptr_t cu_seqlens_k, uint64_t seed, uint64_t offset, uintptr_t out, uintptr_t rest,
                                 uintptr_t lse, uintptr_t dout, uintptr_t dq, uintptr_t dk, uintptr_t dv,
                                 uintptr_t dbias, uintptr_t dsinks);
// Frees the cached workspace; returns its size in bytes.
int64_t hal_flash_attention_trim(void);
