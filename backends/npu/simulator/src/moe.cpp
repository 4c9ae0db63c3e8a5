// Ascend's operators for mixtures of experts, as their documentation describes them. Sums are float32.
#include "kernels.h"

namespace halsim::kernels {
namespace {
Tensor f32(const Tensor& x) { return x.to(at::kFloat); }

// The ends of the groups; the last one must be `total`, as the library requires.
std::vector<int64_t> read_ends(const Tensor& ends, int64_t total) {
  Tensor values = ends.contiguous();
  std::vector<int64_t> result(values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.numel());
  int64_t before = 0;
  for (int64_t end : result) {
    TORCH_CHECK(end >= before, "group_list must not decrease: ", values);
    before = end;
  }
  TORCH_CHECK(result.empty() || before == total, "the last value of group_list must be ", total, ", got ", before);
  return result;
}

// [tokens, topk] places of the rows of every token.
Tensor places(const Tensor& sorted, const Tensor& probs) {
  Tensor all = sorted.to(at::kLong);
  TORCH_CHECK(at::equal(std::get<0>(all.sort()), at::arange(all.numel())), "sorted_indices must name every row once");
  return all.view({-1, probs.defined() ? probs.size(1) : 1});
}
}  // namespace

std::tuple<Tensor, Tensor> gating_top_k_softmax(const Tensor& x, int64_t k, int64_t renorm) {
  Tensor scores = f32(x);
  if (renorm == 0) scores = at::softmax(scores, -1);
  auto [values, experts] = at::sort(scores, /*stable=*/true, -1, /*descending=*/true);
  values = values.narrow(-1, 0, k);
  return {renorm == 0 ? values : at::softmax(values, -1), experts.narrow(-1, 0, k)};
}

std::tuple<Tensor, Tensor> permute(const Tensor& tokens, const Tensor& indices, int64_t rows) {
  Tensor flat = indices.reshape(-1).to(at::kLong);
  TORCH_CHECK(!flat.numel() || (flat.min().item<int64_t>() >= 0 && flat.max().item<int64_t>() < 16777215),
              "indices must be in 0..16777214");
  int64_t topk = indices.dim() == 1 ? 1 : indices.size(1);
  Tensor order = std::get<1>(flat.sort(/*stable=*/true, 0, /*descending=*/false));
  Tensor place = at::empty_like(order).scatter_(0, order, at::arange(order.numel()));
  return {tokens.index_select(0, at::floor_divide(order, topk)).narrow(0, 0, rows), place};
}

Tensor unpermute(const Tensor& permuted, const Tensor& sorted, const Tensor& probs) {
  Tensor taken = f32(permuted).index({places(sorted, probs)});
  if (probs.defined()) taken = taken * f32(probs).unsqueeze(-1);
  return taken.sum(1);
}

std::tuple<Tensor, Tensor> unpermute_backward(const Tensor& permuted, const Tensor& grad, const Tensor& sorted,
                                              const Tensor& probs) {
  Tensor place = places(sorted, probs), g = f32(grad).unsqueeze(1);
  Tensor terms = probs.defined() ? g * f32(probs).unsqueeze(-1) : g;
  Tensor rows = at::zeros(permuted.sizes(), at::kFloat);
  rows.index_put_({place.reshape(-1)}, terms.reshape({-1, permuted.size(1)}));
  if (!probs.defined()) return {rows, Tensor()};
  return {rows, (f32(permuted).index({place}) * g).sum(-1)};
}

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& ends, int64_t kind) {
  auto limits = read_ends(ends, x.size(kind == 0 ? 0 : 1));
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (size_t i = 0; i < limits.size(); i++) {
    int64_t count = limits[i] - begin;
    if (kind == 0) parts.push_back(at::mm(f32(x.narrow(0, begin, count)), f32(weight[i])));
    else parts.push_back(at::mm(f32(x.narrow(1, begin, count)), f32(weight.narrow(0, begin, count))));
    begin = limits[i];
  }
  return kind == 0 ? at::cat(parts) : at::stack(parts);
}

}  // namespace halsim::kernels
