// Functions for the operator table beyond ATen: Ascend's own operators, and ATen calls with converted arguments.
#pragma once
#include "opapi.h"

namespace halsim::kernels {

// A device deals the rows of a sum to its cores and adds their partial sums, and visits the keys of attention and the
// summands of a product in tiles. The settings "cores" and "tile" are smaller than any device's, so that small tensors,
// too, are dealt and have an incomplete last block and tile.
int64_t cores();
int64_t tile();
// The sum over `dims`, the first of which is dealt to the cores in contiguous blocks; 16-bit floats are added in float.
// dtype: of the result, unless it is a 16-bit float.
Tensor sum(const Tensor& x, const std::vector<int64_t>& dims, bool keep, at::ScalarType dtype);
// a @ b of floats [..., n, k] and [..., k, m], with the sums over tiles of k added in order.
Tensor product(const Tensor& a, const Tensor& b);

// Ascend's rounding modes of DivMod: 0 true division, 1 trunc, 2 floor.
std::optional<c10::string_view> rounding(int64_t mode);
// Ascend takes an empty list for "all dimensions".
std::vector<int64_t> dims(const Tensor& self, const std::vector<int64_t>& given);
OptionalTensor optional(const Tensor& value);
c10::List<OptionalTensor> indices(const std::vector<Tensor>& given);

void write_each(const std::vector<Tensor>& targets, const std::vector<Tensor>& values);
// For results whose size depends on the data: fills the front of `target` and records the shape in `raw`.
void write_dynamic(const aclTensor* raw, const Tensor& target, const Tensor& value);

Tensor fast_gelu(const Tensor& x);
Tensor fast_gelu_backward(const Tensor& grad, const Tensor& x);
Tensor swiglu(const Tensor& x, int64_t dim);
Tensor swiglu_backward(const Tensor& grad, const Tensor& x, int64_t dim);
std::tuple<Tensor, Tensor> geglu(const Tensor& x, int64_t dim, bool tanh, bool left);
Tensor geglu_backward(const Tensor& grad, const Tensor& x, const Tensor& gelu, int64_t dim, bool tanh, bool left);
Tensor scatter(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduction);
Tensor scatter_value(const Tensor& self, int64_t dim, const Tensor& index, const at::Scalar& value, int64_t reduction);
Tensor softmax(const Tensor& x, int64_t dim, const Tensor& out);
Tensor log_softmax(const Tensor& x, int64_t dim, const Tensor& out);

using Three = std::tuple<Tensor, Tensor, Tensor>;
// Attention over two sets of keys from the results over each, [s, b, n d] (SBH) or [t, n, d] (TND), with their maxima and
// sums [b, n, s, 8] or [t, n, 8]: the result, and the maxima and sums of both.
Three ring_update(const Tensor& a, const Tensor& a_max, const Tensor& a_sum, const Tensor& b, const Tensor& b_max,
                  const Tensor& b_sum, const std::string& layout);
Three layer_norm(const Tensor& x, const std::vector<int64_t>& shape, const Tensor& weight, const Tensor& bias, double eps);
Three layer_norm_backward(const Tensor& grad, const Tensor& x, const std::vector<int64_t>& shape, const Tensor& mean,
                          const Tensor& rstd, const Tensor& weight, const Tensor& bias, const std::vector<bool>& wanted);
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double eps);
Three add_rms_norm(const Tensor& a, const Tensor& b, const Tensor& gamma, double eps);
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& rstd, const Tensor& gamma);
Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode);
Three rotary_backward(const Tensor& grad, const Tensor& cos, const Tensor& sin, const Tensor& x, int64_t mode);

// renorm 0: the largest of the softmax; 1: the softmax of the largest. The experts are int32, the lowest of equal ones
// first.
std::tuple<Tensor, Tensor> gating_top_k_softmax(const Tensor& x, int64_t k, int64_t renorm);
// Tokens repeated and sorted by their indices (stable), and for each repetition its place.
std::tuple<Tensor, Tensor> permute(const Tensor& tokens, const Tensor& indices, int64_t rows);
Tensor unpermute(const Tensor& permuted, const Tensor& sorted, const Tensor& probs);
std::tuple<Tensor, Tensor> unpermute_backward(const Tensor& permuted, const Tensor& grad, const Tensor& sorted,
                                              const Tensor& probs);
// The product of every group, whose ends are cumulative. kind 0: rows of x [m, k] with weight [e, k, n]; kind 2: columns
// of x [m, k] with rows of weight [k, n], one [m, n] per group.
Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& ends, int64_t kind);

Tensor uniform(const Tensor& like, int64_t seed, int64_t offset);
Tensor normal(const Tensor& like, int64_t seed, int64_t offset);
// Packed keep bits, least significant first; `mask` gives the length in bytes.
Tensor dropout_mask(const std::vector<int64_t>& shape, double p, int64_t seed, int64_t offset, const Tensor& mask);
Tensor unpack_bits(const Tensor& mask, int64_t count);
Tensor dropout_apply(const Tensor& x, const Tensor& mask, double p);
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, int64_t seed, int64_t offset, const Tensor& mask);

using Each = std::function<Tensor(const Tensor&)>;
using Pair = std::function<Tensor(const Tensor&, const Tensor&)>;
void foreach(const std::vector<Tensor>& x, const std::vector<Tensor>& out, const Each& f);
void foreach_pair(const std::vector<Tensor>& x, const std::vector<Tensor>& y, const std::vector<Tensor>& out, const Pair& f);
using ByScalar = std::function<Tensor(const Tensor&, const at::Scalar&)>;
using ThreeAndScalar = std::function<Tensor(const Tensor&, const Tensor&, const Tensor&, const at::Scalar&)>;
void foreach_scalars(const std::vector<Tensor>& x, const std::vector<at::Scalar>& y, const std::vector<Tensor>& out, const ByScalar& f);
// One scalar for all, or one per tensor.
void foreach_three(const std::vector<Tensor>& x, const std::vector<Tensor>& a, const std::vector<Tensor>& b,
                   const std::vector<at::Scalar>& value, const std::vector<Tensor>& out, const ThreeAndScalar& f);
void foreach_norm(const std::vector<Tensor>& x, const at::Scalar& p, const std::vector<Tensor>& out);
void unscale(const std::vector<Tensor>& grads, const Tensor& found_inf, const Tensor& scale);

// power1 and power2 are beta1 and beta2 raised to the number of this step.
void adamw(const Tensor& var, const Tensor& m, const Tensor& v, const Tensor& grad, double power1, double power2,
           double lr, double beta1, double beta2, double decay, double eps, bool amsgrad, bool maximize);
Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale);
Tensor scaled_masked_softmax_backward(const Tensor& grad, const Tensor& y, const Tensor& mask, double scale);

}  // namespace halsim::kernels
