"""Sharding of tensors and sequences over ranks, independent of the training loop."""
