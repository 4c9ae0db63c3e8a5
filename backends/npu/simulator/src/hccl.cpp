// HCCL between the processes of one machine, over shared memory. The root information is the name of a segment. A
// collective is a task on its stream: ranks announce the collective that they run (a mismatch is refused; a device
// would hang), then transfer it in chunks, reducing in rank order in the dtype of the data. Messages between two ranks,
// and collectives with uneven counts, use mailboxes. A wait that exceeds the timeout ends with error 507048 and names
// the missing ranks.
#include <hccl/hccl.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "collectives.h"
#include "constraints.h"
#include "reduce.h"
#include "runtime.h"
#include "shared_memory.h"

using halsim::Announcement;
using halsim::Deadline;
using halsim::fail;
using halsim::Segment;

// The buffers of collectives with uneven counts, which older headers declare as constant.
#ifdef HALSIM_RECENT_HEADERS
using UnequalBuffer = void*;
#else
using UnequalBuffer = const void*;
#endif

namespace {

struct Communicator {
  std::unique_ptr<Segment> segment;
  std::string name;
  int64_t timeout_ms;
  std::mutex collective;  // collectives run one at a time, even on different streams
  std::mutex error_mutex;
  HcclResult error = HCCL_SUCCESS;  // the first error; error_text is its text
  std::string error_text;

  // Stores the error text that fail() has just recorded on this thread, and returns the stream's error code.
  int broken(HcclResult code, int stream_code) {
    std::lock_guard<std::mutex> lock(error_mutex);
    if (error == HCCL_SUCCESS) error = code, error_text = halsim::recent_error();
    return stream_code;
  }
};
using Shared = std::shared_ptr<Communicator>;

std::mutex registry_mutex;
std::map<HcclComm, Shared>& registry() {
  static auto* all = new std::map<HcclComm, Shared>;
  return *all;
}
Shared find(HcclComm handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto entry = registry().find(handle);
  return entry == registry().end() ? nullptr : entry->second;
}

int64_t seconds(const char* variable, int64_t otherwise) {
  const char* text = getenv(variable);
  int64_t value = text ? atoll(text) : otherwise;
  return value > 0 ? value : 24 * 3600;  // 0 means no timeout
}

size_t item_size(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64: return 8;
    default: return 0;
  }
}

// As constraints.csv calls the dtype.
std::string name(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return "int8";
    case HCCL_DATA_TYPE_INT16: return "int16";
    case HCCL_DATA_TYPE_INT32: return "int32";
    case HCCL_DATA_TYPE_INT64: return "int64";
    case HCCL_DATA_TYPE_FP16: return "float16";
    case HCCL_DATA_TYPE_BFP16: return "bfloat16";
    case HCCL_DATA_TYPE_FP32: return "float32";
    default: return "data type " + std::to_string(type);
  }
}

template <size_t count>
bool listed(HcclDataType type, const char* const (&names)[count]) {
  return std::find(names, names + count, name(type)) != names + count;
}

HcclResult refuse(HcclResult code, const char* what) {
  fail(code, "%s", what);
  return code;
}

// The refusals that are known before anything runs.
HcclResult check(const char* call, const Shared& comm, HcclDataType type, const void* buffer, size_t bytes,
                 const HcclReduceOp* reducing = nullptr) {
  std::string where = call;
  if (!comm) return refuse(HCCL_E_PTR, (where + ": not a communicator").c_str());
  if (!item_size(type)) return refuse(HCCL_E_NOT_SUPPORT, (where + ": data type " + std::to_string(type)).c_str());
  if (reducing && (*reducing < HCCL_REDUCE_SUM || *reducing > HCCL_REDUCE_MIN))
    return refuse(HCCL_E_NOT_SUPPORT, (where + ": the reductions are sum, prod, max and min").c_str());
  if (reducing && !listed(type, halsim::limits::hccl_reduced))
    return refuse(HCCL_E_NOT_SUPPORT, (where + ": no reduction of " + name(type)).c_str());
  if (reducing && *reducing == HCCL_REDUCE_PROD && !listed(type, halsim::limits::hccl_product))
    return refuse(HCCL_E_NOT_SUPPORT, (where + ": no product of " + name(type)).c_str());
  if (bytes && !halsim::is_device_memory(buffer, bytes))
    return refuse(HCCL_E_PARA, (where + ": the buffer is not in device memory").c_str());
  return HCCL_SUCCESS;
}

