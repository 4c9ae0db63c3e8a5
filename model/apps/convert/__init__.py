"""Conversion of checkpoints between HAL and other programs, which name and order the tensors differently.

Every reader returns a `Weights` and every writer takes one. Files are never unpickled without restrictions.
"""
