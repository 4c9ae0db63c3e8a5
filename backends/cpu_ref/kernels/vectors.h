// Compiler vectors as wide as the registers of the target, for kernels that keep entire tiles in registers (attention,
// the weight gradient of linear). Included once per arithmetic kind: FA_KIND_F32, FA_KIND_F64 or FA_KIND_BF16.
//
//   real   arithmetic and accumulation (float or double); vec is a vector of W of them, ivec of integers as wide
//   unit   the operand type of the micro-kernel: KU consecutive elements along the summed dimension, i.e. a float or
//          a double (KU = 1), or two bfloat16 (KU = 2) for vdpbf16ps; it has the width of real, so that shapes agree
#pragma once
#include "common.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define FA_VECTOR_BYTES 64
#define FA_MANY_REGISTERS 1
#elif defined(__AVX2__)
#define FA_VECTOR_BYTES 32
#define FA_MANY_REGISTERS 0
#else
#define FA_VECTOR_BYTES 16
#ifdef __aarch64__
#define FA_MANY_REGISTERS 1
#else
#define FA_MANY_REGISTERS 0
#endif
#endif

// Whether products use AMX. HAL_AMX: the system permits it (build.py).
#if defined(FA_KIND_BF16) && defined(HAL_AMX) && defined(__AMX_BF16__)
#define FA_TILES 1
#else
#define FA_TILES 0
#endif

#ifdef FA_KIND_F64
typedef double real;
typedef int64_t lane;
typedef double unit;
#else
typedef float real;
typedef int32_t lane;
#ifdef FA_KIND_BF16
typedef uint32_t unit;
#else
typedef float unit;
#endif
#endif
#ifdef FA_KIND_BF16
enum { KU = 2 };
#else
enum { KU = 1 };
#endif
enum { W = FA_VECTOR_BYTES / (int)sizeof(real) };

typedef real vec __attribute__((vector_size(FA_VECTOR_BYTES)));
typedef lane ivec __attribute__((vector_size(FA_VECTOR_BYTES)));
typedef unit uvec __attribute__((vector_size(FA_VECTOR_BYTES)));
// The same types for unaligned loads and stores, allowed to alias memory of any type.
typedef real vec_at __attribute__((vector_size(FA_VECTOR_BYTES), aligned(1), may_alias));
typedef unit uvec_at __attribute__((vector_size(FA_VECTOR_BYTES), aligned(1), may_alias));
typedef unit unit_at __attribute__((aligned(1), may_alias));
typedef uint8_t bytes_at __attribute__((vector_size(FA_VECTOR_BYTES / sizeof(real)), aligned(1), may_alias));

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

HAL_INLINE vec load(const void *p) { return *(const vec_at *)p; }
HAL_INLINE void store(void *p, vec v) { *(vec_at *)p = v; }
HAL_INLINE uvec load_units(const void *p) { return *(const uvec_at *)p; }
HAL_INLINE void store_units(void *p, uvec v) { *(uvec_at *)p = v; }
HAL_INLINE vec splat(real x) { return x - (vec){0}; }  // x - 0 keeps the sign of zero, 0 + x does not
HAL_INLINE ivec splat_lane(int64_t x) { return (lane)x - (ivec){0}; }