int timed_out(Communicator& comm, const char* call) {
  std::string ranks;
  for (uint32_t r : comm.segment->absent()) ranks += " " + std::to_string(r);
  fail(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, "EI0002: %s on %s: timeout after %ld ms; ranks that did not arrive:%s", call,
              comm.name.c_str(), static_cast<long>(comm.timeout_ms), ranks.empty() ? " (a message)" : ranks.c_str());
  return comm.broken(HCCL_E_TIMEOUT, ACL_ERROR_RT_FFTS_PLUS_TIMEOUT);
}

// Runs in a task: checks for faults, exchanges the announcements, then runs `body`, which returns false when a wait
// timed out. Returns an acl error code.
template <typename Body>
int run(const char* call, const Shared& comm, const Announcement& what, const Body& body) {
  std::lock_guard<std::mutex> one_at_a_time(comm->collective);
  if (halsim::fault("slow_rank"))
    std::this_thread::sleep_for(std::chrono::milliseconds(halsim::setting("slow_rank_ms", 100)));
  Segment& segment = *comm->segment;
  if (halsim::fault("hccl_timeout")) return timed_out(*comm, call);
  Deadline deadline(comm->timeout_ms);
  segment.announcement(segment.rank()) = what;
  if (!segment.barrier(deadline)) return timed_out(*comm, call);
  for (uint32_t r = 0; r < segment.size(); r++)
    if (!(segment.announcement(r) == what)) {
      fail(ACL_ERROR_RT_FFTS_PLUS_EXCEPTION, "%s: rank %u calls another collective, or this one with another "
                  "count, data type, reduction or root; the device would hang", call, r);
      return comm->broken(HCCL_E_PARA, ACL_ERROR_RT_FFTS_PLUS_EXCEPTION);
    }
  return body(segment, deadline) ? ACL_SUCCESS : timed_out(*comm, call);
}

