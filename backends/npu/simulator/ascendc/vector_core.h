// A simulated vector core: its unified buffer, who may use which part of it, and what was written and is still read.
// kernel_operator.h describes what is refused.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <type_traits>

namespace ascendc_host {

constexpr uint32_t kUnifiedBuffer = 192 * 1024;  // of a vector core of Atlas A2
constexpr uint32_t kBlock = 32;                  // alignment of operands in the unified buffer

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void refuse(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Violation(text);
}

// Where a buffer of a queue is: with its producer (allocated), queued, or with its consumer (taken).
enum class Where : uint8_t { none, free, allocated, queued, taken };
enum class Pipe : uint8_t { vector, in, out };  // PIPE_V, PIPE_MTE2 (to the unified buffer), PIPE_MTE3 (from it)

// One vector core: its unified buffer, and per 32 bytes who wrote and read them last.
struct Core {
  uint32_t index, count;
  uint32_t used = 0;
  bool cache_cleaned = false;  // the cache of scalar reads from global memory
  uint32_t epoch = 1;  // barriers of the vector pipe so far
  alignas(64) uint8_t memory[kUnifiedBuffer];
  uint8_t written[kUnifiedBuffer] = {};  // per byte
  uint32_t wrote[kUnifiedBuffer / kBlock] = {}, read[kUnifiedBuffer / kBlock] = {};
  uint8_t owner[kUnifiedBuffer / kBlock] = {};  // 0: plain buffer, 1: queue in, 2: queue out
  Where where[kUnifiedBuffer / kBlock] = {};

  Core(uint32_t i, uint32_t n) : index(i), count(n) { memset(memory, 0xFF, sizeof memory); }

  uint32_t allocate(uint32_t bytes) {
    bytes = (bytes + kBlock - 1) / kBlock * kBlock;
    if (used + bytes > kUnifiedBuffer)
      refuse("InitBuffer: %u bytes beyond the %u of the unified buffer", used + bytes - kUnifiedBuffer, kUnifiedBuffer);
    return (used += bytes) - bytes;
  }

  void check_queue(const char* call, Pipe pipe, uint32_t block, bool writes) const {
    uint8_t queue = owner[block];
    Where w = where[block];
    bool right = pipe == Pipe::vector ? queue == 0 || (queue == 1 ? w == Where::taken && !writes : w == Where::allocated)
                 : pipe == Pipe::in   ? queue == 1 && w == Where::allocated
                                      : queue == 2 && w == Where::taken;
    if (!right)
      refuse("%s: the operand's buffer is not this pipe's now (VECIN: AllocTensor, copy, EnQue, DeQue, compute, FreeTensor; "
             "VECOUT: AllocTensor, compute, EnQue, DeQue, copy, FreeTensor)", call);
  }
  // Before an instruction: its sources were written, and by no instruction that may still run.
  void before_read(const char* call, Pipe pipe, uint32_t at, uint32_t bytes) {
    for (uint32_t i = at; i < at + bytes; i++)
      if (!written[i]) refuse("%s: reads byte %u of the unified buffer, which nothing has written", call, i);
    for (uint32_t block = at / kBlock; block * kBlock < at + bytes; block++) {
      check_queue(call, pipe, block, false);
      if (pipe == Pipe::vector && wrote[block] == epoch)
        refuse("%s: reads what an earlier vector instruction wrote, without PipeBarrier<PIPE_V> between", call);
    }
  }
  void before_write(const char* call, Pipe pipe, uint32_t at, uint32_t bytes) {
    for (uint32_t block = at / kBlock; block * kBlock < at + bytes; block++) {
      check_queue(call, pipe, block, true);
      if (pipe == Pipe::vector && (wrote[block] == epoch || read[block] == epoch))
        refuse("%s: overwrites what an earlier vector instruction %s, without PipeBarrier<PIPE_V> between", call,
               wrote[block] == epoch ? "wrote" : "reads");
    }
  }
  void after(uint32_t at, uint32_t bytes, bool wrote_it) {
    if (wrote_it) memset(written + at, 1, bytes);
    for (uint32_t block = at / kBlock; block * kBlock < at + bytes; block++) (wrote_it ? wrote : read)[block] = epoch;
  }
  // A queue orders the pipes on both of its sides, so what the buffer held is settled.
  void move(uint32_t at, uint32_t bytes, Where from, Where to, const char* call) {
    for (uint32_t block = at / kBlock; block * kBlock < at + bytes; block++) {
      if (where[block] != from) refuse("%s: the tensor is not at this place of its queue", call);
      where[block] = to;
      wrote[block] = read[block] = 0;
    }
  }
};

inline thread_local Core* core = nullptr;
inline bool (*is_device_memory)(const void* address, size_t bytes) = nullptr;

// Runs `kernel` once for every core. Throws Violation.
template <typename Kernel>
void run(uint32_t cores, const Kernel& kernel) {
  for (uint32_t i = 0; i < cores; i++) {
    auto here = std::make_unique<Core>(i, cores);
    core = here.get();
    kernel();
    core = nullptr;
  }
}

template <typename T, typename... Allowed>
constexpr bool one_of = (std::is_same_v<T, Allowed> || ...);

}  // namespace ascendc_host
