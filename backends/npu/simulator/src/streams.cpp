// Streams and events. A stream is an ordered queue. An idle stream runs a task immediately in the calling thread;
// otherwise, or when the task may block on another process, its worker thread runs it. The first failing task stops the
// stream: every later submission and synchronisation returns its error and text, as after a device exception. So does
// a stream that waits for an event of the stopped one.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "device.h"
#include "runtime.h"

using halsim::fail;
using Clock = std::chrono::steady_clock;

namespace {

thread_local int running_device = 0;
std::atomic<uint32_t> op_wait_seconds{0};  // 0: a stream waits for an event without a limit

// Why a stream stopped. Streams that wait for an event of a stopped stream stop for the same reason.
struct Failure {
  std::atomic<int> code{0};
  std::string text;  // written before code
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;   // generations submitted
  uint64_t completed = 0;  // the newest generation reached by its stream
  Clock::time_point when{};
  std::shared_ptr<Failure> source;  // of the stream that recorded it last
  halsim::SharedGraph graph;        // in which it was recorded last; null outside of a capture
  aclrtStream stream = nullptr;     // that recorded it in the graph
};

struct Stream {
  int device = 0;
  int id = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<halsim::Task> queue;
  bool busy = false;
  bool closing = false;
  int error = 0;
  std::string error_text;
  std::shared_ptr<Failure> failure = std::make_shared<Failure>();
  std::thread worker;
  halsim::SharedGraph graph;  // that is captured

  bool idle() const { return !busy && queue.empty(); }

  void run_one(std::unique_lock<std::mutex>& lock, const halsim::Task& task) {
    busy = true;
    int code = error;
    if (!code) {
      lock.unlock();
      running_device = device;
      code = task();
      lock.lock();
      if (code && !error) {
        error = code;
        error_text = failure->text = halsim::recent_error();
        failure->code = code;
      }
    }
    busy = false;
    changed.notify_all();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return closing || (!busy && !queue.empty()); });
      if (queue.empty()) return;
      if (busy) continue;
      halsim::Task task = std::move(queue.front());
      queue.pop_front();
      run_one(lock, task);
    }
  }

  int report() const { return error ? fail(error, "stream %d stopped: %s", id, error_text.c_str()) : 0; }
};

std::mutex all_mutex;
std::set<Stream*>& all_streams() {
  static auto* streams = new std::set<Stream*>;
  return *streams;
}

struct Stopped {
  int error = 0;
  std::string text;
};
Stopped stopped[halsim::kDevices];  // guarded by all_mutex; the initial state of new streams

Stream* default_stream(int device) {
  static Stream* streams[halsim::kDevices];
  std::lock_guard<std::mutex> lock(all_mutex);
  if (!streams[device]) {
    streams[device] = new Stream;
    streams[device]->device = device;
    streams[device]->error = stopped[device].error, streams[device]->error_text = stopped[device].text;
    all_streams().insert(streams[device]);
  }
  return streams[device];
}

Stream* find(aclrtStream handle) {
  if (!handle) return default_stream(halsim::current_device() < 0 ? 0 : halsim::current_device());
  std::lock_guard<std::mutex> lock(all_mutex);
  auto* stream = static_cast<Stream*>(handle);
  return all_streams().count(stream) ? stream : nullptr;
}

int create(aclrtStream* out) {
  if (halsim::current_device() < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtCreateStream: no device set");
  auto* stream = new Stream;
  stream->device = halsim::current_device();
  std::lock_guard<std::mutex> lock(all_mutex);
  static int next_id = 0;
  stream->id = ++next_id;
  stream->error = stopped[stream->device].error, stream->error_text = stopped[stream->device].text;
  all_streams().insert(stream);
  *out = stream;
  return ACL_SUCCESS;
}

int synchronize(Stream* stream, int64_t timeout_ms) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  if (stream->graph) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the host waits for stream %d, which is captured", stream->id);
  auto idle = [stream] { return stream->idle(); };
  if (timeout_ms < 0)
    stream->changed.wait(lock, idle);
  else if (!stream->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), idle))
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d not idle after %ld ms", stream->id, (long)timeout_ms);
  return stream->report();
}

