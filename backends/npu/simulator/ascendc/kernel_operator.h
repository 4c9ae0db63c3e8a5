// Stands in for CANN's kernel_operator.h, so that the AscendC kernels of HAL run on the CPU, core after core.
//
// It has only the calls and dtypes that are documented for Atlas A2, from the API pages of the asc-devkit repository
// (docs/zh/api/SIMD-API): a kernel that uses another does not compile here. What a page forbids stops the kernel with an
// error that names it: operands that are not aligned to 32 bytes, overlap in part or leave their buffer, more than 192 KiB
// of unified buffer, a comparison of a part of 256 bytes, offsets of Gather beyond the source.
//
// Three more checks are for what a device does not report. An int32 result out of range is an error, because no page says
// what the device gives. Reading bytes that nothing wrote is an error. And instructions of the vector pipe are not
// ordered by data: an operand that an earlier instruction wrote (or a result that one read or wrote) needs a
// PipeBarrier<PIPE_V> between (page "核内同步能力概述", row and column PIPE_V); the buffers of a queue are ordered by
// AllocTensor, EnQue, DeQue and FreeTensor.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vector_core.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t*
#define KERNEL_TYPE_AIV_ONLY
#define KERNEL_TASK_TYPE_DEFAULT(type)  // Kernel-Tiling/设置Kernel类型: the blocks are vector cores

using half = c10::Half;
using bfloat16_t = c10::BFloat16;

namespace AscendC {
using namespace ascendc_host;

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
enum pipe_t { PIPE_V, PIPE_ALL };
enum class RoundMode { CAST_NONE = 0, CAST_RINT };
enum class CMPMODE { GE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR = 0, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

// 工具接口/系统资源与变量/GetBlockIdx, GetBlockNum
inline int64_t GetBlockIdx() { return core->index; }
inline int64_t GetBlockNum() { return core->count; }

// 同步控制/核内同步/PipeBarrier(ISASI)
template <pipe_t pipe>
void PipeBarrier() {
  core->epoch++;
}

// 数据结构/LocalTensor: `size` elements at byte `at` of the unified buffer.
template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(uint32_t at, uint32_t size, uint32_t begin, uint32_t bytes)
      : at(at), size(size), begin(begin), bytes(bytes) {}
  LocalTensor operator[](uint32_t offset) const {
    if (offset > size) refuse("LocalTensor[%u] of %u elements", offset, size);
    return {at + offset * static_cast<uint32_t>(sizeof(T)), size - offset, begin, bytes};
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return {at, static_cast<uint32_t>(size * sizeof(T) / sizeof(U)), begin, bytes};
  }
  T* data() const { return reinterpret_cast<T*>(core->memory + at); }
  uint32_t at = 0, size = 0;
  uint32_t begin = 0, bytes = 0;  // of the buffer
};

// 数据结构/GlobalTensor/SetGlobalBuffer
template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(__gm__ T* address, uint64_t elements) { first = address, size = elements; }
  GlobalTensor operator[](uint64_t offset) const {
    if (offset > size) refuse("GlobalTensor[%llu] of %llu elements", (unsigned long long)offset, (unsigned long long)size);
    GlobalTensor part;
    part.SetGlobalBuffer(first + offset, size - offset);
    return part;
  }
  // 数据结构/GlobalTensor/GetValue: a scalar read.
  T GetValue(uint64_t offset) const {
    if (!core->cache_cleaned) refuse("GetValue: the data cache may hold older values (DataCacheCleanAndInvalid)");
    if (offset >= size || !is_device_memory(first + offset, sizeof(T)))
      refuse("GetValue(%llu) of a GlobalTensor of %llu elements", (unsigned long long)offset, (unsigned long long)size);
    return first[offset];
  }
  T* first = nullptr;
  uint64_t size = 0;
};

// 缓存控制/DataCacheCleanAndInvalid, of the whole cache
enum class CacheLine { ENTIRE_DATA_CACHE };
enum class DcciDst { CACHELINE_OUT };
template <typename T, CacheLine line, DcciDst destination>
void DataCacheCleanAndInvalid(const GlobalTensor<T>&) {
  core->cache_cleaned = true;
}

