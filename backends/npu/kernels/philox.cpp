// HAL's dropout and uniform draws on Ascend's vector cores: Philox4x32-10, bit-equal with every other backend.
//
// Element e of a draw is word e % 4 of Philox(key = seed, counter = offset + e / 4); see hal/rng.py. A draw is a block of a
// larger one: [n0, n1, n2, length] with the element index first + i0 s0 + i1 s1 + i2 s2 + j (rng.indexing).
//
// The vector unit of Atlas A2 has no 64-bit integers, no high half of a product, no exclusive or and no bitwise
// operation on 32 bits, and what an overflowing int32 product gives is not documented. So a 32-bit word is two 16-bit
// limbs, each in an int32 lane; a product by a constant is eight products of a limb with a byte (at most 24 bits) whose
// parts are added by position; x ^ y is (x | y) - (x & y), with the bitwise operations on the lanes seen as uint16.
// Nothing in this file overflows an int32.
//
// A tile is 512 counters, one per lane, and so up to 2048 elements; the four words of a counter come from four arrays and
// are gathered into the order of the elements. About 120 vector instructions a round, 8 repeats each, in 12 groups of
// independent instructions with a barrier between: 1200 instructions for 2048 elements. Memory: the input is read and
// the output written once. Unified buffer: 46 registers of 2 KiB and two buffers of up to 8 KiB each way, 124 KiB.
//
// Every call is documented for Atlas A2 (docs/npu-simulator.md lists them with their pages); the simulator compiles this file
// with a header that has no others.
#include "kernel_operator.h"

using namespace AscendC;

namespace {

constexpr int32_t kLanes = 512;
constexpr int32_t kTile = 4 * kLanes;
constexpr int32_t kRegisters = 46;
constexpr uint32_t kRegisterBytes = kLanes * sizeof(int32_t);

enum Kind : uint32_t { kUniform = 0, kFloat = 1, kHalf = 2, kBfloat16 = 3 };

// Registers. State: the limbs of the four words of the counter; the key; two masks; the rest is scratch.
enum Register : int32_t {
  kCounter = 0,   // 8: word w has its low limb at 2 w and its high limb at 2 w + 1
  kKey = 8,       // 4: low and high limb of either half of the key
  kMask16 = 12,   // 0x0000ffff
  kMask8 = 13,    // 0x000000ff
  kExclusive = 14,  // 8: the parts of four exclusive ors
  kFirst = 22,    // 12: scratch of the product of word 0
  kSecond = 34,   // 12: scratch of the product of word 2
  // After the rounds, scratch holds what the elements of the tile need.
  kWords = 22,    // 4: bits 31 to 8 of the four words
  kOffsets = 26,  // 4
  kGathered = 30,  // 4
  kValues = 34,   // 4: the input in float
  kKept = 38,     // 4: the output in float
  kBits = 42,     // 1: one bit an element, whether it is kept
  kScratch = 42,  // 4, before the bits
};

struct Draw {
  uint64_t seed, offset, first, s0, s1, s2;
  uint64_t n0, n1, n2, length;
};

class Philox {
 public:
  __aicore__ inline explicit Philox(TPipe& pipe) {
    pipe.InitBuffer(buffer_, kRegisters * kRegisterBytes);
    registers_ = buffer_.Get<int32_t>();
    Duplicate(At(kMask16), static_cast<int32_t>(0xffff), kLanes);
    Duplicate(At(kMask8), static_cast<int32_t>(0xff), kLanes);
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline LocalTensor<int32_t> At(int32_t number) { return registers_[number * kLanes]; }

  // The upper 24 bits of the words of elements head .. head + count - 1 of the counters from `counter` on, as floats
  // (which are exact), in At(kGathered).
  __aicore__ inline LocalTensor<float> Draw24(uint64_t seed, uint64_t counter, int32_t head, int32_t count) {
    const int32_t lanes = ((head + count + 3) / 4 + 63) / 64 * 64;
    Start(counter, lanes);
    for (int32_t half = 0; half < 2; half++) {
      const uint32_t word = static_cast<uint32_t>(seed >> (32 * half));
      Duplicate(At(kKey + 2 * half), static_cast<int32_t>(word & 0xffff), lanes);
      Duplicate(At(kKey + 2 * half + 1), static_cast<int32_t>(word >> 16), lanes);
    }
    PipeBarrier<PIPE_V>();
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int32_t round = 0; round < 10; round++) {
      key0 += 0x9E3779B9u;  // of the next round
      key1 += 0xBB67AE85u;
      Round(key0, key1, lanes);
    }
    return Order(head, count, lanes);
  }

