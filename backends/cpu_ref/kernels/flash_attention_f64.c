// Flash attention in double arithmetic, for gradient checks of float64 tensors.
#define FA_KIND f64
#define FA_KIND_F64
#include "flash_attention_kind.h"
