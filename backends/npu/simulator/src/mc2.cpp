#include "mc2.h"

#include <algorithm>
#include <mutex>

#include "collectives.h"
#include "constraints.h"

namespace halsim::mc2 {
namespace {

constexpr int kTiling = 561002;  // ACLNN_ERR_INNER_TILING_ERROR

void require(bool fine, const char* op, const std::string& text, int code = kInvalid) {
  if (!fine) throw Refusal{code, std::string(op) + ": " + text};
}

// As the library recognises it: the first dimension is the dense one.
bool transposed(const Tensor& x) {
  return x.stride(0) == 1 && x.stride(1) == x.size(0) && !(x.size(0) == 1 && x.size(1) == 1);
}

// The documents of both operators say that Atlas A2 takes one communication domain for all of them in a model.
void one_domain(const char* op, const std::string& group) {
  static std::mutex mutex;
  static auto* domain = new std::string;
  std::lock_guard<std::mutex> lock(mutex);
  if (domain->empty()) *domain = group;
  require(*domain == group, op, "Atlas A2 takes one group for the operators that multiply and communicate; " + *domain + " is in use", kTiling);
}

// Returns the number of ranks.
int64_t check(const char* op, const Tensor& x1, const Tensor& x2, const Tensor& bias, const std::string& group,
              int64_t comm_turn, int64_t stream_mode, const Tensor& out) {
  require(x1.dim() == 2 && x2.dim() == 2 && out.dim() == 2, op, "x1, x2 and output must have 2 dimensions");
  bool one = x1.scalar_type() == x2.scalar_type() && x1.scalar_type() == out.scalar_type();
  require(one, op, "x1, x2 and output must have one dtype");
  require(!bias.defined(), op, "a bias that is not zero is not supported");
  require(stream_mode == 1, op, "streamMode must be 1, got " + std::to_string(stream_mode));
  require(comm_turn == 0, op, "commTurn must be 0, got " + std::to_string(comm_turn));
  require(!transposed(x1), op, "x1 must not be transposed");
  require(x2.is_contiguous() || x2.t().is_contiguous(), op, "x2 must be contiguous or transposed");
  require(x1.size(1) == x2.size(0), op, "x1 " + c10::str(x1.sizes()) + " does not fit x2 " + c10::str(x2.sizes()));
  require(limits::mc2_summed_size.holds(x1.size(1)), op,
          "the k-axis must be in [256, 65535), got " + std::to_string(x1.size(1)));
  require(out.size(1) == x2.size(1), op, "output " + c10::str(out.sizes()) + " does not fit x2 " + c10::str(x2.sizes()));
  require(out.is_contiguous(), op, "output must be contiguous");
  int64_t ranks = ranks_of(group);
  require(ranks > 0, op, "there is no communicator of the name " + group, kTiling);
  bool listed = std::find(std::begin(limits::mc2_ranks), std::end(limits::mc2_ranks), ranks) != std::end(limits::mc2_ranks);
  require(listed, op, "Atlas A2 takes groups of 2, 4 and 8 ranks, got " + std::to_string(ranks), kTiling);
  one_domain(op, group);
  return ranks;
}

HcclDataType type_of(const Tensor& x) {
  return x.scalar_type() == at::kHalf ? HCCL_DATA_TYPE_FP16 : HCCL_DATA_TYPE_BFP16;
}

void finish(int code) {
  if (code) throw Stopped{code};
}

}  // namespace

Work all_gather_matmul(const Tensor& x1, const Tensor& x2, const Tensor& bias, const std::string& group,
                       int64_t gather_index, int64_t comm_turn, int64_t stream_mode, const Tensor& out,
                       const Tensor& gathered) {
  constexpr const char* op = "aclnnAllGatherMatmul";
  int64_t ranks = check(op, x1, x2, bias, group, comm_turn, stream_mode, out);
  require(gather_index == 0, op, "gatherIndex must be 0, got " + std::to_string(gather_index));
  std::vector<int64_t> rows{ranks * x1.size(0), x1.size(1)};
  require(out.size(0) == rows[0], op, "output must have " + std::to_string(rows[0]) + " rows", kTiling);
  require(!gathered.numel() || (gathered.sizes() == rows && gathered.is_contiguous()), op,
          "gatherOut must be " + c10::str(rows) + " and contiguous");
  if (!x1.numel()) return [] {};
  return [=] {
    Tensor all = gathered.numel() ? gathered : at::empty(rows, x1.options());
    Tensor mine = x1.contiguous();
    finish(gather_in_task(op, group, mine.data_ptr(), all.data_ptr(), mine.numel(), type_of(mine)));
    write(out, at::mm(all, x2));
  };
}

Work matmul_reduce_scatter(const Tensor& x1, const Tensor& x2, const Tensor& bias, const std::string& group,
                           const std::string& reduction, int64_t comm_turn, int64_t stream_mode, const Tensor& out) {
  constexpr const char* op = "aclnnMatmulReduceScatter";
  int64_t ranks = check(op, x1, x2, bias, group, comm_turn, stream_mode, out);
  require(reduction == "sum", op, "reduceOp must be sum, got " + reduction);
  require(x1.size(0) % ranks == 0, op, std::to_string(ranks) + " ranks do not divide m = " + std::to_string(x1.size(0)), kTiling);
  require(out.size(0) == x1.size(0) / ranks, op, "output must have m / ranks rows", kTiling);
  if (!x1.numel() || !x2.numel()) return [] {};
  return [=] {
    Tensor partial = at::mm(x1, x2);
    finish(reduce_scatter_in_task(op, group, partial.data_ptr(), out.data_ptr(), out.numel(), type_of(out)));
  };
}

}  // namespace halsim::mc2
