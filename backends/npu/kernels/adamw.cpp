// AdamW on Ascend's vector cores, all tensors of a step in one launch; see hal/ops/optimizer.py for the formula.
//
// The table has seven numbers for each tensor: the addresses of the parameter, its gradient, both moments and the low
// precision copy (0 if there is none), the number of elements, and the dtypes of gradient (low byte) and copy. The tiles
// of all tensors are dealt to the cores in turn. Parameters and moments are float32, so a tile reads 3 times 8 KiB and
// the gradient and writes 3 times 8 KiB and the copy: what the formula needs, once. Unified buffer: two buffers of 32 KiB
// each way and two registers, 144 KiB.
//
// clip: the address of a float32 factor of the gradients on the device, or 0. It is read here, so that the host does not
// wait for the norm from which it is computed; if it is not finite, nothing is written. The factors of the formula come
// from the host, which computes them in double (1 - beta2 of a float32 beta2 is off by 1e-5).
#include "kernel_operator.h"

using namespace AscendC;

namespace {

constexpr int32_t kTile = 2048;
constexpr uint64_t kFields = 7;

enum Kind : uint32_t { kNone = 0, kFloat = 1, kHalf = 2, kBfloat16 = 3 };

struct Step {
  float scale, decay, beta1, rest1, beta2, rest2, rate, correction, eps;
};

class AdamW {
 public:
  __aicore__ inline AdamW(const Step& step) : step_(step) {
    pipe_.InitBuffer(in_, 2, 4 * kTile * sizeof(float));
    pipe_.InitBuffer(out_, 2, 4 * kTile * sizeof(float));
    pipe_.InitBuffer(scratch_, 2 * kTile * sizeof(float));
  }

  __aicore__ inline void Process(GM_ADDR table, uint64_t tensors) {
    GlobalTensor<uint64_t> fields;
    fields.SetGlobalBuffer(reinterpret_cast<__gm__ uint64_t*>(table), tensors * kFields);
    uint64_t before = 0;  // tiles of the tensors before this one
    for (uint64_t i = 0; i < tensors; i++) {
      const uint64_t elements = fields.GetValue(i * kFields + 5), kinds = fields.GetValue(i * kFields + 6);
      const uint64_t tiles = (elements + kTile - 1) / kTile, cores = GetBlockNum();
      for (uint64_t tile = (GetBlockIdx() + cores - before % cores) % cores; tile < tiles; tile += cores) {
        const uint64_t begin = tile * kTile;
        const uint64_t rest = elements - begin;
        address_ = i * kFields;
        Tile(fields, elements, begin, static_cast<int32_t>(rest < kTile ? rest : kTile),
             static_cast<uint32_t>(kinds & 0xff), static_cast<uint32_t>(kinds >> 8));
      }
      before += tiles;
    }
  }

