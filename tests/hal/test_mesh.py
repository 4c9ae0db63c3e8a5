"""The rank order is Megatron's, groups partition the world, and wrong sizes are refused before anything starts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hal
from hal.mesh import DIMS, Layout, Mesh
from hal.testing.processes import run_processes

sizes = st.integers(1, 3)
layouts = st.builds(Layout, tp=sizes, cp=sizes, ep=sizes, dp=sizes, pp=sizes)


def test_megatrons_example_of_16_ranks() -> None:
    """parallel_state.py's docstring: tp 2, pp 4, so dp 2."""
    layout = Layout.of_world(16, tp=2, pp=4)
    groups = {d: sorted({tuple(layout.group(r, d)) for r in range(16)}) for d in ("tp", "dp", "pp")}
    assert groups["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert groups["dp"] == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups["pp"] == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]


def test_the_order_of_all_five_dimensions() -> None:
    layout = Layout(tp=2, cp=2, ep=2, dp=2, pp=2)
    assert [layout.group(0, d)[1] for d in DIMS] == [1, 2, 4, 8, 16]


@settings(deadline=None)
@given(layouts)
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    assert [layout.rank(**layout.coordinates(r)) for r in range(layout.world)] == list(range(layout.world))


@settings(deadline=None)
@given(layouts, st.sets(st.sampled_from(DIMS)))
def test_groups_partition_the_world(layout: Layout, dims: set[str]) -> None:
    groups = {tuple(layout.group(r, *dims)) for r in range(layout.world)}
    assert sorted(itertools.chain(*groups)) == list(range(layout.world))
    assert all(r in layout.group(r, *dims) for r in range(layout.world))


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(hal.ContractError, match=r"tp 2 x pp 3 = 6 ranks, which do not divide a world of 8"):
        Layout.of_world(8, tp=2, pp=3)
    with pytest.raises(hal.ContractError, match="tp must be"):
        Layout(tp=0)
    with pytest.raises(hal.ContractError, match="no dimension"):
        Layout().group(0, "sp")


def _groups() -> dict[str, tuple[int, list[int]]]:
    import torch

    mesh = Mesh(Layout(tp=2, dp=2), hal.use("cpu_ref"), timeout=30)
    found = {}
    for dims in (("tp",), ("dp",), ("tp", "dp")):
        comm = mesh.comm(*dims)
        found["-".join(dims)] = (comm.rank, comm.all_gather(torch.tensor([mesh.rank])).tolist())
    assert mesh.device_mesh("dp").size() == 2 and mesh.comm("tp") is mesh.comm("tp")
    return found


def test_communicators_reach_the_ranks_of_the_layout() -> None:
    r = run_processes(4, _groups)
    assert r[2] == {"tp": (0, [2, 3]), "dp": (1, [0, 2]), "tp-dp": (2, [0, 1, 2, 3])}


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(hal.ContractError, match="has 2 ranks, but 1 were started"):
        Mesh(Layout(tp=2), hal.use("cpu_ref"))
