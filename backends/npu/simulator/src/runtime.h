// What the simulated libraries share: error text, settings and faults, device memory, and in-order streams.
// A stream runs a task at once in the caller's thread while it is idle; a task that may wait for another process
// (a collective) goes to the stream's own thread, and what follows it queues behind it, as on the device.
#pragma once
#include <acl/acl.h>

#include <cstdint>
#include <functional>
#include <string>

namespace halsim {

// Remembers the text for aclGetRecentErrMsg on this thread and returns `code`.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string recent_error();
int fail_again(int code, const std::string& text);  // with a text that recent_error() gave

// Settings are plain numbers, written by halsim_set (ctypes) before or during a run; 0 when never set.
int64_t setting(const char* key, int64_t otherwise = 0);
// An armed fault strikes once, at the n-th question; one that lasts goes on until it is disarmed.
enum class Strike { once, lasting };
bool fault(const char* name, Strike strike = Strike::once);

// A task returns an acl error code; a non-zero one stops the stream, as a device exception does.
using Task = std::function<int()>;
enum class Wait { never, may_block };
int submit(aclrtStream stream, Task task, Wait wait = Wait::never);
// Stops every stream of the device, those not yet made included, as a failed task stops its own. Returns `code`.
int stop_device(int device, int code, const std::string& text);

// The device of the stream whose task this thread runs (0 outside of a task).
int task_device();
// Saturation mode, which torch_npu leaves on unless it selects INF/NaN mode: results beyond the range become the
// largest number and raise the device's overflow flag, which stays up until it is lowered.
bool saturating();
void raise_overflow_flag();
void lower_overflow_flag();
bool overflow_flag();

// True if [address, address + bytes) lies inside one live device allocation.
bool is_device_memory(const void* address, size_t bytes);

}  // namespace halsim