 private:
  // The limbs of counter + lane, and 0 in the upper two words.
  __aicore__ inline void Start(uint64_t counter, int32_t lanes) {
    LocalTensor<int32_t> carry = At(kFirst);
    CreateVecIndex(carry, static_cast<int32_t>(0), lanes);
    for (int32_t limb = 4; limb < 8; limb++) Duplicate(At(kCounter + limb), static_cast<int32_t>(0), lanes);
    PipeBarrier<PIPE_V>();
    for (int32_t limb = 0; limb < 4; limb++) {
      Adds(carry, carry, static_cast<int32_t>((counter >> (16 * limb)) & 0xffff), lanes);
      PipeBarrier<PIPE_V>();
      Low16(At(kCounter + limb), carry, lanes);
      PipeBarrier<PIPE_V>();
      ShiftRight(carry, carry, static_cast<int32_t>(16), lanes);
      PipeBarrier<PIPE_V>();
    }
  }

  __aicore__ inline void And32(const LocalTensor<int32_t>& y, const LocalTensor<int32_t>& a, const LocalTensor<int32_t>& b,
                               int32_t lanes) {
    And(y.ReinterpretCast<uint16_t>(), a.ReinterpretCast<uint16_t>(), b.ReinterpretCast<uint16_t>(), 2 * lanes);
  }
  __aicore__ inline void Or32(const LocalTensor<int32_t>& y, const LocalTensor<int32_t>& a, const LocalTensor<int32_t>& b,
                              int32_t lanes) {
    Or(y.ReinterpretCast<uint16_t>(), a.ReinterpretCast<uint16_t>(), b.ReinterpretCast<uint16_t>(), 2 * lanes);
  }
  __aicore__ inline void Low16(const LocalTensor<int32_t>& y, const LocalTensor<int32_t>& x, int32_t lanes) {
    And32(y, x, At(kMask16), lanes);
  }

  // Both parts of x ^ y into registers kExclusive + 2 slot and the next; their difference is x ^ y.
  __aicore__ inline void OrAnd(int32_t slot, int32_t x, int32_t y, int32_t lanes) {
    Or32(At(kExclusive + 2 * slot), At(x), At(y), lanes);
    And32(At(kExclusive + 2 * slot + 1), At(x), At(y), lanes);
  }
  __aicore__ inline void Difference(int32_t y, int32_t slot, int32_t lanes) {
    Sub(At(y), At(kExclusive + 2 * slot), At(kExclusive + 2 * slot + 1), lanes);
  }

