// activation.c for bfloat16, float16 and float64.
#define HAL_OTHERS
#include "activation.c"
