// The operators that exist only on Ascend, implemented with ATen in float32, and random numbers from a counter hash.
#include "kernels.h"

namespace halsim::kernels {
namespace {

Tensor f32(const Tensor& x) { return x.to(at::kFloat); }

// SplitMix64 of (seed, offset, element): uniform in [0, 1) with 24 bits, the same for the same counter.
Tensor random_bits(int64_t count, int64_t seed, int64_t offset) {
  Tensor result = at::empty({count}, at::kFloat);
  float* out = result.data_ptr<float>();
  uint64_t base = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(offset) * 0xD1B54A32D192ED03ull;
  for (int64_t e = 0; e < count; e++) {
    uint64_t z = base + static_cast<uint64_t>(e + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    out[e] = static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-24f;
  }
  return result;
}

Tensor normal_density(const Tensor& x) { return at::exp(x * x * -0.5) * 0.3989422804014327; }

Tensor gelu_slope(const Tensor& x, bool tanh) {
  if (!tanh) return (at::erf(x * M_SQRT1_2) + 1) * 0.5 + x * normal_density(x);
  Tensor t = at::tanh((x + x * x * x * 0.044715) * 0.7978845608028654);
  return (t + 1) * 0.5 + x * 0.5 * (1 - t * t) * (x * x * (3 * 0.044715) + 1) * 0.7978845608028654;
}

std::tuple<Tensor, Tensor> halves(const Tensor& x, int64_t dim) {
  auto parts = x.chunk(2, dim);
  TORCH_CHECK(x.size(dim) % 2 == 0, "dimension ", dim, " of size ", x.size(dim), " does not split in two");
  return {f32(parts[0]), f32(parts[1])};
}

Tensor rotate_half(const Tensor& x) {
  auto parts = x.chunk(2, -1);
  return at::cat({-parts[1], parts[0]}, -1);
}
Tensor rotate_pairs(const Tensor& x) {
  Tensor pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}
Tensor rotate(const Tensor& x, int64_t mode) { return mode ? rotate_pairs(x) : rotate_half(x); }

}  // namespace

int64_t cores() { return std::max<int64_t>(1, setting("cores", 3)); }
int64_t tile() { return std::max<int64_t>(1, setting("tile", 32)); }

Tensor sum(const Tensor& x, const std::vector<int64_t>& dims, bool keep, at::ScalarType dtype) {
  const at::ScalarType wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  if (dims.empty() || x.dim() == 0) return at::sum(x, dims, keep, wide);
  const int64_t dim = dims[0], size = x.size(dim), block = std::max<int64_t>(1, (size + cores() - 1) / cores());
  Tensor total = at::sum(x.narrow(dim, 0, std::min(block, size)), dims, keep, wide);
  for (int64_t begin = block; begin < size; begin += block)
    total = total + at::sum(x.narrow(dim, begin, std::min(block, size - begin)), dims, keep, wide);
  return total;
}

Tensor product(const Tensor& a, const Tensor& b) {
  const int64_t size = a.size(-1), step = tile();
  Tensor total = at::matmul(a.narrow(-1, 0, std::min(step, size)), b.narrow(-2, 0, std::min(step, size)));
  for (int64_t begin = step; begin < size; begin += step) {
    const int64_t count = std::min(step, size - begin);
    total = total + at::matmul(a.narrow(-1, begin, count), b.narrow(-2, begin, count));
  }
  return total;
}

std::optional<c10::string_view> rounding(int64_t mode) {
  if (mode == 0) return std::nullopt;
  return mode == 1 ? "trunc" : "floor";
}

std::vector<int64_t> dims(const Tensor& self, const std::vector<int64_t>& given) {
  if (!given.empty()) return given;
  std::vector<int64_t> all(self.dim());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

OptionalTensor optional(const Tensor& value) { return value.defined() ? OptionalTensor(value) : std::nullopt; }

c10::List<OptionalTensor> indices(const std::vector<Tensor>& given) {
  c10::List<OptionalTensor> result;
  for (const Tensor& index : given) {
    // torch_npu passes an empty tensor in place of a full slice.
    bool slice = !index.defined() || (index.numel() == 0 && index.dim() == 1);
    result.push_back(slice ? std::nullopt : OptionalTensor(index));
  }
  return result;
}

void write_each(const std::vector<Tensor>& targets, const std::vector<Tensor>& values) {
  TORCH_CHECK(targets.size() == values.size(), "a list of ", values.size(), " results for ", targets.size(), " tensors");
  for (size_t i = 0; i < values.size(); i++) write(targets[i], values[i]);
}

void write_dynamic(const aclTensor* raw, const Tensor& target, const Tensor& value) {
  TORCH_CHECK(target.numel() >= value.numel(), "the result has ", value.numel(), " elements, room for ", target.numel());
  target.flatten().narrow(0, 0, value.numel()).copy_(value.flatten());
  const_cast<aclTensor*>(raw)->result_dims = value.sizes().vec();
}

Tensor fast_gelu(const Tensor& x) { return f32(x) * at::sigmoid(f32(x) * 1.702); }
Tensor fast_gelu_backward(const Tensor& grad, const Tensor& x) {
  Tensor s = at::sigmoid(f32(x) * 1.702);
  return f32(grad) * (s + f32(x) * s * (1 - s) * 1.702);
}

Tensor swiglu(const Tensor& x, int64_t dim) {
  auto [a, b] = halves(x, dim);
  return at::silu(a) * b;
}
Tensor swiglu_backward(const Tensor& grad, const Tensor& x, int64_t dim) {
  auto [a, b] = halves(x, dim);
  Tensor g = f32(grad), s = at::sigmoid(a);
  return at::cat({g * b * s * (1 + a * (1 - s)), g * a * s}, dim);
}

std::tuple<Tensor, Tensor> geglu(const Tensor& x, int64_t dim, bool tanh, bool left) {
  auto [a, b] = halves(x, dim);
  Tensor gelu = at::gelu(left ? a : b, tanh ? "tanh" : "none");
  return {gelu * (left ? b : a), gelu};
}
Tensor geglu_backward(const Tensor& grad, const Tensor& x, const Tensor& gelu, int64_t dim, bool tanh, bool left) {
  auto [a, b] = halves(x, dim);
  Tensor g = f32(grad), active = left ? a : b, plain = left ? b : a;
  Tensor d_active = g * plain * gelu_slope(active, tanh), d_plain = g * f32(gelu);
  return left ? at::cat({d_active, d_plain}, dim) : at::cat({d_plain, d_active}, dim);
}

Tensor scatter(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduction) {
  if (reduction == 0) return at::scatter(self, dim, index, source);
  return at::scatter(self, dim, index, source, reduction == 1 ? "add" : "multiply");
}
Tensor scatter_value(const Tensor& self, int64_t dim, const Tensor& index, const at::Scalar& value, int64_t reduction) {
  if (reduction == 0) return at::scatter(self, dim, index, value);
  return at::scatter(self, dim, index, value, reduction == 1 ? "add" : "multiply");
}

// For half inputs, the dtype of the output selects a float result.
Tensor softmax(const Tensor& x, int64_t dim, const Tensor& out) { return at::softmax(x, dim, out.scalar_type()); }
Tensor log_softmax(const Tensor& x, int64_t dim, const Tensor& out) {
  return at::log_softmax(x, dim, out.scalar_type());
}

// The trailing dimensions that `shape` names, counted from the end.
std::vector<int64_t> tail_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> tail(shape.size());
  std::iota(tail.begin(), tail.end(), -static_cast<int64_t>(shape.size()));
  return tail;
}

Three layer_norm(const Tensor& x, const std::vector<int64_t>& shape, const Tensor& weight, const Tensor& bias, double eps) {
  auto tail = tail_of(shape);
  Tensor mean = f32(x).mean(tail, true), centred = f32(x) - mean;
  Tensor rstd = at::rsqrt(centred.square().mean(tail, true) + eps), y = centred * rstd;
  if (weight.defined()) y = y * f32(weight);
  if (bias.defined()) y = y + f32(bias);
  return {y, mean, rstd};
}
Three layer_norm_backward(const Tensor& grad, const Tensor& x, const std::vector<int64_t>& shape, const Tensor& mean,
                          const Tensor& rstd, const Tensor& weight, const Tensor& bias, const std::vector<bool>& wanted) {
  auto tail = tail_of(shape);
  Tensor normal = (f32(x) - f32(mean)) * f32(rstd), g = f32(grad);
  Tensor gw = weight.defined() ? g * f32(weight) : g;
  Tensor dx = f32(rstd) * (gw - gw.mean(tail, true) - normal * (gw * normal).mean(tail, true));
  auto over_rows = [&](const Tensor& t) { return sum(t.reshape({-1, c10::multiply_integers(shape)}), {0}, false, at::kFloat).reshape(shape); };
  return {wanted.at(0) ? dx : Tensor(), wanted.at(1) ? over_rows(g * normal) : Tensor(), wanted.at(2) ? over_rows(g) : Tensor()};
}

Three ring_update(const Tensor& a, const Tensor& a_max, const Tensor& a_sum, const Tensor& b, const Tensor& b_max,
                  const Tensor& b_sum, const std::string& layout) {
  // ring.statistics of constraints.csv.
  for (const Tensor& x : {a_max, a_sum, b_max, b_sum})
    TORCH_CHECK(at::logical_and(x > 0, x == x.narrow(-1, 0, 1)).all().item<bool>(), "the eight numbers of each maximum and sum must be equal and positive");
  Tensor max = at::maximum(a_max, b_max);
  Tensor a_scaled = a_sum * at::exp(a_max - max), b_scaled = b_sum * at::exp(b_max - max), sum = a_scaled + b_scaled;
  auto share = [&](const Tensor& scaled) {
    Tensor one = (scaled / sum).narrow(-1, 0, 1);
    return layout == "SBH" ? one.permute({2, 0, 1, 3}) : one;
  };
  auto heads = [&](const Tensor& x) {
    return layout == "SBH" ? f32(x).reshape({x.size(0), x.size(1), max.size(1), -1}) : f32(x);
  };
  Tensor out = heads(a) * share(a_scaled) + heads(b) * share(b_scaled);
  return {out.reshape(a.sizes()), max, sum};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double eps) {
  auto tail = dims(gamma, {});
  for (auto& d : tail) d -= gamma.dim();
  Tensor rstd = at::rsqrt(f32(x).square().mean(tail, true) + eps);
  return {f32(x) * rstd * f32(gamma), rstd};
}
Three add_rms_norm(const Tensor& a, const Tensor& b, const Tensor& gamma, double eps) {
  Tensor sum = f32(a) + f32(b);
  auto [y, rstd] = rms_norm(sum, gamma, eps);
  return {y, rstd, sum};
}
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& rstd, const Tensor& gamma) {
  auto tail = dims(gamma, {});
  for (auto& d : tail) d -= gamma.dim();
  Tensor normal = f32(x) * rstd, g = f32(grad) * f32(gamma);
  Tensor dx = rstd * (g - normal * (g * normal).mean(tail, true));
  Tensor rows = (f32(grad) * normal).reshape({-1, gamma.numel()});
  return {dx, sum(rows, {0}, false, at::kFloat).reshape(gamma.sizes())};
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode) {
  return f32(x) * f32(cos) + rotate(f32(x), mode) * f32(sin);
}
Three rotary_backward(const Tensor& grad, const Tensor& cos, const Tensor& sin, const Tensor& x, int64_t mode) {
  Tensor g = f32(grad);
  // The transpose of a rotation is the rotation by the opposite angle.
  Tensor dx = g * f32(cos) - rotate(g * f32(sin), mode);
  if (!x.defined()) return {dx, {}, {}};
  return {dx, at::sum_to(g * f32(x), cos.sizes()), at::sum_to(g * rotate(f32(x), mode), sin.sizes())};
}

Tensor uniform(const Tensor& like, int64_t seed, int64_t offset) {
  return random_bits(like.numel(), seed, offset).reshape(like.sizes());
}
Tensor normal(const Tensor& like, int64_t seed, int64_t offset) {
  Tensor u = random_bits(2 * like.numel(), seed, offset).reshape({2, -1});  // Box-Muller
  return (at::sqrt(at::log1p(-u[0]) * -2) * at::cos(u[1] * (2 * M_PI))).reshape(like.sizes());
}

Tensor dropout_mask(const std::vector<int64_t>& shape, double p, int64_t seed, int64_t offset, const Tensor& mask) {
  int64_t count = c10::multiply_integers(shape);
  TORCH_CHECK(mask.numel() * 8 >= count, "a mask of ", mask.numel(), " bytes for ", count, " elements");
  Tensor keep = at::zeros({mask.numel() * 8}, at::kByte);
  keep.narrow(0, 0, count).copy_(random_bits(count, seed, offset).ge(p));
  Tensor weights = at::bitwise_left_shift(at::ones({8}, at::kLong), at::arange(8, at::kLong));
  return (keep.reshape({-1, 8}).to(at::kLong) * weights).sum(-1).reshape(mask.sizes());
}
Tensor unpack_bits(const Tensor& mask, int64_t count) {
  Tensor bits = at::bitwise_right_shift(mask.flatten().unsqueeze(-1), at::arange(8, at::kByte));
  return bits.bitwise_and(1).flatten().narrow(0, 0, count);
}
Tensor dropout_apply(const Tensor& x, const Tensor& mask, double p) {
  if (p == 1) return at::zeros_like(x);
  return f32(x) * unpack_bits(mask, x.numel()).reshape(x.sizes()) / (1 - p);
}
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, int64_t seed, int64_t offset, const Tensor& mask) {
  Tensor bits = dropout_mask({x.numel()}, p, seed, offset, mask);
  return {dropout_apply(x, bits.to(at::kByte), p), bits};
}