 private:
  template <typename T>
  __aicore__ inline GlobalTensor<T> At(const GlobalTensor<uint64_t>& fields, uint64_t field, uint64_t elements) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(fields.GetValue(address_ + field)), elements);
    return tensor;
  }
  template <typename T>
  __aicore__ inline static DataCopyExtParams Bytes(int32_t count) {
    return DataCopyExtParams(1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0);
  }
  template <typename T>
  __aicore__ inline void Load(const LocalTensor<T>& to, const GlobalTensor<T>& from, int32_t count) {
    DataCopyPad(to, from, Bytes<T>(count), DataCopyPadExtParams<T>());
  }

  __aicore__ inline void Tile(const GlobalTensor<uint64_t>& fields, uint64_t elements, uint64_t begin, int32_t n,
                              uint32_t grad, uint32_t copy) {
    GlobalTensor<float> p = At<float>(fields, 0, elements), m = At<float>(fields, 2, elements),
                        v = At<float>(fields, 3, elements);
    LocalTensor<float> arriving = in_.AllocTensor<float>();
    Load(arriving, p[begin], n);
    Load(arriving[kTile], m[begin], n);
    Load(arriving[2 * kTile], v[begin], n);
    if (grad == kFloat) {
      Load(arriving[3 * kTile], At<float>(fields, 1, elements)[begin], n);
    } else if (grad == kHalf) {
      Load(arriving[3 * kTile].ReinterpretCast<half>(), At<half>(fields, 1, elements)[begin], n);
    } else {
      Load(arriving[3 * kTile].ReinterpretCast<bfloat16_t>(), At<bfloat16_t>(fields, 1, elements)[begin], n);
    }
    in_.EnQue(arriving);
    LocalTensor<float> x = in_.DeQue<float>(), y = out_.AllocTensor<float>();
    Compute(y, x, n, grad, copy);
    in_.FreeTensor(x);
    out_.EnQue(y);
    y = out_.DeQue<float>();
    DataCopyPad(p[begin], y, Bytes<float>(n));
    DataCopyPad(m[begin], y[kTile], Bytes<float>(n));
    DataCopyPad(v[begin], y[2 * kTile], Bytes<float>(n));
    if (copy == kHalf) {
      DataCopyPad(At<half>(fields, 4, elements)[begin], y[3 * kTile].ReinterpretCast<half>(), Bytes<half>(n));
    } else if (copy == kBfloat16) {
      DataCopyPad(At<bfloat16_t>(fields, 4, elements)[begin], y[3 * kTile].ReinterpretCast<bfloat16_t>(),
                  Bytes<bfloat16_t>(n));
    } else if (copy == kFloat) {
      DataCopyPad(At<float>(fields, 4, elements)[begin], y[3 * kTile], Bytes<float>(n));
    }
    out_.FreeTensor(y);
  }

  // y: parameter, moments and copy; x: parameter, moments and gradient; n elements at multiples of kTile.
  __aicore__ inline void Compute(const LocalTensor<float>& y, const LocalTensor<float>& x, int32_t n, uint32_t grad,
                                 uint32_t copy) {
    LocalTensor<float> g = scratch_.Get<float>(), t = g[kTile];
    LocalTensor<float> p = y, m = y[kTile], v = y[2 * kTile];
    const uint32_t count = static_cast<uint32_t>(n);
    if (grad == kFloat) {
      Muls(g, x[3 * kTile], step_.scale, n);
    } else {
      if (grad == kHalf) {
        Cast(g, x[3 * kTile].ReinterpretCast<half>(), RoundMode::CAST_NONE, count);
      } else {
        Cast(g, x[3 * kTile].ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, count);
      }
      PipeBarrier<PIPE_V>();
      Muls(g, g, step_.scale, n);
    }
    Muls(p, x, step_.decay, n);
    Muls(m, x[kTile], step_.beta1, n);
    Muls(v, x[2 * kTile], step_.beta2, n);
    PipeBarrier<PIPE_V>();
    Mul(t, g, g, n);
    PipeBarrier<PIPE_V>();
    Muls(t, t, step_.rest2, n);
    Muls(g, g, step_.rest1, n);
    PipeBarrier<PIPE_V>();
    Add(m, m, g, n);
    Add(v, v, t, n);
    PipeBarrier<PIPE_V>();
    Muls(g, m, step_.rate, n);
    Muls(t, v, step_.correction, n);
    PipeBarrier<PIPE_V>();
    Sqrt(t, t, n);
    PipeBarrier<PIPE_V>();
    Adds(t, t, step_.eps, n);
    PipeBarrier<PIPE_V>();
    Div(g, g, t, n);
    PipeBarrier<PIPE_V>();
    Sub(p, p, g, n);
    PipeBarrier<PIPE_V>();
    if (copy == kHalf) {
      Cast(y[3 * kTile].ReinterpretCast<half>(), p, RoundMode::CAST_RINT, count);
    } else if (copy == kBfloat16) {
      Cast(y[3 * kTile].ReinterpretCast<bfloat16_t>(), p, RoundMode::CAST_RINT, count);
    } else if (copy == kFloat) {
      Adds(y[3 * kTile], p, 0.0f, n);
    }
    PipeBarrier<PIPE_V>();
  }

  TPipe pipe_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 2> out_;
  TBuf<TPosition::VECCALC> scratch_;
  uint64_t address_ = 0;  // of the tensor's first field
  Step step_;
};

}  // namespace

// rest: 1 - beta. rate: lr / (1 - beta1^step). correction: 1 / (1 - beta2^step). decay: 1 - lr weight_decay.
extern "C" __global__ __aicore__ void hal_adamw(GM_ADDR table, uint64_t tensors, GM_ADDR clip, float scale, float decay,
                                                float beta1, float rest1, float beta2, float rest2, float rate,
                                                float correction, float eps) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  // Scalars are read through the data cache, which may hold what these addresses had before.
  GlobalTensor<uint64_t> all;
  all.SetGlobalBuffer(reinterpret_cast<__gm__ uint64_t*>(table), tensors * kFields);
  DataCacheCleanAndInvalid<uint64_t, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(all);
  if (clip != nullptr) {
    GlobalTensor<float> factor;
    factor.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(clip), 1);
    const float value = factor.GetValue(0);
    if (!(value - value == 0.0f)) return;  // infinite or NaN
    scale *= value;
  }
  AdamW(Step{scale, decay, beta1, rest1, beta2, rest2, rate, correction, eps}).Process(table, tensors);
}