// 资源管理/Pipe和Que框架: buffers, and queues between a copying pipe and the vector pipe.
template <TPosition position>
class TBuf {
 public:
  static_assert(position == TPosition::VECCALC, "plain buffers are for computation");
  template <typename T>
  LocalTensor<T> Get() const {
    return {at, static_cast<uint32_t>(bytes / sizeof(T)), at, bytes};
  }
  uint32_t at = 0, bytes = 0;
};

template <TPosition position, int32_t depth>
class TQue {
 public:
  static_assert(position == TPosition::VECIN || position == TPosition::VECOUT);
  template <typename T>
  LocalTensor<T> AllocTensor() {
    for (uint32_t buffer : buffers)
      if (core->where[buffer / kBlock] == Where::free) {
        core->move(buffer, bytes, Where::free, Where::allocated, "AllocTensor");
        return {buffer, static_cast<uint32_t>(bytes / sizeof(T)), buffer, bytes};
      }
    refuse("AllocTensor: all %zu buffers of the queue are in use, so that a device waits forever", buffers.size());
  }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor) {
    if (queued.size() >= static_cast<size_t>(depth)) refuse("EnQue: the queue of depth %d is full", depth);
    core->move(tensor.at, bytes, Where::allocated, Where::queued, "EnQue");
    queued.push_back(tensor.at);
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    if (queued.empty()) refuse("DeQue: the queue is empty, so that a device waits forever");
    uint32_t buffer = queued.front();
    queued.erase(queued.begin());
    core->move(buffer, bytes, Where::queued, Where::taken, "DeQue");
    return {buffer, static_cast<uint32_t>(bytes / sizeof(T)), buffer, bytes};
  }
  template <typename T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    core->move(tensor.at, bytes, Where::taken, Where::free, "FreeTensor");
  }
  std::vector<uint32_t> buffers, queued;
  uint32_t bytes = 0;
};

class TPipe {
 public:
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t bytes) {
    buffer.at = core->allocate(bytes);
    buffer.bytes = bytes;
    return true;
  }
  template <TPosition position, int32_t depth>
  bool InitBuffer(TQue<position, depth>& queue, uint8_t number, uint32_t bytes) {
    queue.bytes = (bytes + kBlock - 1) / kBlock * kBlock;
    for (uint8_t i = 0; i < number; i++) {
      uint32_t at = core->allocate(bytes);
      queue.buffers.push_back(at);
      for (uint32_t block = at / kBlock; block * kBlock < at + queue.bytes; block++) {
        core->owner[block] = position == TPosition::VECIN ? 1 : 2;
        core->where[block] = Where::free;
      }
    }
    return true;
  }
};

// An operand of `count` elements: aligned, and inside of its buffer.
template <typename T>
void check(const char* call, const LocalTensor<T>& t, uint64_t count) {
  if (t.at % kBlock) refuse("%s: an operand begins at byte %u, not at a multiple of 32", call, t.at);
  if (count > t.size) refuse("%s: %llu elements of a tensor of %u", call, (unsigned long long)count, t.size);
}
// Operands may be the same memory exactly, or apart (通用说明和约束, 通用地址重叠约束).
template <typename T, typename U>
void check_overlap(const char* call, const LocalTensor<T>& y, uint64_t y_count, const LocalTensor<U>& x, uint64_t count,
                   bool same = true) {
  uint64_t y_end = y.at + y_count * sizeof(T), x_end = x.at + count * sizeof(U);
  if (y_end <= x.at || x_end <= y.at) return;
  if (!same || y.at != x.at || sizeof(T) != sizeof(U)) refuse("%s: source and destination overlap", call);
}

template <typename T, typename... Sources>
void begin(const char* call, const LocalTensor<T>& y, uint64_t y_count, uint64_t count, const Sources&... x) {
  check(call, y, y_count);
  (check(call, x, count), ...);
  (check_overlap(call, y, y_count, x, count), ...);
  (core->before_read(call, Pipe::vector, x.at, count * sizeof(*x.data())), ...);
  core->before_write(call, Pipe::vector, y.at, y_count * sizeof(T));
  (core->after(x.at, count * sizeof(*x.data()), false), ...);
  core->after(y.at, y_count * sizeof(T), true);
}

// Element-wise; int32 results that are out of range are errors.
template <typename T, typename F>
void elementwise(const char* call, T* y, int64_t count, const F& f) {
  if constexpr (std::is_same_v<T, int32_t>) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
      int64_t exact = f(i);
      wrong |= exact ^ static_cast<int32_t>(exact);
      y[i] = static_cast<int32_t>(exact);
    }
    if (wrong) refuse("%s: a result is beyond int32, for which no value is documented", call);
  } else {
    for (int64_t i = 0; i < count; i++) y[i] = f(i);
  }
}

