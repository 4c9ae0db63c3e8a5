"""Which products of a transformer layer are in float8 (--fp8-format), and how their scales are made (--fp8-recipe)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hal import Comm
from hal.nn import Float8Products

from ..config.schema import Config
from .latent_attention import DownProjection
from .layers import ColumnParallelLinear, RowParallelLinear
from .moe import GroupedLinear

OPERANDS = ("x", "weight", "dy")
HISTORY = "amax_history"
"""The name of the buffer of `DelayedScales`."""

_Part = ColumnParallelLinear | RowParallelLinear | DownProjection | GroupedLinear


def set_products(layer: nn.Module, config: Config, number: int) -> None:
    """Where --fp8-format does so, chooses float8 for the linear layers in transformer layer `number`."""
    if not config.in_float8(number):
        return
    gradient = torch.float8_e5m2 if config.fp8_format == "hybrid" else torch.float8_e4m3fn
    for part in layer.modules():
        if not isinstance(part, _Part):
            continue
        magnitude = None
        if config.fp8_recipe == "delayed":
            magnitude = DelayedScales(part, config).magnitude
        elif config.fp8_recipe == "tensorwise" and any(comms := _sharing(part)):
            magnitude = functools.partial(_of_all, dict(zip(OPERANDS, comms)))
        part.products = Float8Products(config.fp8_recipe == "blockwise", gradient, magnitude)


def _sharing(part: _Part) -> tuple[Sequence[Comm], ...]:
    """The ranks that hold parts of one x, one weight and one dy of a layer. Those of one micro-batch's tokens that are
    given to an expert are on one rank, and so are parts of a batch that other replicas compute."""
    p = part.parallel
    rows: Sequence[Comm] = (p.cp,)
    if isinstance(part, GroupedLinear):
        column, comm, rows = part.shard.dim == 1, p.etp, ()
    elif isinstance(part, DownProjection):
        rows = (p.cp, p.tp) if p.sequence else rows
        return tuple([c for c in comms if c.size > 1] for comms in (rows, (), rows))
    else:
        column, comm = isinstance(part, ColumnParallelLinear), p.tp
    channels = (*rows, comm)
    found = (rows, (comm,), channels) if column else (channels, (comm,), rows)
    return tuple([c for c in comms if c.size > 1] for comms in found)


def _of_all(comms: dict[str, Sequence[Comm]], operand: str, amax: Tensor) -> Tensor:
    """The largest magnitude (float32 scalar) of all parts of an operand, so that the scale does not depend on how ranks
    share it."""
    for comm in comms[operand]:
        amax = comm.all_reduce(amax, "max")
    return amax


class DelayedScales:
    """The scales of a layer's operands from their largest magnitudes in earlier iterations.

    The layer gets a buffer `amax_history`, float32 [--fp8-amax-history-len, 3 (OPERANDS)], the newest iteration first;
    0 stands for none. An operand without any gets a scale from its present largest magnitude.
    """

    def __init__(self, part: nn.Module, config: Config) -> None:
        self.part, self.factor = part, 2.0**config.fp8_margin
        self.newest_only = config.fp8_amax_compute_algo == "most_recent"
        device = next(part.parameters()).device
        part.register_buffer(HISTORY, torch.zeros(config.fp8_amax_history_len, len(OPERANDS), device=device))
        self.recorded = torch.zeros(len(OPERANDS), device=device)
        self._used: Tensor | None = None

    @property
    def history(self) -> Tensor:
        """The buffer, which the layer may have moved."""
        history = getattr(self.part, HISTORY)
        assert isinstance(history, Tensor)
        return history

    def magnitude(self, operand: str, amax: Tensor) -> Tensor:
        """Records an operand's largest magnitude (float32 scalar); the one from which to make its scale."""
        if self._used is None:
            self._used = (self.history[0] if self.newest_only else self.history.amax(0)) * self.factor
        n = OPERANDS.index(operand)
        self.recorded[n] = torch.maximum(self.recorded[n], amax)
        return torch.where(self._used[n] > 0.0, self._used[n], amax)

    def start(self) -> None:
        """Begins an iteration; forgets what an evaluation, or a first attempt at this iteration, has recorded."""
        self._used = None
        self.recorded.zero_()

    def update(self, recorded: Tensor, applied: Tensor) -> None:
        """Puts the largest magnitudes of an iteration [3] into the history, if `applied` (bool scalar)."""
        finite = torch.where(torch.isfinite(recorded), recorded, 0.0)
        newer = torch.cat((finite[None], self.history[:-1]))
        self.history.copy_(torch.where(applied, newer, self.history))
        self._used = None


def delayed_scales(model: nn.Module) -> Iterator[DelayedScales]:
    """Those of a model's layers, in order."""
    for part in model.modules():
        products = part.products if isinstance(part, _Part) else None
        owner = getattr(getattr(products, "magnitude", None), "__self__", None)
        if isinstance(owner, DelayedScales):
            yield owner
