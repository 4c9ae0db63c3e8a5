// The operators that multiply and communicate (MC2): aclnnAllGatherMatmul and aclnnMatmulReduceScatter. Both check the
// call when they are planned, and return the work, which waits for the other ranks of the group.
#pragma once
#include "opapi.h"

namespace halsim::mc2 {
// out [ranks * m, n] = gathered x1 [m, k] @ x2 [k, n]; gathered: [ranks * m, k], or no elements if it is not wanted.
Work all_gather_matmul(const Tensor& x1, const Tensor& x2, const Tensor& bias, const std::string& group,
                       int64_t gather_index, int64_t comm_turn, int64_t stream_mode, const Tensor& out,
                       const Tensor& gathered);
// out [m / ranks, n] = this rank's rows of the sum over the ranks of x1 [m, k] @ x2 [k, n].
Work matmul_reduce_scatter(const Tensor& x1, const Tensor& x2, const Tensor& bias, const std::string& group,
                           const std::string& reduction, int64_t comm_turn, int64_t stream_mode, const Tensor& out);
}  // namespace halsim::mc2