// Forced destruction does not wait: queued tasks are dropped, and a task that waits for a missing peer keeps its thread
// and its stream until the process ends.
int destroy(aclrtStream handle, bool force) {
  Stream* stream = find(handle);
  if (!stream || !handle) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyStream: not a stream");
  {
    std::lock_guard<std::mutex> lock(all_mutex);
    all_streams().erase(stream);
  }
  bool stuck;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (force) stream->queue.clear();
    stuck = force && stream->busy;
    stream->closing = true;
  }
  stream->changed.notify_all();
  if (stuck && stream->worker.joinable()) stream->worker.detach();
  if (stuck) return ACL_SUCCESS;
  if (stream->worker.joinable()) stream->worker.join();
  delete stream;
  return ACL_SUCCESS;
}

// A stream waits for an event of a captured one: from then on it is part of the same graph.
int join_graph(Stream* stream, aclrtStream handle, const Event& event) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (!event.graph->origin)
    return fail(ACL_ERROR_RT_EVENT_CAPTURED, "stream %d waits for an event that was recorded into a graph", stream->id);
  if (stream->graph && stream->graph != event.graph)
    return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "stream %d waits for an event of another graph", stream->id);
  stream->graph = event.graph;
  if (handle != event.graph->origin) event.graph->streams.insert(handle);
  event.graph->unjoined.erase(event.stream);
  return ACL_SUCCESS;
}

// Handles share ownership: an event may be destroyed while tasks that refer to it are still queued.
using SharedEvent = std::shared_ptr<Event>;
const SharedEvent& event_of(aclrtEvent handle) { return *static_cast<SharedEvent*>(handle); }

}  // namespace

namespace halsim {

int task_device() { return running_device; }

int submit(aclrtStream handle, Task task, Wait wait) {
  Stream* stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "not a stream of this process: %p", handle);
  if (fault("stream")) {
    task = [] { return fail(ACL_ERROR_RT_AICORE_EXCEPTION, "injected fault: AI core exception"); };
  }
  std::unique_lock<std::mutex> lock(stream->mutex);
  if (stream->error) return stream->report();
  if (stream->graph) {
    stream->graph->steps.push_back({std::move(task), wait});
    if (handle != stream->graph->origin) stream->graph->unjoined.insert(handle);
    return ACL_SUCCESS;
  }
  if (stream->idle() && wait == Wait::never) {
    stream->run_one(lock, task);
    return ACL_SUCCESS;  // the failure of a task is reported at synchronisation, as on the device
  }
  stream->queue.push_back(std::move(task));
  if (!stream->worker.joinable()) stream->worker = std::thread([stream] { stream->work(); });
  stream->changed.notify_all();
  return ACL_SUCCESS;
}

int begin_capture(aclrtStream handle) {
  Stream* stream = find(handle);
  if (!stream || !handle) return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (stream->graph) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured already", stream->id);
  stream->graph = std::make_shared<Graph>();
  stream->graph->origin = handle;
  return ACL_SUCCESS;
}

SharedGraph captured_by(aclrtStream handle) {
  Stream* stream = find(handle);
  if (!stream) return nullptr;
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->graph;
}

int end_capture(aclrtStream handle, SharedGraph* out) {
  SharedGraph graph = captured_by(handle);
  if (!graph || graph->origin != handle)
    return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the capture of a stream ends that was not begun on it");
  graph->streams.insert(handle);
  graph->origin = nullptr;
  for (aclrtStream captured : graph->streams)
    if (Stream* stream = find(captured)) {
      std::lock_guard<std::mutex> lock(stream->mutex);
      stream->graph = nullptr;
    }
  if (!graph->unjoined.empty())
    return fail(ACL_ERROR_RT_STREAM_UNJOINED, "%zu streams of a graph have work that no other waits for", graph->unjoined.size());
  *out = graph;
  return ACL_SUCCESS;
}

int stop_device(int device, int code, const std::string& text) {
  std::lock_guard<std::mutex> all(all_mutex);
  stopped[device] = {code, text};
  for (Stream* stream : all_streams()) {
    if (stream->device != device) continue;
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (!stream->error) stream->error = code, stream->error_text = text;
  }
  return fail_again(code, text);
}

