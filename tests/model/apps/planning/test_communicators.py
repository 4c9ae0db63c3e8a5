"""The planner counts the communicators that a rank of the trainer creates, and their buffers on Ascend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hal.backends.npu import device_specs
from hal.mesh import Mesh
from hal.model.apps.planning.communicators import communicators
from hal.model.apps.planning.memory import memory
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.schema import Config
from hal.model.parallel.tensor_sharding import Parallel
from hal.model.training.gradient_buckets import GradientSums

SIZES: dict[str, Any] = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 64}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True}
TP2, PP4, CP4 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}, {"context_parallel_size": 4}


class Recording:
    """A backend that notes the ranks of its communicators."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank, self.created = world, rank, list[tuple[int, ...]]()

    def comm(self, ranks: tuple[int, ...] | None = None, *, timeout: float = 0.0) -> Any:
        self.created.append(tuple(range(self.world)) if ranks is None else ranks)
        members = self.created[-1]
        return SimpleNamespace(rank=members.index(self.rank), size=len(members), name="")


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (8, {}),
        (8, TP2),
        (32, {**TP2, **PP4}),
        (32, {**TP2, **PP4, "untie_embeddings_and_output_weights": True}),
        (4, {"pipeline_model_parallel_size": 2}),
        (8, {**PP4, "pipeline_schedule": "zbv"}),
        (16, {**CP4, **TP2, "sequence_parallel": True}),
        (16, {**CP4, **TP2, "context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}),
        (16, {**TP2, **EXPERTS, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
        (16, {**PP4, **EXPERTS, "expert_model_parallel_size": 2, "sequence_parallel": False}),
    ],
    ids=str,
)
def test_as_many_as_the_rank_that_has_the_most(world: int, options: dict[str, Any]) -> None:
    config = Config(**{**SIZES, "global_batch_size": 32, "micro_batch_size": 1, **options})
    config.set_vocabulary(64)
    plan = make_parallel_layout(config, world)
    most = 0
    for rank in range(world):
        backend: Any = Recording(world, rank)
        mesh = Mesh(plan.layout, backend)
        Parallel.of(mesh, config)
        for dims in (("dp", "cp"), ("tp", "dp", "cp"), ("pp",), *([("edp",)] if config.num_experts else [])):
            mesh.comm(*dims)
        if not config.untie_embeddings_and_output_weights and plan.stages > 1:
            GradientSums._make_tied_ends(plan, mesh)
        most = max(most, len(backend.created))
    assert communicators(config, plan) == most


def test_the_buffers_of_hccl_are_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(**{**SIZES, **TP2, "global_batch_size": 32, "micro_batch_size": 1})
    config.set_vocabulary(64)
    plan = make_parallel_layout(config, 4)
    one = 400 * 2**20
    with_buffers, without = memory(config, plan, communicator=one), memory(config, plan)
    # The world, two tensor-parallel ranks and two replicas.
    assert with_buffers.total - without.total == with_buffers.buffers - without.buffers == 3 * one
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert device_specs.hccl_buffers() == one
    assert {spec.communicator for spec in device_specs.DEVICE_SPECS} == {device_specs._BUFFERS}
    monkeypatch.setenv("HCCL_BUFFSIZE", "100")
    assert device_specs.hccl_buffers() == one / 2
