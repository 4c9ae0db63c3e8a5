"""The GPT model, which depends only on torch, `hal.ops`, the configuration and the sharding of tensors."""

from .model import GPT

__all__ = ["GPT"]