void foreach(const std::vector<Tensor>& x, const std::vector<Tensor>& out, const Each& f) {
  for (size_t i = 0; i < x.size(); i++) write(out.at(i), f(x[i]));
}
void foreach_pair(const std::vector<Tensor>& x, const std::vector<Tensor>& y, const std::vector<Tensor>& out, const Pair& f) {
  for (size_t i = 0; i < x.size(); i++) write(out.at(i), f(x[i], y.at(i)));
}
void foreach_scalars(const std::vector<Tensor>& x, const std::vector<at::Scalar>& y, const std::vector<Tensor>& out, const ByScalar& f) {
  for (size_t i = 0; i < x.size(); i++) write(out.at(i), f(x[i], y.at(i)));
}
void foreach_three(const std::vector<Tensor>& x, const std::vector<Tensor>& a, const std::vector<Tensor>& b,
                   const std::vector<at::Scalar>& value, const std::vector<Tensor>& out, const ThreeAndScalar& f) {
  for (size_t i = 0; i < x.size(); i++)
    write(out.at(i), f(x[i], a.at(i), b.at(i), value.size() == 1 ? value[0] : value.at(i)));
}
void foreach_norm(const std::vector<Tensor>& x, const at::Scalar& p, const std::vector<Tensor>& out) {
  for (size_t i = 0; i < x.size(); i++) {
    Tensor norm = p.toDouble() == 2 ? sum(f32(x[i]).flatten().square(), {0}, false, at::kFloat).sqrt()
                                    : at::linalg_vector_norm(f32(x[i]), p);
    write(out.at(i), norm.reshape(out[i].sizes()));
  }
}
void unscale(const std::vector<Tensor>& grads, const Tensor& found_inf, const Tensor& scale) {
  for (const Tensor& grad : grads) {
    if (!at::isfinite(grad).all().item<bool>()) found_inf.fill_(1);
    write(grad, grad * scale.reshape({}).to(grad.scalar_type()));
  }
}

void adamw(const Tensor& var, const Tensor& m, const Tensor& v, const Tensor& grad, double power1, double power2,
           double lr, double beta1, double beta2, double decay, double eps, bool amsgrad, bool maximize) {
  TORCH_CHECK(!amsgrad, "amsgrad is not simulated");
  Tensor g = maximize ? -f32(grad) : f32(grad);
  write(m, f32(m) * beta1 + g * (1 - beta1));
  write(v, f32(v) * beta2 + g * g * (1 - beta2));
  Tensor denominator = at::sqrt(f32(v) / (1 - power2)) + eps;
  write(var, f32(var) * (1 - lr * decay) - f32(m) / denominator * (lr / (1 - power1)));
}

Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale) {
  return at::softmax((f32(x) * scale).masked_fill(mask.to(at::kBool), -10000), -1);
}
Tensor scaled_masked_softmax_backward(const Tensor& grad, const Tensor& y, const Tensor& mask, double scale) {
  Tensor p = f32(y), g = f32(grad);
  Tensor dx = p * (g - (g * p).sum(-1, true)) * scale;
  return dx.masked_fill(mask.to(at::kBool), 0);
}

}  // namespace halsim::kernels
