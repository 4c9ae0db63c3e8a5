// Flash attention in double arithmetic, for gradient checks of float64 tensors.
#define FA_KIND f64
#define FA_KIND_F64
#include "flash_attention_kind.h"
#include "flash_attention_f64_api.h"

void hal_flash_attention_add_f64(void) { fa_add(HAL_F64, fa_forward_f64, fa_backward_f64); }
