"""The thin GPT: torch, `hal.ops`, the configuration and the sharding of tensors, and nothing else."""

from .model import GPT

__all__ = ["GPT"]
