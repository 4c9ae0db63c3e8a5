#include "launch.h"
#include "philox.cpp"

extern "C" uint32_t aclrtlaunch_hal_philox(uint32_t blocks, void* stream, void* x, void* y, uint64_t seed,
                                           uint64_t offset, uint64_t first, uint64_t s0, uint64_t s1, uint64_t s2,
                                           uint64_t n0, uint64_t n1, uint64_t n2, uint64_t length, uint32_t kind,
                                           float threshold, float scale) {
  return ascendc_host::launch("hal_philox", blocks, stream, [=] {
    hal_philox(static_cast<uint8_t*>(x), static_cast<uint8_t*>(y), seed, offset, first, s0, s1, s2, n0, n1, n2, length,
               kind, threshold, scale);
  });
}
