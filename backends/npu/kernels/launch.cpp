// Launches a kernel of HAL through torch_npu's queue of operators, so that it runs on the current stream after the
// operators that were called before it and the host does not wait. Built with the headers of the installed wheel.
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <cstdio>
#include <exception>

namespace {
// error: 256 bytes for the text of a failure. Returns 0 if the kernel was queued.
template <typename Launch>
int queue(const char* name, char* error, const Launch& launch) {
  try {
    void* stream = c10_npu::getCurrentNPUStream().stream(false);
    at_npu::native::OpCommand::RunOpApi(name, [=]() -> int { return static_cast<int>(launch(stream)); });
    return 0;
  } catch (const std::exception& failure) {
    snprintf(error, 256, "%s", failure.what());
    return 1;
  }
}

// What CANN generates for the kernels (aclrtlaunch_hal_philox.h, ...).
using Philox = uint32_t (*)(uint32_t blocks, void* stream, void* x, void* y, uint64_t seed, uint64_t offset,
                            uint64_t first, uint64_t s0, uint64_t s1, uint64_t s2, uint64_t n0, uint64_t n1,
                            uint64_t n2, uint64_t length, uint32_t kind, float threshold, float scale);
using AdamW = uint32_t (*)(uint32_t blocks, void* stream, void* table, uint64_t tensors, void* clip, float scale,
                           float decay, float beta1, float rest1, float beta2, float rest2, float rate,
                           float correction, float eps);
}  // namespace

extern "C" int hal_launch_philox(char* error, Philox launch, uint32_t blocks, void* x, void* y, uint64_t seed,
                                 uint64_t offset, uint64_t first, uint64_t s0, uint64_t s1, uint64_t s2, uint64_t n0,
                                 uint64_t n1, uint64_t n2, uint64_t length, uint32_t kind, float threshold,
                                 float scale) {
  return queue("hal_philox", error, [=](void* stream) {
    return launch(blocks, stream, x, y, seed, offset, first, s0, s1, s2, n0, n1, n2, length, kind, threshold, scale);
  });
}

extern "C" int hal_launch_adamw(char* error, AdamW launch, uint32_t blocks, void* table, uint64_t tensors, void* clip,
                                float scale, float decay, float beta1, float rest1, float beta2, float rest2,
                                float rate, float correction, float eps) {
  return queue("hal_adamw", error, [=](void* stream) {
    return launch(blocks, stream, table, tensors, clip, scale, decay, beta1, rest1, beta2, rest2, rate, correction,
                  eps);
  });
}
