"""Parallel training: how a model is laid out over ranks, and the engines of torch.distributed that run it."""
