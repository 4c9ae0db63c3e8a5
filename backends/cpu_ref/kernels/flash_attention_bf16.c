// Flash attention on bfloat16 tensors where the CPU multiplies pairs of them into floats (AVX512-BF16); elsewhere the
// products are those of float32.
#include "flash_attention_bf16_api.h"

#include "flash_attention_plan.h"
#ifdef FA_HAVE_BF16
#define FA_KIND bf16
#define FA_KIND_BF16
#include "flash_attention_kind.h"

void hal_flash_attention_add_bf16(void) { fa_add(HAL_BF16, fa_forward_bf16, fa_backward_bf16); }
#else
void hal_flash_attention_add_bf16(void) { fa_add(HAL_BF16, fa_forward_f32, fa_backward_f32); }
#endif
