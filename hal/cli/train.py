"""`hal train`: the trainer is in hal.model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The options of `hal train`."""
    from hal.model.arguments import parser as made

    return made()


def main(argv: Sequence[str]) -> int:
    """Runs the trainer and returns its exit code."""
    from hal.model.train import main as train

    return train(argv)