template <typename Body>
HcclResult collective(const char* call, const Shared& comm, Announcement what, aclrtStream stream, Body body) {
  auto task = [=]() -> int { return run(call, comm, what, body); };
  int code = halsim::submit(stream, task, halsim::Wait::may_block);
  return code ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

struct Transfer {
  bool sending;
  uint32_t peer;
  char* data;
  size_t left;
};

// Runs all transfers to completion; for each pair of ranks and direction, in the given order.
bool move_all(Segment& segment, std::vector<Transfer> all, const Deadline& deadline) {
  for (size_t i = 0; i < all.size(); i++)  // a message to oneself
    for (size_t j = 0; j < all.size(); j++)
      if (all[i].peer == segment.rank() && all[j].peer == segment.rank() && all[i].sending && !all[j].sending && all[i].left &&
          all[i].left == all[j].left) {
        memmove(all[j].data, all[i].data, all[i].left);
        all[i].left = all[j].left = 0;
        break;
      }
  for (int turns = 0;;) {
    bool moved = false, done = true;
    std::vector<char> blocked(2 * segment.size());
    for (Transfer& t : all) {
      if (!t.left) continue;
      done = false;
      char& busy = blocked[2 * t.peer + t.sending];
      if (busy) continue;
      size_t n = t.sending ? segment.push(t.peer, t.data, t.left) : segment.pull(t.peer, t.data, t.left);
      t.data += n, t.left -= n;
      moved |= n > 0;
      busy = t.left > 0;
    }
    if (done) return true;
    if (moved) turns = 0;
    if (deadline.passed()) return false;
    if (!moved) halsim::relax(turns);
  }
}

// Messages between HcclGroupStart and HcclGroupEnd of this thread, by communicator and stream.
struct Group {
  int depth = 0;
  std::map<std::pair<Shared, aclrtStream>, std::vector<Transfer>> messages;
};
thread_local Group group;

HcclResult messages(const char* call, const Shared& comm, std::vector<Transfer> transfers, aclrtStream stream) {
  for (const Transfer& t : transfers)
    if (t.peer >= comm->segment->size()) return refuse(HCCL_E_PARA, "a message to a rank that does not exist");
  if (group.depth) {
    auto& waiting = group.messages[{comm, stream}];
    waiting.insert(waiting.end(), transfers.begin(), transfers.end());
    return HCCL_SUCCESS;
  }
  auto task = [=]() -> int {
    if (halsim::fault("hccl_timeout")) return timed_out(*comm, call);
    bool fine = move_all(*comm->segment, transfers, Deadline(comm->timeout_ms));
    return fine ? ACL_SUCCESS : timed_out(*comm, call);
  };
  return halsim::submit(stream, task, halsim::Wait::may_block) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

// Calls step(offset, items) over `count` items in chunks of `room`, stopping at the first failure.
template <typename Step>
bool in_chunks(uint64_t count, size_t room, Step step) {
  for (uint64_t at = 0; at < count; at += room)
    if (!step(at, std::min<uint64_t>(room, count - at))) return false;
  return true;
}

enum Kind : uint32_t {
  kAllReduce = 1, kBroadcast, kAllGather, kReduceScatter, kReduceScatterV, kReduce, kBarrier,
  kFusedGather, kFusedReduceScatter  // of operators that also compute
};

bool gather(Segment& segment, const Deadline& deadline, const void* send, void* recv, uint64_t count, size_t item) {
  return in_chunks(count, halsim::kSlotBytes / item, [&](uint64_t at, uint64_t n) {
    memcpy(segment.slot(segment.rank()), static_cast<const char*>(send) + at * item, n * item);
    if (!segment.barrier(deadline)) return false;
    for (uint32_t r = 0; r < segment.size(); r++)
      memcpy(static_cast<char*>(recv) + (r * count + at) * item, segment.slot(r), n * item);
    return segment.barrier(deadline);
  });
}

bool reduce_scatter(Segment& segment, const Deadline& deadline, const void* send, void* recv, uint64_t count,
                    HcclDataType type, HcclReduceOp op) {
  size_t item = item_size(type), room = halsim::kSlotBytes / item / segment.size();  // a piece for every rank
  return in_chunks(count, room, [&](uint64_t at, uint64_t n) {
    for (uint32_t r = 0; r < segment.size(); r++)
      memcpy(segment.slot(segment.rank()) + r * room * item, static_cast<const char*>(send) + (r * count + at) * item,
             n * item);
    if (!segment.barrier(deadline)) return false;
    char* out = static_cast<char*>(recv) + at * item;
    memcpy(out, segment.slot(0) + segment.rank() * room * item, n * item);
    for (uint32_t r = 1; r < segment.size(); r++)
      halsim::reduce(out, segment.slot(r) + segment.rank() * room * item, n, type, op);
    return segment.barrier(deadline);
  });
}

Shared named(const std::string& group) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  for (auto& [handle, comm] : registry())
    if (comm->name == group) return comm;
  return nullptr;
}

HcclResult reduce_to(const char* call, Kind kind, void* send, void* recv, uint64_t count, HcclDataType type,
                     HcclReduceOp op, uint32_t root, HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  size_t item = item_size(type);
  if (auto bad = check(call, comm, type, send, count * item, &op)) return bad;
  bool mine = kind == kAllReduce || comm->segment->rank() == root;
  if (mine)
    if (auto bad = check(call, comm, type, recv, count * item)) return bad;
  return collective(call, comm, {kind, (uint32_t)type, (uint32_t)op, root, count}, stream,
                    [=](Segment& segment, const Deadline& deadline) {
    return in_chunks(count, halsim::kSlotBytes / item, [&](uint64_t at, uint64_t n) {
      memcpy(segment.slot(segment.rank()), static_cast<char*>(send) + at * item, n * item);
      if (!segment.barrier(deadline)) return false;
      if (mine) {
        char* out = static_cast<char*>(recv) + at * item;
        memcpy(out, segment.slot(0), n * item);
        for (uint32_t r = 1; r < segment.size(); r++) halsim::reduce(out, segment.slot(r), n, type, op);
      }
      return segment.barrier(deadline);
    });
  });
}

HcclResult join(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig* config, HcclComm* out) {
  std::string name(root->internal, strnlen(root->internal, sizeof root->internal)), why;
  int64_t wait = halsim::setting("hccl_timeout_ms", 0);
  Segment* segment = Segment::join(name, rank, ranks, wait ? wait : seconds("HCCL_CONNECT_TIMEOUT", 120) * 1000, &why);
  if (!segment) return refuse(HCCL_E_TIMEOUT, ("EI0006: HcclCommInitRootInfo: " + why).c_str());
  auto comm = std::make_shared<Communicator>();
  comm->segment.reset(segment);
  comm->name = config && config->hcclCommName[0] ? config->hcclCommName : name;
  int64_t execute = seconds("HCCL_EXEC_TIMEOUT", 1836);
#ifdef HALSIM_RECENT_HEADERS
  if (config && config->hcclExecTimeOut > 0) execute = config->hcclExecTimeOut;
#endif
  comm->timeout_ms = wait ? wait : execute * 1000;
  std::lock_guard<std::mutex> lock(registry_mutex);
  *out = comm.get();
  registry()[*out] = comm;
  return HCCL_SUCCESS;
}

}  // namespace

