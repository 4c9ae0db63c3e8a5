// What CANN generates for a kernel (aclrtlaunch_<kernel>), with the kernel compiled for the CPU.
#pragma once
#include <acl/acl.h>

#include "kernel_operator.h"
#include "runtime.h"

namespace ascendc_host {
// Queues the kernel on the stream, as one operator. `kernel` runs once for every core.
template <typename Kernel>
uint32_t launch(const char* name, uint32_t blocks, void* stream, const Kernel& kernel) {
  halsim::count(halsim::Counter::operators);
  if (halsim::deterministic) halsim::count(halsim::Counter::deterministic);
  return halsim::submit(stream, [=] {
    is_device_memory = halsim::is_device_memory;
    try {
      run(blocks, kernel);
      return static_cast<int>(ACL_SUCCESS);
    } catch (const Violation& violation) {
      return halsim::fail(507015, "%s: %s", name, violation.what());  // an exception of a vector core
    }
  });
}
}  // namespace ascendc_host
