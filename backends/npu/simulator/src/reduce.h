// Reductions of HCCL's data types, one step at a time in the data's own dtype, as the device's in-line reduction
// rounds.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <hccl/hccl_types.h>

#include <algorithm>
#include <cstdint>

namespace halsim {

template <typename T, typename Wide>
void reduce_as(void* into, const void* from, size_t count, HcclReduceOp op) {
  T* a = static_cast<T*>(into);
  const T* b = static_cast<const T*>(from);
  auto each = [&](auto f) {
    for (size_t i = 0; i < count; i++) a[i] = static_cast<T>(f(static_cast<Wide>(a[i]), static_cast<Wide>(b[i])));
  };
  // A NaN on either side gives NaN in max and min as well; `x > y` alone would ignore it.
  switch (op) {
    case HCCL_REDUCE_SUM: return each([](Wide x, Wide y) { return x + y; });
    case HCCL_REDUCE_PROD: return each([](Wide x, Wide y) { return x * y; });
    case HCCL_REDUCE_MAX: return each([](Wide x, Wide y) { return x != x || x > y ? x : y; });
    case HCCL_REDUCE_MIN: return each([](Wide x, Wide y) { return x != x || x < y ? x : y; });
    default: return;
  }
}

// into[i] = op(into[i], from[i]); `type` is one of hccl.reduced in constraints.csv.
inline void reduce(void* into, const void* from, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t, int>(into, from, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t, int>(into, from, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t, int64_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t, int64_t>(into, from, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce_as<c10::Half, float>(into, from, count, op);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<c10::BFloat16, float>(into, from, count, op);
    case HCCL_DATA_TYPE_FP32: return reduce_as<float, float>(into, from, count, op);
    default: return;
  }
}

}  // namespace halsim
