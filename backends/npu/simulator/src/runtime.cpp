// Error text, settings, faults and device memory. Memory is host memory from posix_memalign, counted per device
// against a limit, registered by address so that a host pointer given to a device call is refused, and filled with
// 0xFF (NaN in every float format) when the setting "poison" is on.
#include "runtime.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace halsim {
namespace {
thread_local std::string last_error;
std::mutex mutex;
std::map<std::string, int64_t>& settings() {
  static auto* values = new std::map<std::string, int64_t>;  // never destroyed, because threads use it during exit
  return *values;
}
struct Block {
  size_t bytes;
  int device;
};
std::map<uintptr_t, Block>& blocks() {
  static auto* values = new std::map<uintptr_t, Block>;
  return *values;
}
size_t used[kDevices];
std::atomic<int64_t> counters[static_cast<int>(Counter::count)];
}  // namespace

std::atomic<bool> deterministic{false};

void count(Counter counter) { counters[static_cast<int>(counter)]++; }

int fail(int code, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  last_error = "[HAL simulator] " + std::string(text) + " (error " + std::to_string(code) + ")";
  return code;
}

std::string recent_error() { return last_error; }

int fail_again(int code, const std::string& text) {
  last_error = text;
  return code;
}

int64_t setting(const char* key, int64_t otherwise) {
  std::lock_guard<std::mutex> lock(mutex);
  auto entry = settings().find(key);
  return entry == settings().end() ? otherwise : entry->second;
}

bool fault(const char* name, Strike strike) {
  std::lock_guard<std::mutex> lock(mutex);
  auto entry = settings().find(std::string("fault.") + name);
  if (entry == settings().end() || entry->second == 0) return false;
  if (entry->second == 1 && strike == Strike::lasting) return true;
  return --entry->second == 0;
}

size_t memory_limit() {
  int64_t limit = setting("memory_bytes");
  return limit > 0 ? static_cast<size_t>(limit) : size_t{61} << 30;  // what npu-smi shows on an Ascend 910B3
}

size_t memory_used(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return used[device];
}

int allocate(void** address, size_t bytes, int device) {
  if (!address || !bytes) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc: size %zu", bytes);
  size_t limit = memory_limit();
  bool refuse = fault("oom", Strike::lasting);
  bool poison = setting("poison") != 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    refuse = refuse || used[device] + bytes > limit;
    if (!refuse) used[device] += bytes;
  }
  if (!refuse && posix_memalign(address, 512, bytes)) {
    refuse = true;
    std::lock_guard<std::mutex> lock(mutex);
    used[device] -= bytes;
  }
  if (refuse) {
    *address = nullptr;
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d out of memory: %zu bytes asked, %zu of %zu in use", device,
                bytes, memory_used(device), limit);
  }
  if (poison) memset(*address, 0xFF, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  blocks()[reinterpret_cast<uintptr_t>(*address)] = {bytes, device};
  return ACL_SUCCESS;
}

int release(void* address) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto entry = blocks().find(reinterpret_cast<uintptr_t>(address));
    if (entry == blocks().end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: %p was not allocated", address);
    used[entry->second.device] -= entry->second.bytes;
    blocks().erase(entry);
  }
  free(address);
  return ACL_SUCCESS;
}

bool is_device_memory(const void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  uintptr_t start = reinterpret_cast<uintptr_t>(address);
  auto after = blocks().upper_bound(start);
  if (after == blocks().begin()) return false;
  --after;
  return start - after->first <= after->second.bytes && bytes <= after->second.bytes - (start - after->first);
}

}  // namespace halsim

// Called from Python: SETTINGS of simulator/__init__.py, and fault.<name> (n = fail on the n-th).
extern "C" void halsim_set(const char* key, int64_t value) {
  std::lock_guard<std::mutex> lock(halsim::mutex);
  halsim::settings()[key] = value;
}

// Called from Python: COUNTERS of simulator/__init__.py, in the order of Counter.
extern "C" int64_t halsim_count(int counter) { return halsim::counters[counter]; }
