// Graphs of captured streams (aclmdlRI), which torch_npu.npu.NPUGraph records and repeats. A graph runs as one task of the
// stream on which it is executed.
#include <map>
#include <mutex>

#include "runtime.h"

#ifdef HALSIM_RECENT_HEADERS

using halsim::fail;
using halsim::SharedGraph;

namespace {
thread_local aclmdlRICaptureMode mode_of_thread = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

// The graphs that exist, by handle. A graph has one handle from the begin of its capture on, which torch_npu compares.
std::mutex graphs_mutex;
std::map<aclmdlRI, SharedGraph>& graphs() {
  static auto* all = new std::map<aclmdlRI, SharedGraph>;
  return *all;
}
}  // namespace

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) { return halsim::begin_capture(stream); }

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* handle) {
  SharedGraph graph = halsim::captured_by(stream);
  *status = graph ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (handle) *handle = graph.get();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* handle) {
  SharedGraph graph;
  if (int code = halsim::end_capture(stream, &graph)) return code;
  std::lock_guard<std::mutex> lock(graphs_mutex);
  graphs()[*handle = graph.get()] = graph;
  return ACL_SUCCESS;
}

// torch_npu asks for the shapes of operators to be kept in a graph, for its profiler.
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(mode_of_thread, *mode);
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  SharedGraph graph;
  {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    auto entry = graphs().find(handle);
    if (entry == graphs().end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "not a graph: %p", handle);
    graph = entry->second;
  }
  auto wait = halsim::Wait::never;
  for (const auto& step : graph->steps)
    if (step.wait == halsim::Wait::may_block) wait = halsim::Wait::may_block;
  auto all = [graph] {
    for (const auto& step : graph->steps)
      if (int code = step.task()) return code;
    return static_cast<int>(ACL_SUCCESS);
  };
  return halsim::submit(stream, all, wait);
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
  std::lock_guard<std::mutex> lock(graphs_mutex);
  return graphs().erase(handle) ? ACL_SUCCESS : fail(ACL_ERROR_RT_PARAM_INVALID, "not a graph: %p", handle);
}

}  // extern "C"
#endif
