// Flash attention in float arithmetic: float32 tensors, float16, and bfloat16 where the CPU has no bfloat16 products.
#define FA_KIND f32
#define FA_KIND_F32
#include "flash_attention_kind.h"
