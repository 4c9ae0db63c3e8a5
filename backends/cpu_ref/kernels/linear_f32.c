// The weight gradient of a linear layer in float32.
#define LINEAR_KIND f32
#define FA_KIND_F32
#include "linear_kind.h"