namespace halsim {

uint32_t ranks_of(const std::string& group) {
  Shared comm = named(group);
  return comm ? comm->segment->size() : 0;
}

int gather_in_task(const char* call, const std::string& group, const void* send, void* recv, uint64_t count,
                   HcclDataType type) {
  Shared comm = named(group);
  if (!comm) return fail(ACL_ERROR_RT_FFTS_PLUS_EXCEPTION, "%s: group %s was destroyed", call, group.c_str());
  return run(call, comm, {kFusedGather, (uint32_t)type, 0, 0, count}, [&](Segment& segment, const Deadline& deadline) {
    return gather(segment, deadline, send, recv, count, item_size(type));
  });
}

int reduce_scatter_in_task(const char* call, const std::string& group, const void* send, void* recv, uint64_t count,
                           HcclDataType type) {
  Shared comm = named(group);
  if (!comm) return fail(ACL_ERROR_RT_FFTS_PLUS_EXCEPTION, "%s: group %s was destroyed", call, group.c_str());
  return run(call, comm, {kFusedReduceScatter, (uint32_t)type, HCCL_REDUCE_SUM, 0, count},
             [&](Segment& segment, const Deadline& deadline) {
    return reduce_scatter(segment, deadline, send, recv, count, type, HCCL_REDUCE_SUM);
  });
}

}  // namespace halsim

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  static std::atomic<int> count{0};
  auto now = std::chrono::system_clock::now().time_since_epoch().count();
  memset(root, 0, sizeof *root);
  snprintf(root->internal, sizeof root->internal, "/halsim-%d-%d-%ld", getpid(), count++, static_cast<long>(now));
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return join(ranks, root, rank, nullptr, comm);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  return join(ranks, root, rank, config, comm);
}
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_COMM_NAME + 1; }
HcclResult HcclCommDestroy(HcclComm handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry().erase(handle);  // running tasks keep it alive
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  Shared comm = find(handle);
  if (!comm) return refuse(HCCL_E_PTR, "HcclGetRankSize: not a communicator");
  *size = comm->segment->size();
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  Shared comm = find(handle);
  if (!comm) return refuse(HCCL_E_PTR, "HcclGetRankId: not a communicator");
  *rank = comm->segment->rank();
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm handle, char* name) {
  Shared comm = find(handle);
  if (!comm) return refuse(HCCL_E_PTR, "HcclGetCommName: not a communicator");
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", comm->name.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  Shared comm = find(handle);
  *error = HCCL_SUCCESS;
  if (!comm) return HCCL_SUCCESS;
  std::lock_guard<std::mutex> lock(comm->error_mutex);
  *error = comm->error;
  if (*error != HCCL_SUCCESS) fail(*error, "%s", comm->error_text.c_str());  // the caller asks for the text next
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult code) {
  static thread_local std::string text;
  text = "HCCL error " + std::to_string(code) + ": " + halsim::recent_error();
  return text.c_str();
}

HcclResult HcclAllReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
  return reduce_to("HcclAllReduce", kAllReduce, send, recv, count, type, op, 0, comm, stream);
}
HcclResult HcclReduce(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
  return reduce_to("HcclReduce", kReduce, send, recv, count, type, op, root, comm, stream);
}

HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
  Shared comm = find(handle);
  size_t item = item_size(type);
  if (auto bad = check("HcclBroadcast", comm, type, data, count * item)) return bad;
  if (root >= comm->segment->size()) return refuse(HCCL_E_PARA, "HcclBroadcast: the root does not exist");
  return collective("HcclBroadcast", comm, {kBroadcast, (uint32_t)type, 0, root, count}, stream,
                    [=](Segment& segment, const Deadline& deadline) {
    return in_chunks(count, halsim::kSlotBytes / item, [&](uint64_t at, uint64_t n) {
      char* mine = static_cast<char*>(data) + at * item;
      if (segment.rank() == root) memcpy(segment.slot(root), mine, n * item);
      if (!segment.barrier(deadline)) return false;
      if (segment.rank() != root) memcpy(mine, segment.slot(root), n * item);
      return segment.barrier(deadline);
    });
  });
}