  // The steps of the two products (words 0 and 2 by their multipliers), one after the other in each group. t + i is
  // scratch register i of a product. With the bytes m0 .. m3 of the multiplier and the limbs l and h of the word:
  //   at bit 0   l m0 + (low byte of l m1) 2^8
  //   at bit 16  carry + (l m1 >> 8) + l m2 + h m0 + ((low byte of l m3) + (low byte of h m1)) 2^8
  //   at bit 32  carry + (l m3 >> 8) + (h m1 >> 8) + h m2 + (low byte of h m3) 2^8
  //   at bit 48  carry + (h m3 >> 8)
  // The limbs of the product are then in scratch 8, 9, 10 and 7.
  __aicore__ inline void Round(uint32_t next0, uint32_t next1, int32_t n) {
    constexpr uint32_t kMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
    constexpr int32_t kTimes[2] = {kFirst, kSecond};
    for (int32_t p = 0; p < 2; p++) {
      const int32_t t = kTimes[p], low = kCounter + 4 * p;
      for (int32_t byte = 0; byte < 4; byte++) {
        const int32_t m = static_cast<int32_t>((kMultipliers[p] >> (8 * byte)) & 0xff);
        Muls(At(t + byte), At(low), m, n);
        Muls(At(t + 4 + byte), At(low + 1), m, n);
      }
    }
    for (int32_t i = 0; i < 4; i++) OrAnd(i, kCounter + (i < 2 ? 2 : 4) + i, kKey + i, n);  // words 1 and 3 with the key
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) {
      for (int32_t i = 0; i < 4; i++) And32(At(t + 8 + i), At(t + 2 * i + 1), At(kMask8), n);
      Add(At(t + 2), At(t + 2), At(t + 4), n);
    }
    for (int32_t i = 0; i < 4; i++) Difference(kCounter + (i < 2 ? 2 : 4) + i, i, n);
    Duplicate(At(kKey), static_cast<int32_t>(next0 & 0xffff), n);
    Duplicate(At(kKey + 1), static_cast<int32_t>(next0 >> 16), n);
    Duplicate(At(kKey + 2), static_cast<int32_t>(next1 & 0xffff), n);
    Duplicate(At(kKey + 3), static_cast<int32_t>(next1 >> 16), n);
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes)
      for (int32_t i = 0; i < 4; i++) {
        ShiftRight(At(t + 2 * i + 1), At(t + 2 * i + 1), static_cast<int32_t>(8), n);
        ShiftLeft(At(t + 8 + i), At(t + 8 + i), static_cast<int32_t>(8), n);
      }
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) {
      Add(At(t), At(t), At(t + 8), n);
      Add(At(t + 2), At(t + 2), At(t + 1), n);
      Add(At(t + 9), At(t + 9), At(t + 10), n);
      Add(At(t + 3), At(t + 3), At(t + 5), n);
      Add(At(t + 6), At(t + 6), At(t + 11), n);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) {
      Low16(At(t + 8), At(t), n);
      ShiftRight(At(t + 10), At(t), static_cast<int32_t>(16), n);
      Add(At(t + 2), At(t + 2), At(t + 9), n);
      Add(At(t + 3), At(t + 3), At(t + 6), n);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) Add(At(t + 2), At(t + 2), At(t + 10), n);
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) {
      Low16(At(t + 9), At(t + 2), n);
      ShiftRight(At(t + 11), At(t + 2), static_cast<int32_t>(16), n);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) Add(At(t + 3), At(t + 3), At(t + 11), n);
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) {
      Low16(At(t + 10), At(t + 3), n);
      ShiftRight(At(t + 11), At(t + 3), static_cast<int32_t>(16), n);
    }
    PipeBarrier<PIPE_V>();
    for (int32_t t : kTimes) Add(At(t + 7), At(t + 7), At(t + 11), n);
    PipeBarrier<PIPE_V>();
    // New words 0 and 2: the high half of the other product ^ (word 1 or 3 ^ key). New 1 and 3: the low halves.
    OrAnd(0, kSecond + 10, kCounter + 2, n);
    OrAnd(1, kSecond + 7, kCounter + 3, n);
    OrAnd(2, kFirst + 10, kCounter + 6, n);
    OrAnd(3, kFirst + 7, kCounter + 7, n);
    PipeBarrier<PIPE_V>();
    Difference(kCounter, 0, n);
    Difference(kCounter + 1, 1, n);
    Difference(kCounter + 4, 2, n);
    Difference(kCounter + 5, 3, n);
    for (int32_t limb = 0; limb < 2; limb++) {
      Adds(At(kCounter + 2 + limb), At(kSecond + 8 + limb), static_cast<int32_t>(0), n);
      Adds(At(kCounter + 6 + limb), At(kFirst + 8 + limb), static_cast<int32_t>(0), n);
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline LocalTensor<float> Order(int32_t head, int32_t count, int32_t lanes) {
    for (int32_t word = 0; word < 4; word++) {
      ShiftLeft(At(kWords + word), At(kCounter + 2 * word + 1), static_cast<int32_t>(8), lanes);
      ShiftRight(At(kCounter + 2 * word), At(kCounter + 2 * word), static_cast<int32_t>(8), lanes);
    }
    // Element i is word (head + i) % 4 of counter (head + i) / 4; offsets are in bytes.
    LocalTensor<int32_t> place = At(kOffsets), word = At(kScratch), three = At(kGathered);
    CreateVecIndex(place, head, count);
    Duplicate(three, static_cast<int32_t>(3), count);
    PipeBarrier<PIPE_V>();
    for (int32_t w = 0; w < 4; w++) Add(At(kWords + w), At(kWords + w), At(kCounter + 2 * w), lanes);
    And32(word, place, three, count);
    PipeBarrier<PIPE_V>();
    Muls(word, word, static_cast<int32_t>(kRegisterBytes), count);
    ShiftRight(place, place, static_cast<int32_t>(2), count);
    PipeBarrier<PIPE_V>();
    ShiftLeft(place, place, static_cast<int32_t>(2), count);
    Duplicate(three, static_cast<int32_t>(0), (count + 63) / 64 * 64);  // elements that only the comparison reads
    PipeBarrier<PIPE_V>();
    Add(place, place, word, count);
    PipeBarrier<PIPE_V>();
    Gather(At(kGathered), At(kWords), place.ReinterpretCast<uint32_t>(), static_cast<uint32_t>(0),
           static_cast<uint32_t>(count));
    PipeBarrier<PIPE_V>();
    LocalTensor<float> values = At(kGathered).ReinterpretCast<float>();
    Cast(values, At(kGathered), RoundMode::CAST_RINT, static_cast<uint32_t>((count + 63) / 64 * 64));
    PipeBarrier<PIPE_V>();
    return values;
  }

  TBuf<TPosition::VECCALC> buffer_;
  LocalTensor<int32_t> registers_;
};

