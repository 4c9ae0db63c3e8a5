"""Checkpoints of other programs: their tensors under HAL's names, and HAL's under theirs.

Every reader gives a `Weights`, every writer takes one; nothing read here is ever unpickled freely.
"""