HcclResult HcclAllGather(void* send, void* recv, uint64_t count, HcclDataType type, HcclComm handle,
                         aclrtStream stream) {
  Shared comm = find(handle);
  size_t item = item_size(type);
  if (auto bad = check("HcclAllGather", comm, type, send, count * item)) return bad;
  if (auto bad = check("HcclAllGather", comm, type, recv, count * item * comm->segment->size())) return bad;
  return collective("HcclAllGather", comm, {kAllGather, (uint32_t)type, 0, 0, count}, stream,
                    [=](Segment& segment, const Deadline& deadline) {
    return gather(segment, deadline, send, recv, count, item);
  });
}

HcclResult HcclReduceScatter(void* send, void* recv, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  size_t item = item_size(type);
  if (auto bad = check("HcclReduceScatter", comm, type, recv, count * item, &op)) return bad;
  if (auto bad = check("HcclReduceScatter", comm, type, send, count * item * comm->segment->size())) return bad;
  return collective("HcclReduceScatter", comm, {kReduceScatter, (uint32_t)type, (uint32_t)op, 0, count}, stream,
                    [=](Segment& segment, const Deadline& deadline) {
    return reduce_scatter(segment, deadline, send, recv, count, type, op);
  });
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  if (!comm) return refuse(HCCL_E_PTR, "HcclBarrier: not a communicator");
  return collective("HcclBarrier", comm, {kBarrier, 0, 0, 0, 0}, stream, [](Segment&, const Deadline&) { return true; });
}

HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  if (auto bad = check("HcclSend", comm, type, data, count * item_size(type))) return bad;
  return messages("HcclSend", comm, {{true, peer, static_cast<char*>(data), count * item_size(type)}}, stream);
}
HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  if (auto bad = check("HcclRecv", comm, type, data, count * item_size(type))) return bad;
  return messages("HcclRecv", comm, {{false, peer, static_cast<char*>(data), count * item_size(type)}}, stream);
}
// Messages of a group are under way together, in any order of senders and receivers.
HcclResult HcclGroupStart() {
  group.depth++;
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
  if (group.depth == 0) return refuse(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
  if (--group.depth) return HCCL_SUCCESS;
  auto all = std::move(group.messages);
  group.messages.clear();
  for (auto& [place, transfers] : all)
    if (auto bad = messages("HcclGroupEnd", place.first, transfers, place.second)) return bad;
  return HCCL_SUCCESS;
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  std::vector<Transfer> transfers;
  for (uint32_t i = 0; i < count; i++) {
    size_t bytes = items[i].count * item_size(items[i].dataType);
    if (auto bad = check("HcclBatchSendRecv", comm, items[i].dataType, items[i].buf, bytes)) return bad;
    transfers.push_back({items[i].sendRecvType == HCCL_SEND, items[i].remoteRank, static_cast<char*>(items[i].buf), bytes});
  }
  return messages("HcclBatchSendRecv", comm, transfers, stream);
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_at, HcclDataType send_type,
                         const void* recv, const void* recv_counts, const void* recv_at, HcclDataType recv_type,
                         HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  if (auto bad = check("HcclAlltoAllV", comm, send_type, send, 0)) return bad;
  if (auto bad = check("HcclAlltoAllV", comm, recv_type, recv, 0)) return bad;
  auto numbers = [](const void* list, uint32_t r) { return static_cast<const uint64_t*>(list)[r]; };
  std::vector<Transfer> transfers;
  for (uint32_t r = 0; r < comm->segment->size(); r++) {
    auto add = [&](bool sending, const void* base, const void* counts, const void* at, size_t item) {
      char* data = static_cast<char*>(const_cast<void*>(base)) + numbers(at, r) * item;
      transfers.push_back({sending, r, data, numbers(counts, r) * item});
      return !transfers.back().left || halsim::is_device_memory(data, transfers.back().left);
    };
    if (!add(true, send, send_counts, send_at, item_size(send_type)) || !add(false, recv, recv_counts, recv_at, item_size(recv_type)))
      return refuse(HCCL_E_PARA, "HcclAlltoAllV: a piece is not in device memory");
  }
  return messages("HcclAlltoAllV", comm, transfers, stream);
}
HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* recv,
                        uint64_t recv_count, HcclDataType recv_type, HcclComm handle, aclrtStream stream) {
  Shared comm = find(handle);
  if (!comm) return refuse(HCCL_E_PTR, "HcclAlltoAll: not a communicator");
  uint32_t size = comm->segment->size();
  std::vector<uint64_t> sends(size, send_count), recvs(size, recv_count), send_at, recv_at;
  for (uint32_t r = 0; r < size; r++) send_at.push_back(r * send_count), recv_at.push_back(r * recv_count);
  return HcclAlltoAllV(send, sends.data(), send_at.data(), send_type, recv, recvs.data(), recv_at.data(), recv_type,
                       handle, stream);
}

