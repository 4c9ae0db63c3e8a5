#include "adamw.cpp"
#include "launch.h"

extern "C" uint32_t aclrtlaunch_hal_adamw(uint32_t blocks, void* stream, void* table, uint64_t tensors, void* clip,
                                          float scale, float decay, float beta1, float rest1, float beta2, float rest2,
                                          float rate, float correction, float eps) {
  return ascendc_host::launch("hal_adamw", blocks, stream, [=] {
    hal_adamw(static_cast<uint8_t*>(table), tensors, static_cast<uint8_t*>(clip), scale, decay, beta1, rest1, beta2,
              rest2, rate, correction, eps);
  });
}
