"""Where a run's numbers go while it runs: TensorBoard's event files, and Weights & Biases where it is asked for.

Both are imported when a run begins that uses them; a run without them needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hal import HalError

from .config import Config


class Tracker(Protocol):
    """Takes numbers by name."""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """The numbers of an iteration."""

    def close(self) -> None:
        """No more will come."""


def trackers(config: Config, folder: Path, options: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a run whose results are in `folder`. Raises HalError for one that is not installed."""
    found: list[Tracker] = [TensorBoard(folder)]
    if config.wandb_project is not None:
        found.append(WeightsAndBiases(config, folder, options))
    return found


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise HalError(
                f"events need tensorboard ({error}); install it with: pip install 'torch-hal[train]'"
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of --wandb-project, with the same numbers and the options. WANDB_MODE=offline keeps it in the folder."""

    def __init__(self, config: Config, folder: Path, options: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise HalError(
                f"--wandb-project needs wandb ({error}); install it with: pip install 'torch-hal[wandb]'"
            ) from None
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
