// CUDA's execution model on a CPU, for the kernels of ../kernels, compiled as ordinary C++ by g++.
//
// Each CUDA thread is a fiber. The threads of a block are scheduled in random order, often with some warps or threads
// running ahead of the others. Each runs until it waits at a barrier or in a warp operation, so that code with a
// missing barrier reads data that is not written yet or already overwritten. The simulator reports these errors: a
// barrier that not all threads of the block reach at the same place, a warp operation that not all lanes of its mask
// reach, a shuffle from a lane outside the mask, a launch that a GPU would refuse, an access outside of the launch's
// tensors and its shared memory, a misaligned access, and a signed integer that overflows. docs/cuda-simulator.md lists
// what is not modelled.
#pragma once
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(hal_sim::dynamic_shared)

namespace hal_sim {

struct Index {
    u32 x = 0, y = 0, z = 0;
};
extern Index thread, block, block_size, grid_size;
extern unsigned char *dynamic_shared;

enum class Vote { down, from, exchange, any };

// Both return when all participating threads have arrived; if that cannot happen, the launch fails and they never
// return.
u32 barrier(const char *file, int line, bool vote);
u32 warp(u32 mask, u32 value, Vote kind, int lane, const char *file, int line);
// How many warp operations the running thread has completed in this block.
u32 warp_operations();

// Asynchronous copies that the running thread has started in this block and not waited for.
struct Copies {
    u32 count = 0;
    struct {
        void *to;
        const void *from;
    } list[64];
};
Copies &copies();

template <class T> T shuffle(u32 mask, T value, Vote kind, int lane, const char *file, int line) {
    static_assert(sizeof(T) == 4 && std::is_trivially_copyable_v<T>, "shuffles move 32 bits");
    u32 bits;
    std::memcpy(&bits, &value, 4);
    bits = warp(mask, bits, kind, lane, file, line);
    std::memcpy(&value, &bits, 4);
    return value;
}

// What a kernel must not do: an access's address and bytes (zeros for other errors), and where in the library it is.
struct Fault {
    u64 at = 0, size = 0, code = 0;
};

// bind reads a kernel's parameters from the launcher's buffer: false if the buffer does not have their size.
struct Kernel {
    bool (*bind)(const unsigned char *bytes, u64 size);
    void (*run)();
};
void add_kernel(const char *name, Kernel kernel);

template <auto KERNEL> struct Register;
template <class... A, void (*KERNEL)(A...)> struct Register<KERNEL> {
    static_assert(((sizeof(A) % 8 == 0 && alignof(A) == 8) && ...), "parameters are packed in multiples of 8 bytes");
    static inline std::tuple<std::remove_const_t<A>...> values;
    static bool bind(const unsigned char *bytes, u64 size) {
        if (size != (sizeof(A) + ... + 0)) return false;
        std::apply([&](auto &...v) { ((std::memcpy((void *)&v, bytes, sizeof v), bytes += sizeof v), ...); }, values);
        return true;
    }
    static void run() { std::apply(KERNEL, values); }
    explicit Register(const char *name) { add_kernel(name, {bind, run}); }
};

}  // namespace hal_sim

#define threadIdx hal_sim::thread
#define blockIdx hal_sim::block
#define blockDim hal_sim::block_size
#define gridDim hal_sim::grid_size
#define __syncthreads() ((void)hal_sim::barrier(__FILE__, __LINE__, false))
#define __syncthreads_or(p) ((int)hal_sim::barrier(__FILE__, __LINE__, (p) != 0))
#define __shfl_down_sync(mask, v, d) hal_sim::shuffle(mask, v, hal_sim::Vote::down, d, __FILE__, __LINE__)
#define __shfl_sync(mask, v, lane) hal_sim::shuffle(mask, v, hal_sim::Vote::from, lane, __FILE__, __LINE__)
#define __shfl_xor_sync(mask, v, bits) hal_sim::shuffle(mask, v, hal_sim::Vote::exchange, bits, __FILE__, __LINE__)
#define __any_sync(mask, p) ((int)hal_sim::warp(mask, (p) != 0, hal_sim::Vote::any, 0, __FILE__, __LINE__))

#define HAL_JOIN2(a, b) a##b
#define HAL_JOIN(a, b) HAL_JOIN2(a, b)
#define EXPORT(...) static const hal_sim::Register<&__VA_ARGS__> HAL_JOIN(hal_export_, __COUNTER__)(#__VA_ARGS__);

inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
// A product rounded separately: the value of a volatile variable is not contracted into an FMA.
inline float __fmul_rn(float a, float b) {
    const volatile float product = a * b;
    return product;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
// All fibers run in one operating system thread, so a plain read-modify-write is atomic.
inline float atomicExch(float *at, float value) { return std::exchange(*at, value); }
inline float atomicAdd(float *at, float value) { return std::exchange(*at, *at + value); }

// With the largest error that PTX allows, up or down depending on the last bit of x; exact where x is close to 0.
inline float power_of_2(float x) {
    const double off = std::fabs(x) < 0x1p-126f ? 0.0 : __float_as_int(x) & 1 ? 0x1p-22 : -0x1p-22;
    const float value = (float)(std::exp2((double)x) * (1.0 + off));
    return value < 0x1p-126f ? 0.0f : value;
}
// Likewise, with 2^-23. Subnormal results are 0, and so are those of subnormal numbers infinite.
inline float reciprocal(float x) {
    if (std::fabs(x) < 0x1p-126f) return std::copysign(__int_as_float(0x7f800000), x);
    const float value = (float)(1.0 / x * (1.0 + (__float_as_int(x) & 1 ? 0x1p-23 : -0x1p-23)));
    return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, x) : value;
}
inline u64 wide_product(u32 a, u32 b) { return (u64)a * b; }
template <class V> void store16(V *p, const V &v) { *p = v; }
inline float f16_to_float(u16 bits) {
    const u32 exponent = bits >> 10 & 31, mantissa = bits & 1023, sign = (u32)(bits >> 15) << 31;
    if (exponent == 31) return __int_as_float((int)(sign | 0x7f800000 | mantissa << 13));
    const float magnitude = std::ldexp((float)(exponent ? mantissa + 1024 : mantissa), (int)(exponent ? exponent : 1) - 25);
    return sign ? -magnitude : magnitude;
}

// Round to nearest even, as cvt.rn does; NaN becomes the canonical NaN.
inline u16 float_to_f16(float value) {
    const u32 bits = (u32)__float_as_int(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return (u16)(sign | 0x7c00);
    // The unit in the last place of the result: 2^-24 for subnormals, else 2^(exponent - 10). rint rounds to even.
    int exponent = (int)(magnitude >> 23) - 127;
    if (exponent < -14) exponent = -14;
    const u32 units = (u32)std::rint(std::ldexp(std::fabs(value), 10 - exponent));
    return (u16)(sign | (((u32)(exponent + 14) << 10) + units));
}
inline u16 float_to_bf16(float value) {
    const u32 bits = (u32)__float_as_int(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 floats_to_bf16(float low, float high) { return (u32)float_to_bf16(high) << 16 | float_to_bf16(low); }
inline u32 floats_to_f16(float low, float high) { return (u32)float_to_f16(high) << 16 | float_to_f16(low); }
