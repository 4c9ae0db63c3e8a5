"""Checkpoints on disk: written atomically, and validated when they are read."""
