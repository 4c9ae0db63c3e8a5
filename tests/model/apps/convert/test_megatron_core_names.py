"""Names and shapes match megatron-core's own GPTModel: plain, in its sharded state dicts, and on a stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_options import LLAMA_OPTIONS

import hal
from hal import HalError
from hal.model.apps.convert.megatron_core import from_megatron_core, to_distributed, to_megatron_core, unstack_layers
from hal.model.config.schema import Config
from hal.testing.processes import run_processes

SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 100}
GPT2 = SIZES
LLAMA = {**SIZES, **LLAMA_OPTIONS, "num_query_groups": 2}


def _shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items() if "_extra_state" not in name}


def _both(options: dict[str, Any], tp: int, pp: int) -> list[Any]:
    import torch.distributed as dist
    from megatron_models import core_model

    from hal.mesh import Layout, Mesh
    from hal.model.gpt.model import GPT
    from hal.model.parallel.tensor_sharding import Parallel

    hal.use("cpu_ref")
    mesh = Mesh(Layout(tp=tp, pp=pp), hal.backend(), timeout=60.0)
    if not dist.is_initialized():  # for one process, HAL needs no process group, but megatron-core does
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    config = Config(**options)
    stage, per = mesh.at["pp"], config.num_layers // pp
    ours = GPT(
        config,
        torch.device("cpu"),
        Parallel(tp=mesh.comm("tp")),
        layers=range(stage * per, stage * per + per),
        first=stage == 0,
        last=stage == pp - 1,
    )
    theirs = core_model(config, tp=tp, pp=pp)
    named = to_megatron_core(ours.state_dict(), first_layer=stage * per)
    back = from_megatron_core(theirs.state_dict(), first_layer=stage * per)
    sharded = {s.key: tuple(s.global_shape) for s in _sharded_tensors(theirs.sharded_state_dict())}
    return [
        (_shapes(named), _shapes(theirs.state_dict())),
        (_shapes(back), _shapes(ours.state_dict())),
        (sharded, {n: tuple(t.shape) for n, t in ours.state_dict().items()}),
    ]


def _sharded_tensors(tree: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    built = [v.build() if isinstance(v, ShardedTensorFactory) else v for v in tree.values()]
    flat = [
        part
        for v in built
        for part in (v if isinstance(v, (list, tuple)) else v.values() if isinstance(v, dict) else [v])
    ]
    return [v for v in flat if isinstance(v, ShardedTensor)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_names_and_shapes_are_those_of_megatron_cores_model(options: dict[str, Any]) -> None:
    # With weights tied across stages, megatron-core requires a CUDA device when the model is built.
    stages = 2 if "untie_embeddings_and_output_weights" in options else 1
    for tp, pp in ((1, 1), (2, stages)):
        for rank, (plain, back, (sharded, ours)) in enumerate(run_processes(tp * pp, _both, options, tp, pp)):
            if (tp, pp) == (1, 1):
                whole = {name: torch.empty(shape) for name, shape in ours.items()}
                assert sharded == _shapes(to_distributed(whole))
            assert plain[0] == plain[1], f"rank {rank}"
            assert back[0] == back[1], f"rank {rank}"


def test_there_and_back_gives_the_same_tensors() -> None:
    from hal.model.gpt.model import GPT

    with torch.no_grad():
        ours = dict(GPT(Config(**LLAMA), torch.device("cpu")).state_dict())
    core = to_megatron_core(ours, transformer_engine=True)
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in core
    for again in (from_megatron_core(core), from_megatron_core(unstack_layers(to_distributed(ours)))):
        assert set(again) == set(ours) and all(torch.equal(again[n], ours[n]) for n in ours)


def test_what_the_other_model_does_not_have_is_refused() -> None:
    x = torch.zeros(1)
    for rest in (
        "mlp.shared_experts.gate_weight",
        "mlp.experts.local_experts.0.linear_fc1.bias",
        "post_attn_norm.weight",
    ):
        for convert in (to_megatron_core, from_megatron_core, to_distributed):
            with pytest.raises(HalError, match="only parameters that a GPT has in both HAL and megatron-core"):
                convert({f"decoder.layers.0.{rest}": x})
    with pytest.raises(HalError, match="before the stage's first layer"):
        to_megatron_core({"decoder.layers.1.mlp.linear_fc1.weight": x}, first_layer=2)
    with pytest.raises(HalError, match=r"layers \[0\]"):
        to_distributed({"decoder.layers.1.mlp.linear_fc1.weight": x})
    with pytest.raises(HalError, match=r"experts \[0\] are missing"):
        from_megatron_core({"decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight": x})
    with pytest.raises(HalError, match="not divisible into the 3 experts of the rank"):
        from_megatron_core({"decoder.layers.0.mlp.experts.weight1": torch.zeros(2, 4)}, experts=3)
    assert from_megatron_core({"decoder.layers.0.mlp.linear_fc1._extra_state": None}) == {}