int synchronize_device(int device) {
  std::set<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(all_mutex);
    streams = all_streams();
  }
  int result = ACL_SUCCESS;
  for (Stream* stream : streams)
    if (stream->device == device)
      if (int code = synchronize(stream, -1)) result = code;
  return result;
}

}  // namespace halsim

extern "C" {

aclError aclrtCreateStream(aclrtStream* stream) { return create(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return create(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { return destroy(stream, false); }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return destroy(stream, true); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout) {
  halsim::count(halsim::Counter::host_waits);
  Stream* stream = find(handle);
  return stream ? synchronize(stream, timeout) : fail(ACL_ERROR_RT_PARAM_INVALID, "not a stream: %p", handle);
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  Stream* stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "not a stream: %p", handle);
  std::lock_guard<std::mutex> lock(stream->mutex);
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return stream->report();
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  Stream* stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_PARAM_INVALID, "not a stream: %p", handle);
  *id = stream->id;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new SharedEvent(std::make_shared<Event>());
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<SharedEvent*>(event);
  return ACL_SUCCESS;
}

aclError aclrtSetOpWaitTimeout(uint32_t seconds) {
  op_wait_seconds = seconds;
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  SharedEvent event = event_of(handle);
  uint64_t generation;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    generation = ++event->recorded;
    if (Stream* source = find(stream)) event->source = source->failure;
    event->graph = halsim::captured_by(stream), event->stream = stream;
  }
  return halsim::submit(stream, [event, generation] {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->completed = std::max(event->completed, generation);  // a graph records the same generation again
    event->when = Clock::now();
    event->changed.notify_all();
    return ACL_SUCCESS;
  });
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }  // a new record starts a new generation

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  SharedEvent event = event_of(handle);
  uint64_t generation;
  std::shared_ptr<Failure> source;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    generation = event->recorded;
    source = event->source;
    if (event->graph) return join_graph(find(stream), stream, *event);  // steps of a graph run in order
    if (event->completed >= generation) return ACL_SUCCESS;
  }
  return halsim::submit(
      stream,
      [event, generation, source] {
        std::unique_lock<std::mutex> lock(event->mutex);
        auto reached = [&] { return event->completed >= generation; };
        uint32_t limit = op_wait_seconds;
        Clock::time_point end = Clock::now() + std::chrono::seconds(limit);
        while (!event->changed.wait_for(lock, std::chrono::milliseconds(20), reached)) {
          if (source && source->code) return halsim::fail_again(source->code, source->text);
          if (limit && Clock::now() > end)
            return fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "a stream waited %u s for an event: timeout", limit);
        }
        return static_cast<int>(ACL_SUCCESS);
      },
      halsim::Wait::may_block);
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout) {
  halsim::count(halsim::Counter::host_waits);
  SharedEvent event = event_of(handle);
  std::unique_lock<std::mutex> lock(event->mutex);
  if (event->graph) return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the host waits for an event of a captured stream");
  uint64_t generation = event->recorded;
  auto reached = [&] { return event->completed >= generation; };
  if (timeout < 0)
    event->changed.wait(lock, reached);
  else if (!event->changed.wait_for(lock, std::chrono::milliseconds(timeout), reached))
    return fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "event not reached after %d ms", timeout);
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeEvent(aclrtEvent event) { return aclrtSynchronizeEventWithTimeout(event, -1); }

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  SharedEvent event = event_of(handle);
  std::lock_guard<std::mutex> lock(event->mutex);
  bool done = event->completed >= event->recorded;
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  SharedEvent event = event_of(handle);
  std::lock_guard<std::mutex> lock(event->mutex);
  bool done = event->completed >= event->recorded;
  *status = done ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  SharedEvent first = event_of(start), last = event_of(end);
  if (!first->completed || !last->completed)
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "elapsed time of an event that was not recorded");
  *ms = std::chrono::duration<float, std::milli>(last->when - first->when).count();
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* timestamp) {
  auto since = event_of(handle)->when.time_since_epoch();
  *timestamp = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  return ACL_SUCCESS;
}

}  // extern "C"
