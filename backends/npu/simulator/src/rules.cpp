#include "rules.h"

#include <ATen/ExpandUtils.h>

#include "constraints.h"

namespace halsim::rules {
namespace {
void require(bool fine, const char* op, const std::string& text) {
  if (!fine) throw Refusal{kInvalid, std::string(op) + ": " + text};
}
}  // namespace

void even(const char* op, const Tensor& x, int64_t dim) {
  require(x.size(dim) % 2 == 0, op, "dimension " + std::to_string(dim) + " of " + c10::str(x.sizes()) + " must be even");
}

// The document names the layouts of x and lists the shapes of cos that each takes. A call does not say its layout, so
// it is accepted if one of the layouts accepts it.
void rotary(const char* op, const Tensor& x, const Tensor& cos, int64_t mode) {
  int64_t d = x.size(-1);
  auto within = [&](const std::string& what, int64_t n, const limits::Range& range) {
    require(range.holds(n), op, what + " must be in " + std::to_string(range.least) + ".." + std::to_string(range.most) + ", got " + std::to_string(n));
  };
  require(d % 2 == 0 && limits::rotary_head_size.holds(d), op, "D must be even and below 896, got " + std::to_string(d));
  within("the number of dimensions of x", x.dim(), limits::rotary_dimensions);
  require(cos.dim() == x.dim() && cos.size(-1) == d, op, "cos " + c10::str(cos.sizes()) + " does not fit x " + c10::str(x.sizes()));
  bool interleaved = mode == 1;
  std::string fits;  // of cos, without D: 1 for a size of one, x for the size of x, x1 for both
  for (int64_t i = 0; i + 1 < x.dim(); i++) {
    bool one = cos.size(i) == 1, same = cos.size(i) == x.size(i);
    require(one || same, op, "cos " + c10::str(cos.sizes()) + " does not broadcast to x " + c10::str(x.sizes()));
    fits += one && same ? '*' : one ? '1' : 'x';
  }
  auto is = [&](const char* form) {
    for (size_t i = 0; i < fits.size(); i++)
      if (fits[i] != '*' && fits[i] != form[i]) return false;
    return true;
  };
  struct Layout {
    int64_t batch, heads, sequence;
    bool shared, per_sample, per_head;  // the shapes of cos
    bool bnsd;
  };
  std::vector<Layout> layouts;
  if (x.dim() == 3) layouts = {{-1, 1, 0, is("x1"), false, is("xx"), false}};
  if (x.dim() == 4)
    layouts = {{0, 1, 2, is("11x"), is("x1x"), is("xxx"), true},
               {0, 2, 1, is("1x1"), is("xx1"), is("xxx"), false},
               {1, 2, 0, is("x11"), is("xx1"), is("xxx"), false}};
  std::string why;
  for (const Layout& l : layouts) {
    int64_t b = l.batch < 0 ? 1 : x.size(l.batch), n = x.size(l.heads), s = x.size(l.sequence);
    if (interleaved ? !l.shared : !(l.shared || l.per_sample || l.per_head)) continue;
    if (interleaved && !limits::rotary_interleaved_batch_heads.holds(b * n)) {
      why = "B * N must be below 1000 in interleave mode, got " + std::to_string(b * n);
      continue;
    }
    if (!interleaved && !(limits::rotary_half_batch.holds(b) && limits::rotary_half_heads.holds(n))) {
      why = "B and N must be below 1000 in half mode, got " + std::to_string(b) + " and " + std::to_string(n);
      continue;
    }
    if (!interleaved && l.bnsd) {
      int64_t block = 32 / x.element_size(), cores = 20;
      bool few = d / 2 % block == 0 ? b * n <= s * 8 : b * n * 2 <= (s + cores - 1) / cores || d >= 80;
      if (!few) {
        why = "B * N is too large for S in layout BNSD: " + c10::str(x.sizes());
        continue;
      }
    }
    return;
  }
  require(false, op, why.empty() ? "cos " + c10::str(cos.sizes()) + " is not supported for x " + c10::str(x.sizes()) + " in this mode" : why);
}

void normalized(const char* op, const Tensor& x, const Tensor& gamma) {
  bool fits = gamma.dim() <= x.dim() && gamma.sizes() == x.sizes().slice(x.dim() - gamma.dim());
  require(fits, op, "gamma " + c10::str(gamma.sizes()) + " must have the last sizes of x " + c10::str(x.sizes()));
  bool one = gamma.scalar_type() == x.scalar_type();
  require(one || (gamma.scalar_type() == at::kFloat && x.element_size() == 2), op,
          "gamma must have the dtype of x, or float32 with a 16-bit x; got " + std::string(c10::toString(gamma.scalar_type())));
}

void scaled_masked_softmax(const char* op, const Tensor& x, const Tensor& mask, bool fixed_triu_mask) {
  require(x.dim() == 4, op, "x must have 4 dimensions, got " + c10::str(x.sizes()));
  for (int64_t size : x.sizes().slice(2))
    require(size % 32 == 0 && limits::softmax_size.holds(size), op,
            "the last two sizes of x must be multiples of 32 in 32..4096, got " + c10::str(x.sizes()));
  require(!fixed_triu_mask, op, "fixed_triu_mask is reserved and must be False");
  require(mask.scalar_type() == at::kBool, op, "mask must be bool");
  require(at::is_expandable_to(mask.sizes(), x.sizes()), op,
          "mask " + c10::str(mask.sizes()) + " does not broadcast to x " + c10::str(x.sizes()));
}

namespace {
constexpr int kTiling = 561002;  // ACLNN_ERR_INNER_TILING_ERROR

void tile(bool fine, const char* op, const std::string& text) {
  if (!fine) throw Refusal{kTiling, std::string(op) + ": " + text};
}

void few_per_token(const char* op, int64_t count) {
  require(limits::moe_per_token.holds(count), op, "at most 512 experts per token, got " + std::to_string(count));
}

void few_groups(const char* op, const Tensor& ends, const Tensor& x, const Tensor& weight) {
  require(ends.dim() == 1 && ends.numel() <= limits::grouped_groups.most, op, "at most 1024 groups, got " + c10::str(ends.sizes()));
  for (const Tensor& t : {x, weight})
    require(t.size(-1) <= limits::grouped_last_size.most, op, "the last size must be below 65536, got " + c10::str(t.sizes()));
}
}  // namespace

void ring_update(const char* op, const Tensor& a, const Tensor& a_max, const Tensor& b, const Tensor& lengths,
                 const std::string& layout, const std::string& stats) {
  require(layout == "SBH" || layout == "TND", op, "the layout must be SBH or TND, got " + layout);
  tile(a.numel() > 0, op, "out has no elements: " + c10::str(a.sizes()));
  tile(a.dim() == 3 && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type(), op, "two results of one shape and dtype with 3 dimensions");
  if (layout == "SBH") {
    bool fits = a_max.dim() == 4 && a_max.size(0) == a.size(1) && a_max.size(2) == a.size(0) && a.size(2) % a_max.size(1) == 0;
    tile(fits, op, "statistics " + c10::str(a_max.sizes()) + " must be [B, N, S, 8] of out [S, B, H] " + c10::str(a.sizes()));
    return;
  }
  require(stats == "TND", op, "the simulator takes statistics of packed sequences in layout TND");
  tile(lengths.defined(), op, "packed sequences need their lengths");
  bool fits = a_max.dim() == 3 && a_max.size(0) == a.size(0) && a_max.size(1) == a.size(1);
  tile(fits, op, "statistics " + c10::str(a_max.sizes()) + " must be [T, N, 8] of out [T, N, D] " + c10::str(a.sizes()));
  tile(limits::ring_packed_heads.holds(a.size(1)), op, "at most 256 heads, got " + std::to_string(a.size(1)));
  tile(a.size(2) % 64 == 0 && limits::ring_packed_head_size.holds(a.size(2)), op,
       "D must be a multiple of 64 in 64..768, got " + std::to_string(a.size(2)));
}

void chosen(const char* op, const Tensor& x, const Tensor& finished, int64_t k) {
  require(x.dim() == 2 || x.dim() == 3, op, "x must have 2 or 3 dimensions, got " + c10::str(x.sizes()));
  tile(k >= 0 && k <= x.size(-1) && k <= limits::moe_top_k.most, op, "k must be in 0.." + std::to_string(x.size(-1)) + " and at most 1024");
  require(!finished.defined(), op, "finished is not simulated");
}

void permutable(const char* op, const Tensor& indices, bool padded) {
  require(!padded, op, "padded_mode must be False");
  require(indices.dim() == 1 || indices.dim() == 2, op, "indices must have 1 or 2 dimensions");
  require(indices.numel() <= limits::moe_assignments.most, op, "fewer than 16777215 indices, got " + std::to_string(indices.numel()));
  if (indices.dim() == 2) few_per_token(op, indices.size(1));
}

void unpermutable(const char* op, const Tensor& permuted, const Tensor& sorted, const Tensor& probs, bool padded) {
  require(!padded, op, "padded_mode must be False");
  require(permuted.dim() == 2 && sorted.dim() == 1, op, "permuted must have 2 dimensions and sorted 1");
  tile(permuted.size(0) == sorted.numel(), op, "as many rows as indices, got " + c10::str(permuted.sizes()));
  if (!probs.defined()) return;
  few_per_token(op, probs.size(-1));
  tile(probs.dim() == 2 && probs.numel() == sorted.numel(), op, "as many probs as indices, got " + c10::str(probs.sizes()));
}

void grouped(const char* op, const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
             const std::vector<Tensor>& bias, const Tensor& ends, const std::vector<Tensor>& out, int64_t split, int64_t kind,
             int64_t list_kind) {
  bool single = x.size() == 1 && weight.size() == 1 && out.size() == 1;
  require(single && bias.empty(), op, "the simulator takes single tensors without a bias");
  require(split == 2 || split == 3, op, "split_item must be 2 or 3 for a single output");
  require((kind == 0 || kind == 2) && list_kind == 0, op, "group_type must be 0 or 2, and the list cumulative");
  const Tensor &a = x[0], &b = weight[0];
  bool floating = a.scalar_type() == at::kFloat || a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16;
  require(floating && a.scalar_type() == b.scalar_type(), op, "x and weight must have one of three float dtypes");
  few_groups(op, ends, a, b);
  if (kind == 0) {
    tile(a.dim() == 2 && b.dim() == 3 && a.size(1) == b.size(1) && b.size(0) == ends.numel(), op,
         "x [m, k] " + c10::str(a.sizes()) + " does not fit weight [e, k, n] " + c10::str(b.sizes()));
    tile(a.stride(1) == 1 || a.size(1) == 1, op, "x cannot be transposed");
  } else {
    tile(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), op,
         "x [m, k] " + c10::str(a.sizes()) + " does not fit weight [k, n] " + c10::str(b.sizes()));
    tile(a.stride(0) == 1 || a.size(0) == 1, op, "x must be transposed");
    tile(b.stride(1) == 1 || b.size(1) == 1, op, "weight cannot be transposed");
  }
}

void grouped_add(const char* op, const Tensor& x, const Tensor& weight, const Tensor& ends, const Tensor& self,
                 bool transpose_x, bool transpose_weight, int64_t kind) {
  require(transpose_x && !transpose_weight && kind == 2, op, "x must be transposed, weight not, group_type 2");
  require(x.scalar_type() == weight.scalar_type(), op, "x and weight must have one dtype");
  require(self.is_contiguous(), op, "y must be contiguous");
  few_groups(op, ends, x, weight);
  bool fits = x.dim() == 2 && weight.dim() == 2 && self.dim() == 2 && x.size(0) == weight.size(0);
  tile(fits && self.size(0) == ends.numel() * x.size(1) && self.size(1) == weight.size(1), op,
       "y " + c10::str(self.sizes()) + " does not fit x " + c10::str(x.sizes()) + " and weight " + c10::str(weight.sizes()));
}

}  // namespace halsim::rules
