// Flash attention on bfloat16 tensors where the CPU multiplies pairs of them into floats (AVX512-BF16).
#include "flash_attention_plan.h"
#ifdef FA_HAVE_BF16
#define FA_KIND bf16
#define FA_KIND_BF16
#include "flash_attention_kind.h"
#else
typedef int fa_bf16_needs_avx512_bf16;  // a translation unit may not be empty
#endif
