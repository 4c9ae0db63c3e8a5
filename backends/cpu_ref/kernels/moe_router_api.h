// selection: the values whose largest are chosen: 0 logits, 1 sigmoid(logits), 2 softmax(logits).
// probability: 0 softmax of the chosen logits, 1 softmax of all logits, 2 sigmoid, 3 sigmoid / (sum of the chosen).
// logits [rows][experts] of `dtype`; bias [experts], real, or 0; probs [rows][topk] of `dtype` and indices [rows][topk]
// are written, or with `given`, indices are read. With groups > 0, experts come from group_topk groups. Returns 0, and
// leaves the rest undefined, if a given index is not an expert. dlogits is written completely.
int hal_moe_router_fwd(int dtype, int selection, int probability, uintptr_t logits, uintptr_t bias, int given,
                       uintptr_t probs, uintptr_t indices, int64_t rows, int64_t experts, int64_t topk, int64_t groups,
                       int64_t group_topk, double scale);
void hal_moe_router_bwd(int dtype, int probability, uintptr_t logits, uintptr_t indices, uintptr_t dprobs,
                        uintptr_t dlogits, int64_t rows, int64_t experts, int64_t topk, double scale);
