"""The largest magnitudes from which --fp8-recipe delayed makes scales, summed up over ranks and iterations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Comm

from ..gpt.float8 import delayed_scales
from ..gpt.model import GPT


class Float8History:
    """Updates the histories of this rank's `models` once per iteration. `sharing`: the ranks with the same layers.

    Transformer Engine does so once per microbatch; the scales here are those of whole iterations, so that they do not
    depend on how a batch is divided into microbatches and over replicas.
    """

    def __init__(self, models: Sequence[GPT], sharing: Comm) -> None:
        self._scales, self._sharing = [scales for model in models for scales in delayed_scales(model)], sharing

    def start(self) -> None:
        """Begins an iteration."""
        for scales in self._scales:
            scales.start()

    def update(self, clip_factor: Tensor) -> None:
        """All ranks call it after the optimizer's step. Changes nothing if clip_factor (scalar) is not finite, like
        ops.adamw."""
        if not self._scales:
            return
        recorded = self._sharing.all_reduce(torch.stack([scales.recorded for scales in self._scales]), "max")
        applied = torch.isfinite(clip_factor)
        for scales, row in zip(self._scales, recorded):
            scales.update(row, applied.to(row.device))