// y = x / (1 - p) where an element is kept, else 0; or, without x, the draw as floats in [0, 1).
template <typename T, bool kDropout>
class Kernel {
 public:
  __aicore__ inline Kernel(GM_ADDR x, GM_ADDR y, const Draw& draw, float threshold, float scale)
      : philox_(pipe_), draw_(draw), threshold_(threshold), scale_(scale) {
    const uint64_t elements = draw.n0 * draw.n1 * draw.n2 * draw.length;
    if constexpr (kDropout) {
      x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x), elements);
      pipe_.InitBuffer(in_, 2, kTile * sizeof(T));
    }
    y_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(y), elements);
    pipe_.InitBuffer(out_, 2, kTile * sizeof(T));
  }

  // The tiles of all rows are dealt to the cores in turn. A row that begins within a counter has one tile more at most.
  __aicore__ inline void Process() {
    const uint64_t per_row = (draw_.length + 3 + kTile - 1) / kTile;
    const uint64_t tiles = draw_.n0 * draw_.n1 * draw_.n2 * per_row;
    for (uint64_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const uint64_t row = tile / per_row, number = tile % per_row;
      const uint64_t i2 = row % draw_.n2, i1 = row / draw_.n2 % draw_.n1, i0 = row / draw_.n2 / draw_.n1;
      const uint64_t first = draw_.first + i0 * draw_.s0 + i1 * draw_.s1 + i2 * draw_.s2;
      const uint64_t skipped = first % 4;
      const uint64_t begin = number == 0 ? 0 : number * kTile - skipped;
      uint64_t end = (number + 1) * kTile - skipped;
      end = end < draw_.length ? end : draw_.length;
      if (begin >= end) continue;
      const uint64_t counter = draw_.offset + first / 4 + number * kLanes;
      Tile(row * draw_.length + begin, counter, number == 0 ? static_cast<int32_t>(skipped) : 0,
           static_cast<int32_t>(end - begin));
    }
  }

 private:
  __aicore__ inline void Tile(uint64_t position, uint64_t counter, int32_t head, int32_t count) {
    const DataCopyExtParams copied{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
    if constexpr (kDropout) {
      LocalTensor<T> arriving = in_.template AllocTensor<T>();
      DataCopyPad(arriving, x_[position], copied, DataCopyPadExtParams<T>());
      in_.EnQue(arriving);
    }
    LocalTensor<float> values = philox_.Draw24(draw_.seed, counter, head, count);
    LocalTensor<T> leaving = out_.template AllocTensor<T>();
    if constexpr (kDropout) {
      LocalTensor<T> x = in_.template DeQue<T>();
      Drop(leaving, x, values, count);
      in_.FreeTensor(x);
    } else {
      Muls(leaving, values, 1.0f / 16777216.0f, count);
      PipeBarrier<PIPE_V>();
    }
    out_.EnQue(leaving);
    LocalTensor<T> y = out_.template DeQue<T>();
    DataCopyPad(y_[position], y, copied);
    out_.FreeTensor(y);
  }

  __aicore__ inline void Kept(const LocalTensor<float>& y, const LocalTensor<float>& x, const LocalTensor<float>& values,
                              int32_t count) {
    LocalTensor<uint8_t> bits = philox_.At(kBits).template ReinterpretCast<uint8_t>();
    LocalTensor<float> scaled = philox_.At(kValues).template ReinterpretCast<float>();
    CompareScalar(bits, values, threshold_, CMPMODE::GE, static_cast<uint32_t>((count + 63) / 64 * 64));
    Muls(scaled, x, scale_, count);
    PipeBarrier<PIPE_V>();
    Select(y, bits, scaled, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, static_cast<uint32_t>(count));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Drop(const LocalTensor<float>& y, const LocalTensor<float>& x, const LocalTensor<float>& values,
                              int32_t count) {
    Kept(y, x, values, count);
  }
  template <typename U>
  __aicore__ inline void Drop(const LocalTensor<U>& y, const LocalTensor<U>& x, const LocalTensor<float>& values,
                              int32_t count) {
    LocalTensor<float> wide = philox_.At(kValues).template ReinterpretCast<float>();
    LocalTensor<float> kept = philox_.At(kKept).template ReinterpretCast<float>();
    Cast(wide, x, RoundMode::CAST_NONE, static_cast<uint32_t>(count));
    PipeBarrier<PIPE_V>();
    Kept(kept, wide, values, count);
    Cast(y, kept, RoundMode::CAST_RINT, static_cast<uint32_t>(count));
    PipeBarrier<PIPE_V>();
  }

  TPipe pipe_;
  Philox philox_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  GlobalTensor<T> x_, y_;
  Draw draw_;
  float threshold_, scale_;
};

}  // namespace

// x, y: contiguous [n0, n1, n2, length] of the kind's dtype (x unused for draws). threshold: of 24 bits, an integer.
extern "C" __global__ __aicore__ void hal_philox(GM_ADDR x, GM_ADDR y, uint64_t seed, uint64_t offset, uint64_t first,
                                                 uint64_t s0, uint64_t s1, uint64_t s2, uint64_t n0, uint64_t n1,
                                                 uint64_t n2, uint64_t length, uint32_t kind, float threshold,
                                                 float scale) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const Draw draw{seed, offset, first, s0, s1, s2, n0, n1, n2, length};
  if (kind == kUniform) {
    Kernel<float, false>(x, y, draw, threshold, scale).Process();
  } else if (kind == kFloat) {
    Kernel<float, true>(x, y, draw, threshold, scale).Process();
  } else if (kind == kHalf) {
    Kernel<half, true>(x, y, draw, threshold, scale).Process();
  } else {
    Kernel<bfloat16_t, true>(x, y, draw, threshold, scale).Process();
  }
}
