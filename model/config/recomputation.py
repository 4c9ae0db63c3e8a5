"""Which layers a run computes again in the backward pass, instead of keeping their activations.

Each pipeline stage recomputes its first layers: as many as --recompute-num-layers (block) or the stage's entry of
--recompute-layer-list says, or all of them. Of the layers after these, attention alone may be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .parallel_layout import layers_of_stages
from .schema import Config


def counts(c: Config, stage: int, layers: int) -> tuple[int, int]:
    """(layers recomputed as a whole, layers after these whose attention is) of a stage that has `layers` layers."""
    if lists_given(c):
        full, attention = (
            int(given[stage]) if given else 0 for given in (c.recompute_layer_list, c.select_recompute_layer_list)
        )
        return min(layers, full), min(max(0, layers - full), attention)
    if c.recompute_granularity == "full":
        return (layers if c.recompute_method == "uniform" else min(layers, c.recompute_num_layers or 1)), 0
    return 0, layers if c.recompute_granularity == "selective" else 0


def lists_given(c: Config) -> bool:
    """Whether there is a number for every stage."""
    return bool(c.recompute_layer_list or c.select_recompute_layer_list)


def recomputes_attention(c: Config, layer: int) -> bool:
    """Whether layer number `layer` computes its attention again, and only that."""
    return _places(c, layer, 1)


def chunks(c: Config, layers: Sequence[int]) -> list[tuple[Sequence[int], bool]]:
    """A stage's layers in groups that are computed one after the other, and whether a group is recomputed as a whole.

    Only --recompute-method uniform makes groups of several layers, of which the first one's input is kept.
    """
    uniform = c.recompute_granularity == "full" and c.recompute_method == "uniform"
    step = (c.recompute_num_layers or 1) if uniform else 1
    return [(layers[i : i + step], _places(c, layers[i], 0)) for i in range(0, len(layers), step)]


def _places(c: Config, layer: int, kind: int) -> bool:
    """Whether a layer is among those that entry `kind` of its stage's `counts` counts."""
    for stage, layers in enumerate(layers_of_stages(c)):
        if layer in layers:
            full, attention = counts(c, stage, len(layers))
            place = layers.index(layer)
            return place < full if kind == 0 else full <= place < full + attention
    return False


def problems(c: Config) -> Iterator[str]:
    """Contradictions between the options of recomputation."""
    if c.recompute_granularity == "full" and c.recompute_method is None:
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if c.recompute_num_layers is not None and c.recompute_num_layers > c.num_layers:
        yield f"--recompute-num-layers {c.recompute_num_layers} exceeds --num-layers {c.num_layers}"
    if lists_given(c) and c.recompute_granularity is not None:
        yield (
            "--recompute-layer-list and --select-recompute-layer-list say which layers are recomputed; remove "
            "--recompute-granularity"
        )
