"""`hal train`: the trainer is in hal.model."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the trainer and returns its exit code."""
    from hal.model.train import main as train

    return train(argv)
