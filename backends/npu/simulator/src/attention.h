// Ascend's fused attention: the calls that it accepts (phase one), and its results, including tiles and dead rows.
#pragma once
#include "opapi.h"

namespace halsim::attention {
using Ints = std::vector<int64_t>;

// pse_type: how pse changes the scores. sink: [N], a logit per head that takes part in the softmax; undefined for none.
enum PseType : int64_t { kMulAdd = 0, kAddMul = 1, kSlopes = 2, kSlopesOfRoots = 3 };
struct Added {
  int64_t pse_type = kAddMul;
  Tensor sink;
  Ints starts_q, starts_k;  // where the positions begin from which the library forms ALiBi's biases
};

// softmax(mask(scale * (q k^T + pse))) with dropout, times v; max and sum are [B,N,Sq,8] ([T,N,8] for TND).
Work forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pse, const Tensor& drop,
             const Tensor& padding, const Tensor& mask, const Ints& prefix, const Ints& lengths_q, const Ints& lengths_k,
             double scale, double keep, int64_t pre, int64_t next, int64_t heads, const std::string& layout,
             int64_t precise, int64_t mode, const std::string& softmax_layout, const Tensor& max, const Tensor& sum,
             const Tensor& out, const Added& added = {});

Work backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, const Tensor& pse,
              const Tensor& drop, const Tensor& padding, const Tensor& mask, const Tensor& max, const Tensor& sum,
              const Tensor& out, const Ints& prefix, const Ints& lengths_q, const Ints& lengths_k, double scale,
              double keep, int64_t pre, int64_t next, int64_t heads, const std::string& layout, int64_t precise,
              int64_t mode, const std::string& softmax_layout, const Tensor& dq, const Tensor& dk, const Tensor& dv,
              const Tensor& dpse, const Added& added = {}, const Tensor& dsink = {});
}  // namespace halsim::attention
