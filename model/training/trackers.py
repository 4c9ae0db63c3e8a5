"""Metrics of a run while it runs: TensorBoard's event files, and Weights & Biases with --wandb-project.

Each package is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hal import HalError

from ..common.optional_packages import optional_package
from ..config.schema import Config


class Tracker(Protocol):
    """Receives named metrics."""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of an iteration."""

    def close(self) -> None:
        """Flushes and closes; called once, at the end."""


def trackers(config: Config, folder: Path, options: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a run that writes to `folder`. Raises HalError for a package that is not installed."""
    active: list[Tracker] = [TensorBoard(folder if config.tensorboard_dir is None else Path(config.tensorboard_dir))]
    if config.wandb_project is not None:
        active.append(WeightsAndBiases(config, folder, options))
    return active


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path) -> None:
        with optional_package("events need tensorboard", "torch-hal[train]"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project, with the same metrics and the options. WANDB_MODE=offline keeps its files in the folder."""

    def __init__(self, config: Config, folder: Path, options: Mapping[str, Any]) -> None:
        with optional_package("--wandb-project needs wandb", "torch-hal[wandb]"):
            import wandb
        try:
            self._run: Any = wandb.init(
                project=config.wandb_project,
                name=config.wandb_exp_name or folder.name,
                dir=str(folder),
                config=dict(options),
            )
        except wandb.Error as error:
            hint = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise HalError(f"--wandb-project {config.wandb_project}: {' '.join(str(error).split())}; {hint}") from None

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        self._run.finish()
