// Grouped products of bfloat16 tensors where the CPU multiplies pairs of them into floats.
#include "linear_plan.h"
#ifdef LINEAR_HAVE_BF16
#define GROUPED_KIND bf16
#define FA_KIND_BF16
#include "grouped_linear_kind.h"
#else
typedef int grouped_linear_bf16_needs_avx512_bf16;  // a translation unit may not be empty
#endif
