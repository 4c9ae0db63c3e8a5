"""`hal train`: the trainer is in hal.model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The options of `hal train`."""
    from hal.model.config.command_line import parser as train_parser

    return train_parser()


def main(argv: Sequence[str]) -> int:
    """Runs the trainer and returns its exit code. A model of Hugging Face in --load is converted first."""
    from hal.model.apps.convert.pretrained_folder import prepare
    from hal.model.training.run import main as train

    return train(argv, prepare)
