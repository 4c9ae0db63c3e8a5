// Collectives inside of a task, for operators that communicate while they compute. A group is named as by
// HcclGetCommName. Its ranks must announce the same operators in the same order, as with HCCL's own collectives.
#pragma once
#include <hccl/hccl.h>

#include <cstdint>
#include <string>

namespace halsim {
// The number of ranks; 0: this process has no communicator of that name.
uint32_t ranks_of(const std::string& group);
// Both wait for the other ranks, and return an acl error code whose text fail() has recorded. `call` is the operator.
// recv: `count` items of each rank in the order of ranks.
int gather_in_task(const char* call, const std::string& group, const void* send, void* recv, uint64_t count,
                   HcclDataType type);
// send: `count` items for each rank; recv: the sum of those for this one.
int reduce_scatter_in_task(const char* call, const std::string& group, const void* send, void* recv, uint64_t count,
                           HcclDataType type);
}  // namespace halsim
