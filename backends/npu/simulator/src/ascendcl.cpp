// AscendCL: start, devices, contexts, memory, copies and properties, on host memory.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "device.h"
#include "runtime.h"

using halsim::fail;

namespace {
thread_local int device = -1;
std::atomic<bool> inf_nan[halsim::kDevices], overflowed[halsim::kDevices];
int contexts[halsim::kDevices];  // a context is the address of its device's slot

int check_device(int32_t id, const char* call) {
  if (id >= 0 && id < halsim::device_count()) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_INVALID_DEVICEID, "%s: device %d, this machine has %d", call, id, halsim::device_count());
}

void count_copy(aclrtMemcpyKind kind) {
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST) halsim::count(halsim::Counter::device_to_host);
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE) halsim::count(halsim::Counter::host_to_device);
}

int check_copy(const void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy: %zu bytes into %zu", bytes, room);
  bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if (from_device && !halsim::is_device_memory(src, bytes))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy kind %d: source %p is not device memory", kind, src);
  if (to_device && !halsim::is_device_memory(dst, bytes))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy kind %d: destination %p is not device memory", kind, dst);
  return ACL_SUCCESS;
}
}  // namespace

namespace halsim {
// As in CANN, ASCEND_RT_VISIBLE_DEVICES lists the devices of a process, up to the first number that is none.
int device_count() {
  int all = static_cast<int>(setting("devices", 8)), visible = 0;
  const char* listed = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (listed == nullptr) return all;
  for (char* end; visible < all; listed = end + 1, ++visible) {
    long id = std::strtol(listed, &end, 10);
    if (end == listed || id < 0 || id >= all) break;
    if (*end != ',') return visible + 1;
  }
  return visible;
}
int current_device() { return device; }
bool saturating() { return !inf_nan[task_device()]; }
void raise_overflow_flag() { overflowed[task_device()] = true; }
void lower_overflow_flag() { overflowed[task_device()] = false; }
bool overflow_flag() { return overflowed[task_device()]; }
}  // namespace halsim

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclGetRecentErrMsg() {
  static thread_local std::string text;
  text = halsim::recent_error();
  return text.c_str();
}
const char* aclrtGetSocName() { return "Ascend910B3"; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = halsim::device_count();
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t id) {
  if (int code = check_device(id, "aclrtSetDevice")) return code;
  device = id;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t id) { return check_device(id, "aclrtResetDevice"); }
aclError aclrtGetDevice(int32_t* id) {
  if (device < 0) return ACL_ERROR_RT_CONTEXT_NULL;  // a query, not an error: it records no error text
  *id = device;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetCurrentContext: this thread has set no device");
  *context = &contexts[device];
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(static_cast<int32_t>(static_cast<int*>(context) - contexts));
}
aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t*, int32_t* active) {
  *active = id == device;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  halsim::count(halsim::Counter::host_waits);
  return device < 0 ? 0 : halsim::synchronize_device(device);
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t from, int32_t to) {
  *can = from != to;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = 20; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = 40; return ACL_SUCCESS;
    default: return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclGetDeviceCapability %d", static_cast<int>(info));
  }
}
#ifdef HALSIM_RECENT_HEADERS
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 20; return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 40; return ACL_SUCCESS;
    default: return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtGetDeviceInfo %d", static_cast<int>(attribute));
  }
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = type == ACL_RT_DEV_RES_CUBE_CORE ? 20 : 40;
  return ACL_SUCCESS;
}
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  return aclrtGetDeviceResLimit(device, type, value);
}
#endif
aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo*) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "no utilisation is measured");
}
// The release that torch_npu 2.11 and later are made for (compatibility.csv); torch_npu asks either function.
aclError aclsysGetVersionStr(char* package, char* version) {
  (void)package;
  strcpy(version, "9.1.0");
  return ACL_SUCCESS;
}
aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
  if (name == ACL_PKG_NAME_DRIVER) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  *version = {};
  strcpy(version->version, "9.1.0");
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetDeviceSatMode: this thread has set no device");
  inf_nan[device] = mode == ACL_RT_OVERFLOW_MODE_INFNAN;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
// CANN has a value per context and one of the process, which torch_npu sets alike.
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  if (option == ACL_OPT_DETERMINISTIC) halsim::deterministic = value != 0;
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtCtxSetSysParamOpt(option, value); }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = option == ACL_OPT_DETERMINISTIC && halsim::deterministic;
  return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = 0;
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "sharing device memory between processes");
}

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc: this thread has set no device");
  return halsim::allocate(address, bytes, device);
}
aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}
aclError aclrtFree(void* address) { return halsim::release(address); }
aclError aclrtMallocHost(void** address, size_t bytes) {
  return posix_memalign(address, 64, bytes ? bytes : 1) ? fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "host memory") : 0;
}
aclError aclrtFreeHost(void* address) {
  free(address);
  return ACL_SUCCESS;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* available, size_t* total) {
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo: this thread has set no device");
  *total = halsim::memory_limit();
  size_t used = halsim::memory_used(device);
  *available = used < *total ? *total - used : 0;
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  if (int code = check_copy(dst, room, src, bytes, kind)) return code;
  count_copy(kind);
  memmove(dst, src, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  if (int code = check_copy(dst, room, src, bytes, kind)) return code;
  count_copy(kind);
  return halsim::submit(stream, [=] {
    memmove(dst, src, bytes);
    return ACL_SUCCESS;
  });
}
aclError aclrtMemset(void* dst, size_t room, int32_t value, size_t bytes) {
  if (bytes > room || !halsim::is_device_memory(dst, bytes))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset: %zu bytes at %p", bytes, dst);
  memset(dst, value, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* dst, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  if (bytes > room || !halsim::is_device_memory(dst, bytes))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset: %zu bytes at %p", bytes, dst);
  return halsim::submit(stream, [=] {
    memset(dst, value, bytes);
    return ACL_SUCCESS;
  });
}

#ifdef HALSIM_RECENT_HEADERS
aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = halsim::is_device_memory(address, 1) ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
  attributes->location.id = device < 0 ? 0 : device;
  return ACL_SUCCESS;
}
#endif

}  // extern "C"
