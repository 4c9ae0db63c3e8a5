// The dtype template: a kernel file sets HAL_SELF to its own name and includes this header, which includes the file
// again once per dtype with
//   T           the element type in memory          real     the type of arithmetic and statistics
//   LOAD(p)     *p as real                          STORE(p, v)  rounds v to T at p
//   NAME(f)     f_<dtype>                           RNAME(f) f_<dtype of real>
// and HAL_BODY defined. HAL_DISPATCH(dtype, f, args...) then calls the instance for a dtype.
//
// A file that takes long to compile is divided: it defines HAL_F32_ONLY, unless <name>_others.c, which includes it, has
// defined HAL_OTHERS. The two are in different libraries, so that a float32 run does not wait for the other dtypes.
#define HAL_BODY
#define HAL_CONCAT_(a, b) a##_##b
#define HAL_CONCAT(a, b) HAL_CONCAT_(a, b)
#define NAME(f) HAL_CONCAT(f, T)
#define RNAME(f) HAL_CONCAT(f, REAL)
#define LOAD(p) NAME(load)(p)
#define STORE(p, value) NAME(store)(p, value)

#define real float
#define REAL f32
#ifndef HAL_OTHERS
#define T f32
#include HAL_SELF
#undef T
#endif
#ifndef HAL_F32_ONLY
#define T bf16
#include HAL_SELF
#undef T
#define T f16
#include HAL_SELF
#undef T
#endif
#undef real
#undef REAL
#ifndef HAL_F32_ONLY
#define real double
#define REAL f64
#define T f64
#include HAL_SELF
#undef T
#undef real
#undef REAL
#endif
#undef HAL_BODY

// A dtype of the other library is a mistake of the caller, which must not compute anything.
#ifdef HAL_F32_ONLY
#define HAL_DISPATCH(dtype, f, ...)         \
    do {                                    \
        if ((dtype) != HAL_F32) abort();    \
        f##_f32(__VA_ARGS__);               \
    } while (0)
#elif defined HAL_OTHERS
#define HAL_DISPATCH(dtype, f, ...)                     \
    switch (dtype) {                                    \
        case HAL_BF16: f##_bf16(__VA_ARGS__); break;    \
        case HAL_F16: f##_f16(__VA_ARGS__); break;      \
        case HAL_F64: f##_f64(__VA_ARGS__); break;      \
        default: abort();                               \
    }
#else
#define HAL_DISPATCH(dtype, f, ...)                     \
    switch (dtype) {                                    \
        case HAL_F32: f##_f32(__VA_ARGS__); break;      \
        case HAL_BF16: f##_bf16(__VA_ARGS__); break;    \
        case HAL_F16: f##_f16(__VA_ARGS__); break;      \
        default: f##_f64(__VA_ARGS__);                  \
    }
#endif
