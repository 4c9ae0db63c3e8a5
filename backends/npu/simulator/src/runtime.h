// Shared by the simulated libraries: error text, settings and faults, device memory, and in-order streams. An idle
// stream runs a task immediately in the caller's thread. A task that may wait for another process (a collective) runs
// in the stream's own thread, and later tasks are queued behind it, as on the device.
#pragma once
#include <acl/acl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

// The headers of older releases of torch_npu lack some types and error codes; these releases do not call the functions
// that take the types.
#if __has_include(<acl/acl_base_rt.h>)
#define HALSIM_RECENT_HEADERS
#endif
#ifndef ACL_ERROR_RT_STREAM_SYNC_TIMEOUT
#define ACL_ERROR_RT_STREAM_SYNC_TIMEOUT 507046
#define ACL_ERROR_RT_EVENT_SYNC_TIMEOUT 507047
#define ACL_ERROR_RT_FFTS_PLUS_TIMEOUT 507048
#define ACL_ERROR_RT_FFTS_PLUS_EXCEPTION 507049
#endif
#ifndef ACL_ERROR_RT_STREAM_CAPTURED
#define ACL_ERROR_RT_STREAM_UNJOINED 107025
#define ACL_ERROR_RT_STREAM_CAPTURED 107027
#define ACL_ERROR_RT_EVENT_CAPTURED 107028
#define ACL_ERROR_RT_STREAM_NOT_CAPTURED 107029
#define ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT 107031
#define ACL_ERROR_STREAM_CAPTURE_CONFLICT 107032
#endif

namespace halsim {

// Records the text for aclGetRecentErrMsg on this thread and returns `code`.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string recent_error();
int fail_again(int code, const std::string& text);  // with a text obtained from recent_error()

// Settings are plain numbers, written by halsim_set (ctypes) before or during a run; 0 when never set.
int64_t setting(const char* key, int64_t otherwise = 0);
// An armed fault fires once, at the n-th query; a lasting fault fires at every query from then on until it is disarmed.
enum class Strike { once, lasting };
bool fault(const char* name, Strike strike = Strike::once);

// What the process has asked of its devices so far, read by halsim_count (ctypes). A host read waits for the device and
// copies from it; a host wait is any call in which the host waits for a stream, an event or the device.
enum class Counter { operators, device_to_host, host_to_device, host_waits, deterministic, count };
void count(Counter counter);

// CANN's ACL_OPT_DETERMINISTIC: operators add in a fixed order. Those of the simulator always do.
extern std::atomic<bool> deterministic;

// A task returns an acl error code; a non-zero one stops the stream, as a device exception does.
using Task = std::function<int()>;
enum class Wait { never, may_block };
int submit(aclrtStream stream, Task task, Wait wait = Wait::never);
// A graph (aclmdlRI): what was submitted, in order, to a stream while it was captured and to the streams that waited for
// it. Nothing of it has run then.
struct Graph {
  struct Step {
    Task task;
    Wait wait;
  };
  std::vector<Step> steps;
  aclrtStream origin = nullptr;    // null once the capture has ended
  std::set<aclrtStream> streams;   // that are captured, besides the origin
  std::set<aclrtStream> unjoined;  // those with work that the others have not waited for
};
using SharedGraph = std::shared_ptr<Graph>;
int begin_capture(aclrtStream stream);
SharedGraph captured_by(aclrtStream stream);  // null: the stream is not captured
int end_capture(aclrtStream stream, SharedGraph* graph);

// Stops every stream of the device, including those created later, as a failed task stops its own. Returns `code`.
int stop_device(int device, int code, const std::string& text);

// The device of the stream whose task this thread runs (0 outside of a task).
int task_device();
// Saturation mode, which is on unless torch_npu selects INF/NaN mode: results beyond the range become the largest
// finite number and set the device's overflow flag, which stays set until it is cleared.
bool saturating();
void raise_overflow_flag();
void lower_overflow_flag();
bool overflow_flag();

// True if [address, address + bytes) lies inside one live device allocation.
bool is_device_memory(const void* address, size_t bytes);

}  // namespace halsim
