// The documented size limits of operators other than attention, checked before a call is accepted: operators.table
// names a rule after `if`, and the older path (aclop.cpp) calls rules itself. A rule throws Refusal with the parameter
// error.
#pragma once
#include "opapi.h"

namespace halsim::rules {
// The dimension splits into halves of the same size.
void even(const char* op, const Tensor& x, int64_t dim);
// D, dimensions, batch and heads, and the shapes of cos in each layout and mode (0 half, 1 interleave).
void rotary(const char* op, const Tensor& x, const Tensor& cos, int64_t mode);
// The sizes of gamma are the last ones of x, and its dtype is that of x, or float32 beside 16 bits.
void normalized(const char* op, const Tensor& x, const Tensor& gamma);
// No empty tensors; shapes of the statistics by layout; packed: lengths, at most 256 heads of a multiple of 64 up to 768.
void ring_update(const char* op, const Tensor& a, const Tensor& a_max, const Tensor& b, const Tensor& lengths,
                 const std::string& layout, const std::string& stats);
// [B, N, S, T] with S and T multiples of 32 in 32..4096, a bool mask that broadcasts to it, no fixed_triu_mask.
void scaled_masked_softmax(const char* op, const Tensor& x, const Tensor& mask, bool fixed_triu_mask);
// The limits of the operators for mixtures of experts (aclnnMoeGatingTopKSoftmaxV2, aclnnMoeTokenPermute,
// aclnnMoeTokenUnpermute and its gradient, aclnnGroupedMatmulV5, aclnnGroupedMatmulAdd).
// k is at most 1024 and at most the number of experts.
void chosen(const char* op, const Tensor& x, const Tensor& finished, int64_t k);
// Fewer than 16777215 indices, at most 512 per token, no padded mode.
void permutable(const char* op, const Tensor& indices, bool padded);
// As many rows as indices, at most 512 per token; without probs, one per token.
void unpermutable(const char* op, const Tensor& permuted, const Tensor& sorted, const Tensor& probs, bool padded);
// Single tensors of one float dtype, without bias, cumulative ends of at most 1024 groups, last sizes below 65536. Groups
// of rows (kind 0): x not transposed, weight [e, k, n]. Groups of the summed dimension (kind 2): x transposed.
void grouped(const char* op, const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
             const std::vector<Tensor>& bias, const Tensor& ends, const std::vector<Tensor>& out, int64_t split, int64_t kind,
             int64_t list_kind);
void grouped_add(const char* op, const Tensor& x, const Tensor& weight, const Tensor& ends, const Tensor& self,
                 bool transpose_x, bool transpose_weight, int64_t kind);
}  // namespace halsim::rules