HcclResult HcclScatter(void* send, void* recv, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
  Shared comm = find(handle);
  size_t bytes = count * item_size(type);
  if (auto bad = check("HcclScatter", comm, type, recv, bytes)) return bad;
  std::vector<Transfer> transfers{{false, root, static_cast<char*>(recv), bytes}};
  if (comm->segment->rank() == root) {
    if (auto bad = check("HcclScatter", comm, type, send, bytes * comm->segment->size())) return bad;
    for (uint32_t r = 0; r < comm->segment->size(); r++)
      transfers.push_back({true, r, static_cast<char*>(send) + r * bytes, bytes});
  }
  return messages("HcclScatter", comm, transfers, stream);
}
HcclResult HcclAllGatherV(UnequalBuffer send_, uint64_t send_count, UnequalBuffer recv_, const void* recv_counts, const void* recv_at,
                          HcclDataType type, HcclComm handle, aclrtStream stream) {
  void *send = const_cast<void*>(send_), *recv = const_cast<void*>(recv_);
  Shared comm = find(handle);
  if (!comm) return refuse(HCCL_E_PTR, "HcclAllGatherV: not a communicator");
  std::vector<uint64_t> counts(comm->segment->size(), send_count), at(comm->segment->size(), 0);
  return HcclAlltoAllV(send, counts.data(), at.data(), type, recv, recv_counts, recv_at, type, handle, stream);
}
HcclResult HcclReduceScatterV(UnequalBuffer send_, const void* counts, const void* starts, UnequalBuffer recv_,
                              uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  void *send = const_cast<void*>(send_), *recv = const_cast<void*>(recv_);
  Shared comm = find(handle);
  size_t item = item_size(type);
  if (auto bad = check("HcclReduceScatterV", comm, type, recv, count * item, &op)) return bad;
  auto numbers = [&](const void* list) {
    auto* first = static_cast<const uint64_t*>(list);
    return std::vector<uint64_t>(first, first + comm->segment->size());
  };
  std::vector<uint64_t> sizes = numbers(counts), offsets = numbers(starts);
  if (sizes[comm->segment->rank()] != count)
    return refuse(HCCL_E_PARA, "HcclReduceScatterV: the number of elements that this rank receives is not that of its part");
  for (size_t r = 0; r < sizes.size(); r++)
    if (auto bad = check("HcclReduceScatterV", comm, type, static_cast<char*>(send) + offsets[r] * item, sizes[r] * item))
      return bad;
  uint64_t total = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  return collective("HcclReduceScatterV", comm, {kReduceScatterV, (uint32_t)type, (uint32_t)op, 0, total}, stream,
                    [=](Segment& segment, const Deadline& deadline) {
    size_t room = halsim::kSlotBytes / item / segment.size();
    return in_chunks(*std::max_element(sizes.begin(), sizes.end()), room, [&](uint64_t at, uint64_t n) {
      auto left = [&](uint32_t r) { return at < sizes[r] ? std::min(n, sizes[r] - at) : 0; };
      for (uint32_t r = 0; r < segment.size(); r++)
        memcpy(segment.slot(segment.rank()) + r * room * item, static_cast<char*>(send) + (offsets[r] + at) * item, left(r) * item);
      if (!segment.barrier(deadline)) return false;
      if (uint64_t mine = left(segment.rank())) {
        char* out = static_cast<char*>(recv) + at * item;
        memcpy(out, segment.slot(0) + segment.rank() * room * item, mine * item);
        for (uint32_t r = 1; r < segment.size(); r++)
          halsim::reduce(out, segment.slot(r) + segment.rank() * room * item, mine, type, op);
      }
      return segment.barrier(deadline);
    });
  });
}
// torch_npu 2.6 links against it for devices of one process, which has one device here.
HcclResult HcclCommInitAll(uint32_t, int32_t*, HcclComm*) {
  return refuse(HCCL_E_NOT_SUPPORT, "HcclCommInitAll is not simulated");
}

}  // extern "C"
