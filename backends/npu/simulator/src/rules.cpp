#include "rules.h"

#include <ATen/ExpandUtils.h>

namespace halsim::rules {
namespace {
void require(bool fine, const char* op, const std::string& text) {
  if (!fine) throw Refusal{kInvalid, std::string(op) + ": " + text};
}
}  // namespace

void even(const char* op, const Tensor& x, int64_t dim) {
  require(x.size(dim) % 2 == 0, op, "dimension " + std::to_string(dim) + " of " + c10::str(x.sizes()) + " must be even");
}

void rotary(const char* op, const Tensor& x) {
  int64_t d = x.size(-1);
  require(d % 2 == 0 && d < 896, op, "D must be even and below 896, got " + std::to_string(d));
}

void normalized(const char* op, const Tensor& x, const Tensor& gamma) {
  bool fits = gamma.dim() <= x.dim() && gamma.sizes() == x.sizes().slice(x.dim() - gamma.dim());
  require(fits, op, "gamma " + c10::str(gamma.sizes()) + " must have the last sizes of x " + c10::str(x.sizes()));
}

void scaled_masked_softmax(const char* op, const Tensor& x, const Tensor& mask, bool fixed_triu_mask) {
  require(x.dim() == 4, op, "x must have 4 dimensions, got " + c10::str(x.sizes()));
  for (int64_t size : x.sizes().slice(2))
    require(size % 32 == 0 && size >= 32 && size <= 4096, op,
            "the last two sizes of x must be multiples of 32 in 32..4096, got " + c10::str(x.sizes()));
  require(!fixed_triu_mask, op, "fixed_triu_mask is reserved and must be False");
  require(mask.scalar_type() == at::kBool, op, "mask must be bool");
  require(at::is_expandable_to(mask.sizes(), x.sizes()), op,
          "mask " + c10::str(mask.sizes()) + " does not broadcast to x " + c10::str(x.sizes()));
}

}  // namespace halsim::rules
