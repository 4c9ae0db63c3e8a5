// Products of a linear layer in float32: the weight gradient, and layers with few outputs or inputs.
#define LINEAR_KIND f32
#define FA_KIND_F32
#include "linear_kind.h"
#include "linear_narrow.h"
