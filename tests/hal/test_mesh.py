"""The rank order is Megatron's, groups partition the world, and invalid sizes are refused before anything starts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.mesh import DIMS, EXPERT_DIMS, Layout, Mesh
from hal.testing import Reference
from hal.testing.processes import run_processes

sizes = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, pp = (draw(sizes) for _ in range(4))
    experts = draw(st.sampled_from([n for n in range(1, tp * cp * dp + 1) if tp * cp * dp % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0]))
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=experts // etp, etp=etp)


def test_megatrons_example_of_16_ranks() -> None:
    """parallel_state.py's docstring: tp 2, pp 4, so dp 2."""
    layout = Layout.of_world(16, tp=2, pp=4)
    groups = {d: sorted({tuple(layout.group(r, d)) for r in range(16)}) for d in ("tp", "dp", "pp")}
    assert groups["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert groups["dp"] == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups["pp"] == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]


def test_the_order_of_all_dimensions() -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=2, ep=2, etp=4)
    assert [layout.group(0, d)[1] for d in DIMS] == [1, 2, 4, 16]
    assert [layout.group(0, d)[1] for d in EXPERT_DIMS] == [1, 4, 8, 16]


def test_the_ranks_of_experts_are_megatrons() -> None:
    """parallel_state.py numbers the ranks of experts without context parallelism, so that they share its ranks."""
    layout = Layout.of_world(8, cp=2, ep=4)
    groups = {d: sorted({tuple(layout.group(r, d)) for r in range(8)}) for d in ("cp", "dp", "ep", "edp")}
    assert groups["cp"] == [(0, 1), (2, 3), (4, 5), (6, 7)] and groups["dp"] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups["ep"] == [(0, 1, 2, 3), (4, 5, 6, 7)] and groups["edp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    layout = Layout.of_world(8, tp=2, ep=4)  # expert tensor parallelism of 1
    assert layout.group(0, "ep") == [0, 1, 2, 3] and layout.group(0, "etp", "ep") == [0, 1, 2, 3]
    layout = Layout.of_world(8, tp=2, ep=2, etp=2)
    assert layout.group(0, "ep") == [0, 2] and layout.group(1, "etp", "ep") == [0, 1, 2, 3]


@given(layouts())
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    assert [layout.rank(**layout.coordinates(r)) for r in range(layout.world)] == list(range(layout.world))


@given(layouts(), st.sets(st.sampled_from(DIMS)), st.sampled_from([DIMS, EXPERT_DIMS]))
def test_groups_partition_the_world(layout: Layout, numbers: set[str], known: tuple[str, ...]) -> None:
    dims = {known[DIMS.index(name)] for name in numbers}
    groups = {tuple(layout.group(r, *dims)) for r in range(layout.world)}
    assert sorted(itertools.chain(*groups)) == list(range(layout.world))
    assert all(r in layout.group(r, *dims) for r in range(layout.world))


def test_what_is_not_given_is_one_and_the_rest_are_replicas() -> None:
    assert Layout(tp=2, pp=2).rank(pp=1) == 2, "a coordinate that is not given is 0"
    assert Layout() == Layout(tp=1, cp=1, dp=1, pp=1, ep=1, etp=1) and Layout.of_world(8) == Layout(dp=8)
    assert Layout.of_world(48, tp=2, cp=3, ep=2, pp=2) == Layout(tp=2, cp=3, dp=4, pp=2, ep=2)


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(hal.ContractError, match=r"world size 8 is not divisible by tp\*pp = 2\*3 = 6"):
        Layout.of_world(8, tp=2, pp=3)
    with pytest.raises(hal.ContractError, match="tp must be"):
        Layout(tp=0)
    with pytest.raises(hal.ContractError, match=r"world size 6 is not divisible by ep = 4; start a multiple of 4"):
        Layout.of_world(6, tp=2, ep=4)
    with pytest.raises(hal.ContractError, match=r"the 4 ranks of tp\*cp\*dp are not divisible by etp\*ep = 1\*3"):
        Layout(tp=4, ep=3)
    for dims in (("sp",), ("dp", "ep")):
        with pytest.raises(hal.ContractError, match="no group of the dimensions"):
            Layout().group(0, *dims)
    for rank in (-1, 4):
        with pytest.raises(hal.ContractError, match="not in a world of 4"):
            Layout(tp=2, pp=2).coordinates(rank)


def _groups() -> dict[str, tuple[int, list[int]]]:
    mesh = Mesh(Layout(tp=2, dp=2), hal.use("cpu_ref"), timeout=30)
    groups = {}
    for dims in (("tp",), ("dp",), ("tp", "dp")):
        comm = mesh.comm(*dims)
        groups["-".join(dims)] = (comm.rank, comm.all_gather(torch.tensor([mesh.rank])).tolist())
    assert (mesh.world.name, mesh.comm("tp").name, mesh.comm("pp").size) == ("world", "tp", 1)
    assert mesh.torch_group("pp").size() == 1 and mesh.torch_group("tp").size() == 2
    assert mesh.device_mesh("dp").size() == 2 and mesh.comm("tp") is mesh.comm("tp")
    return groups


def test_communicators_reach_the_ranks_of_the_layout() -> None:
    r = run_processes(4, _groups)
    assert r[2] == {"tp": (0, [2, 3]), "dp": (1, [0, 2]), "tp-dp": (2, [0, 1, 2, 3])}


class WithoutComm(Reference):
    """A backend that cannot communicate."""

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> hal.Comm:
        raise AssertionError("a group of one rank asked the backend for a communicator")


def test_one_rank_needs_no_communication_of_the_backend() -> None:
    mesh = Mesh(Layout(), WithoutComm())
    assert (mesh.rank, mesh.world.size, mesh.at) == (0, 1, dict.fromkeys((*DIMS, *EXPERT_DIMS), 0))
    assert mesh.timeout == 600.0
    with pytest.raises(hal.ContractError, match="has no torch process group"):
        mesh.torch_group("dp")
    for dims in (*((d,) for d in DIMS), DIMS):
        comm = mesh.comm(*dims)
        assert (comm.rank, comm.size) == (0, 1)
        assert comm.all_gather(torch.tensor([5])).tolist() == [5]


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(hal.ContractError, match="has 2 ranks, but 1 were started"):
        Mesh(Layout(tp=2), hal.use("cpu_ref"))
