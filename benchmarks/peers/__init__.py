"""The GPT of the training step: in plain torch, in megatron-core and, to compare with them, in HAL."""
