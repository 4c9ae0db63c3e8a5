// Functions that torch_npu links against but that the simulator does not implement. The older operator path (aclop)
// accepts its argument objects, so that a call can be made, and then refuses the call by operator name. Shared
// handles and kernel binaries are refused; profiling reports are ignored.
#include <acl/acl_op_compiler.h>
#if __has_include(<profiling/aprof_pub.h>)  // not in torch_npu 2.6
#include <profiling/aprof_pub.h>
#else
#define VOID_PTR void*
using ProfCommandHandle = int (*)(unsigned, void*, unsigned);
#endif

#include <algorithm>
#include <cstring>

#include "aclop.h"
#include "device.h"
#include "runtime.h"

using halsim::fail;

namespace {
int refuse(const char* what) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s is not simulated", what);
}
halsim::AclopServer aclop_server = nullptr;
int set(aclopAttr* attr, const char* name, double value) {
  attr->values[name] = value;
  return ACL_SUCCESS;
}
}  // namespace

namespace halsim {
void serve_aclop(AclopServer server) { aclop_server = server; }
}  // namespace halsim

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{type, format, {dims, dims + count}, false};
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc* desc, aclMemType where) {
  desc->on_host = where != ACL_MEMTYPE_DEVICE;
  return ACL_SUCCESS;
}
aclError aclSetTensorConst(aclTensorDesc* desc, void*, size_t) {
  desc->on_host = true;
  return ACL_SUCCESS;
}
aclError aclSetTensorShape(aclTensorDesc* desc, int count, const int64_t* dims) {
  desc->dims.assign(dims, dims + count);
  return ACL_SUCCESS;
}
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (index >= desc->dims.size()) return fail(ACL_ERROR_INVALID_PARAM, "dimension %zu of %zu", index, desc->dims.size());
  *size = desc->dims[index];
  return ACL_SUCCESS;
}
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) { return new aclDataBuffer{data, size}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr* attr, const char* name, uint8_t value) { return set(attr, name, value); }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr* attr, const char* name, float value) { return set(attr, name, value); }
aclError aclopSetAttrInt(aclopAttr* attr, const char* name, int64_t value) { return set(attr, name, value); }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }

aclError aclopCompileAndExecute(const char* name, int inputs, const aclTensorDesc* const input_desc[],
                                const aclDataBuffer* const input_data[], int outputs,
                                const aclTensorDesc* const output_desc[], aclDataBuffer* const output_data[],
                                const aclopAttr* attr, aclopEngineType, aclopCompileType, const char*,
                                aclrtStream stream) {
  halsim::AclopArguments arguments{{input_desc, input_desc + inputs},
                                   {output_desc, output_desc + outputs},
                                   {input_data, input_data + inputs},
                                   {output_data, output_data + outputs},
                                   attr};
  int code = aclop_server ? aclop_server(name, arguments, stream) : halsim::kNotServed;
  if (code == halsim::kNotServed)
    code = fail(ACL_ERROR_OP_NOT_FOUND,
                "operator %s was asked for through aclopCompileAndExecute, and no aclnn operator of the table serves it: "
                "add it to operators.table, or call another torch operator",
                name);
  if (code == ACL_SUCCESS) return ACL_SUCCESS;
  // torch_npu calls this from its queue and silently drops the operators queued after a failure, on any stream.
  // Therefore the device is stopped, so that results that were never computed cannot be read.
  return halsim::stop_device(std::max(halsim::current_device(), 0), code, halsim::recent_error());
}
aclError aclopCompileAndExecuteV2(const char* name, int inputs, aclTensorDesc* input_desc[],
                                  aclDataBuffer* input_data[], int outputs, aclTensorDesc* output_desc[],
                                  aclDataBuffer* output_data[], aclopAttr* attr, aclopEngineType engine,
                                  aclopCompileType compile, const char* path, aclrtStream stream) {
  return aclopCompileAndExecute(name, inputs, input_desc, input_data, outputs, output_desc, output_data, attr, engine,
                                compile, path, stream);
}
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }
aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t room) {
  // "disable" selects the aclnn operators: there is no operator compiler here.
  if (option != ACL_OP_JIT_COMPILE || room < sizeof "disable") return refuse("aclGetCompileopt of this option");
  strcpy(value, "disable");
  return ACL_SUCCESS;
}

aclError aclmdlInitDump() { return refuse("aclmdlInitDump"); }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return refuse("aclmdlSetDump"); }
#ifdef HALSIM_RECENT_HEADERS
aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*) {
  return refuse("aclrtBinaryLoadFromData");
}
aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char*, aclrtFuncHandle*) {
  return refuse("aclrtBinaryGetFunction");
}
aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) { return refuse("aclrtGetFunctionAddr"); }
#endif
aclError aclrtMallocPhysical(aclrtDrvMemHandle*, size_t, const aclrtPhysicalMemProp*, uint64_t) {
  return refuse("aclrtMallocPhysical (expandable_segments)");
}
aclError aclrtFreePhysical(aclrtDrvMemHandle) { return refuse("aclrtFreePhysical"); }
aclError aclrtReserveMemAddress(void**, size_t, size_t, void*, uint64_t) { return refuse("aclrtReserveMemAddress"); }
aclError aclrtReleaseMemAddress(void*) { return refuse("aclrtReleaseMemAddress"); }
aclError aclrtMapMem(void*, size_t, size_t, aclrtDrvMemHandle, uint64_t) { return refuse("aclrtMapMem"); }
aclError aclrtUnmapMem(void*) { return refuse("aclrtUnmapMem"); }
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) {
  return refuse("aclrtMemExportToShareableHandle");
}
aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) {
  return refuse("aclrtMemImportFromShareableHandle");
}
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) {
  return refuse("aclrtMemSetPidToShareableHandle");
}
aclError aclrtProcessReport(int32_t) { return refuse("aclrtProcessReport"); }

int32_t rtDevBinaryRegister(const void*, void**) { return refuse("rtDevBinaryRegister"); }
int32_t rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) {
  return refuse("rtFunctionRegister");
}
int32_t rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return refuse("rtGetC2cCtrlAddr"); }
int32_t rtKernelLaunch(const void*, uint32_t, void*, uint32_t, void*, void*) { return refuse("rtKernelLaunch"); }

// Profiling reports: torch_npu reports every operator to these functions even when nothing is profiled.
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
int32_t MsprofReportApi(uint32_t, const struct MsprofApi*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const VOID_PTR, uint32_t) { return 0; }
uint64_t MsprofSysCycleTime(void) { return 0; }

}  // extern "C"
