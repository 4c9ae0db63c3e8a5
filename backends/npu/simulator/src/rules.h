// The documented size limits of operators other than attention, checked before a call is accepted: operators.table
// names a rule after `if`, and the older path (aclop.cpp) calls rules itself. A rule throws Refusal with the parameter
// error.
#pragma once
#include "opapi.h"

namespace halsim::rules {
// The dimension splits into halves of the same size.
void even(const char* op, const Tensor& x, int64_t dim);
// D is even and below 896.
void rotary(const char* op, const Tensor& x);
// The sizes of gamma are the last ones of x.
void normalized(const char* op, const Tensor& x, const Tensor& gamma);
// [B, N, S, T] with S and T multiples of 32 in 32..4096, a bool mask that broadcasts to it, no fixed_triu_mask.
void scaled_masked_softmax(const char* op, const Tensor& x, const Tensor& mask, bool fixed_triu_mask);
}  // namespace halsim::rules