// Memory矢量计算/基础算术/Add, Sub, Mul: int16, half, int32, float.
#define HALSIM_BINARY(Name, operation)                                                                          \
  template <typename T>                                                                                        \
  void Name(const LocalTensor<T>& y, const LocalTensor<T>& a, const LocalTensor<T>& b, const int32_t& count) { \
    static_assert(one_of<T, int32_t, float>, #Name ": int32 and float (int16 and half are not simulated)");     \
    using Wide = std::conditional_t<std::is_same_v<T, int32_t>, int64_t, T>;                                   \
    begin(#Name, y, count, count, a, b);                                                                       \
    const T *p = a.data(), *q = b.data();                                                                      \
    elementwise(#Name, y.data(), count, [=](int64_t i) { return Wide(p[i]) operation Wide(q[i]); });           \
  }
HALSIM_BINARY(Add, +)
HALSIM_BINARY(Sub, -)
HALSIM_BINARY(Mul, *)
#undef HALSIM_BINARY

// Memory矢量计算/基础算术/Div, Sqrt: half, float.
template <typename T>
void Div(const LocalTensor<T>& y, const LocalTensor<T>& a, const LocalTensor<T>& b, const int32_t& count) {
  static_assert(std::is_same_v<T, float>, "Div: float (half is not simulated)");
  begin("Div", y, count, count, a, b);
  for (int32_t i = 0; i < count; i++) y.data()[i] = a.data()[i] / b.data()[i];
}
template <typename T>
void Sqrt(const LocalTensor<T>& y, const LocalTensor<T>& x, const int32_t& count) {
  static_assert(std::is_same_v<T, float>, "Sqrt: float (half is not simulated)");
  begin("Sqrt", y, count, count, x);
  for (int32_t i = 0; i < count; i++) y.data()[i] = std::sqrt(x.data()[i]);
}

// Memory矢量计算/基础算术/Adds, Muls: int16, half, int32, float.
#define HALSIM_SCALAR(Name, operation)                                                                       \
  template <typename T>                                                                                     \
  void Name(const LocalTensor<T>& y, const LocalTensor<T>& x, const T& scalar, const int32_t& count) {      \
    static_assert(one_of<T, int32_t, float>, #Name ": int32 and float (int16 and half are not simulated)");  \
    using Wide = std::conditional_t<std::is_same_v<T, int32_t>, int64_t, T>;                                \
    begin(#Name, y, count, count, x);                                                                       \
    const T* p = x.data();                                                                                  \
    elementwise(#Name, y.data(), count, [=](int64_t i) { return Wide(p[i]) operation Wide(scalar); });      \
  }
HALSIM_SCALAR(Adds, +)
HALSIM_SCALAR(Muls, *)
#undef HALSIM_SCALAR

// Memory矢量计算/逻辑计算/And, Or: int16, uint16 (32 bits by ReinterpretCast and twice the count).
#define HALSIM_BITWISE(Name, operation)                                                                        \
  template <typename T>                                                                                       \
  void Name(const LocalTensor<T>& y, const LocalTensor<T>& a, const LocalTensor<T>& b, const int32_t& count) { \
    static_assert(one_of<T, int16_t, uint16_t>, #Name ": int16 and uint16");                                   \
    begin(#Name, y, count, count, a, b);                                                                      \
    const T *p = a.data(), *q = b.data();                                                                     \
    T* out = y.data();                                                                                        \
    for (int32_t i = 0; i < count; i++) out[i] = p[i] operation q[i];                                          \
  }
HALSIM_BITWISE(And, &)
HALSIM_BITWISE(Or, |)
#undef HALSIM_BITWISE

// Memory矢量计算/逻辑计算/ShiftLeft, ShiftRight: int16, uint16 (by 0..16), int32, uint32 (by 0..32). A signed value is
// shifted right with its sign; a left shift of a negative value, or out of int32, is not needed and refused.
template <typename T>
void ShiftLeft(const LocalTensor<T>& y, const LocalTensor<T>& x, const T& bits, const int32_t& count) {
  static_assert(one_of<T, int32_t, uint32_t>, "ShiftLeft: int32 and uint32 (16 bits are not simulated)");
  if (bits < 0 || bits > 31) refuse("ShiftLeft by %lld", (long long)bits);
  begin("ShiftLeft", y, count, count, x);
  const T* p = x.data();
  if constexpr (std::is_same_v<T, int32_t>) {
    elementwise("ShiftLeft", y.data(), count, [=](int64_t i) { return static_cast<int64_t>(p[i]) * (1LL << bits); });
  } else {
    T* out = y.data();
    for (int32_t i = 0; i < count; i++) out[i] = p[i] << bits;
  }
}
template <typename T>
void ShiftRight(const LocalTensor<T>& y, const LocalTensor<T>& x, const T& bits, const int32_t& count) {
  static_assert(one_of<T, int32_t, uint32_t>, "ShiftRight: int32 and uint32 (16 bits are not simulated)");
  if (bits < 0 || bits > 31) refuse("ShiftRight by %lld", (long long)bits);
  begin("ShiftRight", y, count, count, x);
  const T* p = x.data();
  T* out = y.data();
  for (int32_t i = 0; i < count; i++) out[i] = p[i] >> bits;
}

// Memory矢量计算/数据填充/Duplicate, CreateVecIndex (int16, half, int32, float)
template <typename T>
void Duplicate(const LocalTensor<T>& y, const T& scalar, const int32_t& count) {
  static_assert(one_of<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>);
  begin("Duplicate", y, count, 0);
  std::fill_n(y.data(), count, scalar);
}
template <typename T>
void CreateVecIndex(LocalTensor<T> y, const T& first, uint32_t count) {
  static_assert(one_of<T, int32_t, float>, "CreateVecIndex: int32 and float (int16 and half are not simulated)");
  begin("CreateVecIndex", y, count, 0);
  for (uint32_t i = 0; i < count; i++) y.data()[i] = first + static_cast<T>(i);
}

// Memory矢量计算/离散与聚合/Gather: offsets in bytes, multiples of the element; source and destination apart.
template <typename T>
void Gather(const LocalTensor<T>& y, const LocalTensor<T>& x, const LocalTensor<uint32_t>& offsets, uint32_t base,
            uint32_t count) {
  static_assert(one_of<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>);
  uint32_t end = 0;
  check("Gather", offsets, count);
  for (uint32_t i = 0; i < count; i++) {
    uint64_t at = uint64_t{base} + offsets.data()[i];
    if (at % sizeof(T) || at + sizeof(T) > x.size * sizeof(T))
      refuse("Gather: offset %llu of a source of %zu bytes", (unsigned long long)at, x.size * sizeof(T));
    end = std::max<uint32_t>(end, at + sizeof(T));
    for (uint32_t byte = 0; byte < sizeof(T); byte++)
      if (!core->written[x.at + at + byte]) refuse("Gather: reads an element that nothing has written");
  }
  check_overlap("Gather", y, count, x, end / sizeof(T), false);
  check_overlap("Gather", y, count, offsets, count, false);
  for (uint32_t block = x.at / kBlock; block * kBlock < x.at + end; block++)
    if (core->wrote[block] == core->epoch)
      refuse("Gather: reads what an earlier vector instruction wrote, without PipeBarrier<PIPE_V> between");
  begin("Gather", y, count, count, offsets);
  core->after(x.at, end, false);
  for (uint32_t i = 0; i < count; i++) y.data()[i] = x.data()[(base + offsets.data()[i]) / sizeof(T)];
}

// Memory矢量计算/类型转换/Cast, the rows that are used: to a wider type without rounding, to a narrower one to nearest even.
template <typename T, typename U>
void Cast(const LocalTensor<T>& y, const LocalTensor<U>& x, const RoundMode& mode, const uint32_t& count) {
  constexpr bool widens = std::is_same_v<T, float> && one_of<U, half, bfloat16_t>;
  constexpr bool rounds = (std::is_same_v<U, float> && one_of<T, half, bfloat16_t>) ||
                          (std::is_same_v<U, int32_t> && std::is_same_v<T, float>);
  static_assert(widens || rounds, "Cast: this pair of dtypes is not simulated");
  if (mode != (widens ? RoundMode::CAST_NONE : RoundMode::CAST_RINT))
    refuse("Cast: this rounding mode is not among those of the pair of dtypes that are simulated");
  begin("Cast", y, count, count, x);
  const U* p = x.data();
  T* out = y.data();
  for (uint32_t i = 0; i < count; i++) out[i] = static_cast<T>(p[i]);
}

// Memory矢量计算/比较与选择/CompareScalar (later releases: Compares): half, float; bits, the first element lowest; the
// elements fill multiples of 256 bytes.
template <typename T, typename U>
void CompareScalar(const LocalTensor<U>& y, const LocalTensor<T>& x, const T scalar, CMPMODE, uint32_t count) {
  static_assert(one_of<T, half, float> && std::is_same_v<U, uint8_t>, "CompareScalar: half or float to uint8");
  if (count * sizeof(T) % 256) refuse("CompareScalar: %u elements do not fill a multiple of 256 bytes", count);
  begin("CompareScalar", y, count / 8, count, x);
  for (uint32_t i = 0; i < count / 8; i++) {
    uint8_t bits = 0;
    for (uint32_t bit = 0; bit < 8; bit++) bits |= (x.data()[8 * i + bit] >= scalar) << bit;
    y.data()[i] = bits;
  }
}

// Memory矢量计算/比较与选择/Select, of a tensor and a scalar: half, float.
template <typename T, typename U>
void Select(const LocalTensor<T>& y, const LocalTensor<U>& bits, const LocalTensor<T>& x, T otherwise, SELMODE mode,
            uint32_t count) {
  static_assert(one_of<T, half, float> && std::is_same_v<U, uint8_t>, "Select: half or float, by bits in uint8");
  if (mode != SELMODE::VSEL_TENSOR_SCALAR_MODE) refuse("Select: a scalar needs VSEL_TENSOR_SCALAR_MODE");
  const uint32_t bytes = (count + 7) / 8;
  check("Select", bits, bytes);
  check_overlap("Select", y, count, bits, bytes, false);
  core->before_read("Select", Pipe::vector, bits.at, bytes);
  core->after(bits.at, bytes, false);
  begin("Select", y, count, count, x);
  for (uint32_t i = 0; i < count; i++)
    y.data()[i] = bits.data()[i / 8] >> (i % 8) & 1 ? x.data()[i] : otherwise;
}

// Memory矢量计算/数据搬运/GM与UB数据搬运/*非对齐数据搬运(DataCopyPad): one block of any number of bytes, between any global
// address and a tensor of a queue.
struct DataCopyExtParams {
  DataCopyExtParams(uint16_t count, uint32_t bytes, uint32_t source, uint32_t destination, uint32_t)
      : blockCount(count), blockLen(bytes) {
    if (count != 1 || source || destination) refuse("DataCopyPad: only one block is simulated");
    if (bytes > 2097151) refuse("DataCopyPad: %u bytes, at most 2097151", bytes);
  }
  uint16_t blockCount;
  uint32_t blockLen;
};
template <typename T>
struct DataCopyPadExtParams {};

template <typename T>
void check_copy(const LocalTensor<T>& local, const GlobalTensor<T>& global, const DataCopyExtParams& how) {
  static_assert(one_of<T, int8_t, uint8_t, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float, int64_t,
                       uint64_t, double>);
  if (how.blockLen % sizeof(T)) refuse("DataCopyPad: %u bytes are no multiple of the element", how.blockLen);
  check("DataCopyPad", local, how.blockLen / sizeof(T));
  if (how.blockLen / sizeof(T) > global.size || !is_device_memory(global.first, how.blockLen))
    refuse("DataCopyPad: %u bytes at %p are not inside of the tensor's device memory", how.blockLen, (void*)global.first);
}
template <typename T>
void DataCopyPad(const LocalTensor<T>& y, const GlobalTensor<T>& x, const DataCopyExtParams& how,
                 const DataCopyPadExtParams<T>&) {
  check_copy(y, x, how);
  core->before_write("DataCopyPad", Pipe::in, y.at, how.blockLen);
  memcpy(y.data(), x.first, how.blockLen);
  memset(core->written + y.at, 1, how.blockLen);
}
template <typename T>
void DataCopyPad(const GlobalTensor<T>& y, const LocalTensor<T>& x, const DataCopyExtParams& how) {
  check_copy(x, y, how);
  core->before_read("DataCopyPad", Pipe::out, x.at, how.blockLen);
  memcpy(y.first, x.data(), how.blockLen);
}

}  // namespace AscendC
