// Grouped products in float32.
#include "linear_plan.h"
#ifdef LINEAR_WIDE
#define GROUPED_KIND f32
#define FA_KIND_F32
#include "grouped_linear_kind.h"
#else
typedef int grouped_linear_f32_needs_avx512;  // a translation unit may not be empty
#endif
