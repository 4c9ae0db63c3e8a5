// Devices and their memory: internal to libascendcl.
#pragma once
#include <cstddef>
#include <string>

namespace halsim {
constexpr int kDevices = 64;  // an upper bound; the setting "devices" gives the number (default 8, one Atlas 800)
int device_count();
int current_device();  // -1 when this thread has chosen none
int allocate(void** address, size_t bytes, int device);
int release(void* address);
size_t memory_limit();
size_t memory_used(int device);
int synchronize_device(int device);
}  // namespace halsim
