"""The number of communicators of a rank, for devices whose communicators keep buffers of their own.

`Mesh` creates one communicator for each set of ranks; sets that are equal share it. Those that the trainer requests are
counted here without listing ranks, because a search compares thousands of layouts of many devices.
"""

from __future__ import annotations

from hal.mesh import DIMS, EXPERT_DIMS, Layout

from ...config.parallel_layout import ParallelLayout
from ...config.schema import Config


def communicators(c: Config, plan: ParallelLayout) -> int:
    """Communicators of more than one rank on the rank that has the most: an upper bound, because some transports
    create a communicator with its first collective."""
    requested = [("tp", "cp", "dp", "pp"), ("tp",), ("cp",), ("dp", "cp"), ("pp",), ("tp", "dp", "cp")]
    if c.num_experts is not None:
        requested += [("etp", "ep"), ("ep",), ("etp",), ("tp", "cp"), ("dp",), ("edp",)]
    sets = {_ranks(plan.layout, dims) for dims in requested} - {()}
    # Context parallelism by both methods divides its group in two ways.
    count = len(sets) + 2 * (1 < c.ulysses_degree < plan.layout.cp)
    tied = not c.untie_embeddings_and_output_weights
    # The first and the last rank of a pipeline are all of its ranks if it has two.
    return count + (tied and plan.layout.pp > 2 and plan.rank_of(0) != plan.rank_of(plan.stages - 1))


def _ranks(layout: Layout, dims: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """(stride, size) of the ranks that differ from a rank in `dims`, adjacent ones joined: equal for equal sets."""
    among = DIMS if set(dims) <= set(DIMS) else EXPERT_DIMS
    joined: list[tuple[int, int]] = []
    stride = 1
    for name in among:
        size = getattr(layout, name)
        if name in dims and size > 1:
            if joined and joined[-1][0] * joined[-1][1] == stride:
                joined[-1] = joined[-1][0], joined[-1][1] * size
            else:
                joined.append((stride, size))
        stride *= size
    return tuple(joined)
