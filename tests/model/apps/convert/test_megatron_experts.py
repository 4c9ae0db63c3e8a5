"""Experts and latent attention in Megatron's checkpoints: what stock megatron-core wrote has its logits here, and it
loads HAL's checkpoints, at every layout and with both kinds of experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import PADDED, load_ours, save_ranks, save_theirs
from models import DEEPSEEK, MIXTRAL, VOCABULARY, assert_equal_weights, hal_logits, random_weights

from hal import HalError
from hal.model.apps.convert import hal_format, megatron_distributed, megatron_ranks
from hal.testing.processes import run_processes

MODELS = pytest.mark.parametrize("options", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
LAYOUTS: list[dict[str, Any]] = [
    {"ep": 2},
    {"tp": 2},
    {"pp": 2, "ep": 4},
    {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "grouped": True},
    {"tp": 2, "ep": 2, "transformer_engine": True},
    {"pp": 2, "ep": 2, "transformer_engine": True, "grouped": True},
]


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_of_files_holds_the_same_model(options: Any, layout: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(options)
    folder = megatron_ranks.write(weights, tmp_path, divisible_by=8, **layout)
    ranks = [layout.get(name, 1) for name in ("tp", "pp", "ep")]
    assert len(list(folder.glob("mp_rank_*/model_optim_rng.pt"))) == ranks[0] * ranks[1] * ranks[2]
    assert_equal_weights(megatron_ranks.read(tmp_path, vocabulary=VOCABULARY), weights)


@MODELS
def test_a_distributed_checkpoint_holds_the_same_model(options: Any, tmp_path: Path) -> None:
    weights = random_weights(options, dtype=torch.bfloat16)
    megatron_distributed.write(weights, tmp_path)
    assert_equal_weights(megatron_distributed.read(tmp_path, vocabulary=VOCABULARY), weights)


def test_ranks_with_whole_experts_leave_out_files(tmp_path: Path) -> None:
    """Of TP2, EP2 and an expert-tensor-parallel size of 1, Megatron-LM has two ranks: (0, 0) and (1, 1)."""
    weights = random_weights(DEEPSEEK)
    divided = megatron_ranks.write(weights, tmp_path / "divided", tp=2, divisible_by=8)
    whole = megatron_ranks.write(weights, tmp_path / "whole", ep=2, divisible_by=16)
    for rank in (0, 1):
        dense = torch.load(divided / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)
        expert = torch.load(whole / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt", weights_only=False)
        experts = {name: tensor for name, tensor in expert["model"].items() if ".experts." in name}
        dense["model"] = {n: t for n, t in dense["model"].items() if ".experts." not in n} | experts
        vars(dense["args"]).update(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
        folder = tmp_path / "both" / f"mp_rank_{rank:02d}_{rank:03d}"
        folder.mkdir(parents=True)
        torch.save(dense, folder / "model_optim_rng.pt")
    assert_equal_weights(megatron_ranks.read(tmp_path / "both", vocabulary=VOCABULARY), weights)
    (folder / "model_optim_rng.pt").unlink()
    folder.rmdir()
    with pytest.raises(HalError, match="has the files of 1 ranks, but its args have tensor_model_parallel_size = 2"):
        megatron_ranks.read(tmp_path / "both")


def test_layouts_that_do_not_divide_the_model_are_refused(tmp_path: Path) -> None:
    for options, layout, what in (
        (MIXTRAL, {"ep": 3}, "4 experts are not divisible by 3"),
        (DEEPSEEK, {"tp": 8}, "query groups"),
        ({**DEEPSEEK, "q_lora_rank": 13}, {"tp": 2}, "13 rows of the down-projection of queries"),
        ({**DEEPSEEK, "num_experts": None, "moe_ffn_hidden_size": None}, {"ep": 2}, "no experts that 2"),
    ):
        with pytest.raises(HalError, match=what):
            megatron_ranks.write(random_weights(options), tmp_path, **layout)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@MODELS
def test_what_megatron_wrote_has_its_logits_here(options: Any, tmp_path: Path, cpu_ref: Any) -> None:
    """Saved by one process in both formats, then by the ranks of layouts, with experts one by one and grouped."""
    (logits,) = run_processes(1, save_theirs, options, str(tmp_path), timeout=600.0)
    expected = torch.tensor(logits)[..., :VOCABULARY]
    weights = megatron_ranks.read(tmp_path / "legacy", vocabulary=VOCABULARY)
    assert_equal_weights(megatron_distributed.read(tmp_path / "distributed", vocabulary=VOCABULARY), weights)
    hal_format.write(weights, tmp_path / "here")
    torch.testing.assert_close(hal_logits(tmp_path / "here"), expected, rtol=2e-5, atol=2e-5)
    for n, (layout, grouped) in enumerate(
        [({"tp": 2}, False), ({"ep": 2}, True), ({"tp": 2, "ep": 2}, True), ({"pp": 2, "ep": 2}, False)]
    ):
        ranks, to = math.prod(layout.values()), tmp_path / str(n)
        run_processes(ranks, save_ranks, options, str(tmp_path), str(to), layout, grouped, timeout=600.0)
        assert_equal_weights(megatron_ranks.read(to, vocabulary=VOCABULARY), weights)


@pytest.mark.slow
@MODELS
@pytest.mark.parametrize(
    "layout, grouped",
    [
        ({}, False),
        pytest.param({"tp": 2}, False, marks=pytest.mark.nightly),
        pytest.param({"ep": 2}, True, marks=pytest.mark.nightly),
        pytest.param({"pp": 2, "ep": 2}, False, marks=pytest.mark.nightly),
        ({"tp": 2, "ep": 2}, True),
    ],
    ids=str,
)
def test_what_is_written_here_loads_in_megatron_core(
    options: Any, layout: dict[str, int], grouped: bool, tmp_path: Path, cpu_ref: Any
) -> None:
    weights = random_weights(options)
    hal_format.write(weights, tmp_path / "ours")
    megatron_ranks.write(
        weights, tmp_path / "legacy", divisible_by=PADDED // layout.get("tp", 1), grouped=grouped, **layout
    )
    megatron_distributed.write(weights, tmp_path / "distributed", divisible_by=PADDED)
    ranks = math.prod(layout.values())
    for answer, different in run_processes(ranks, load_ours, options, str(tmp_path), layout, grouped, timeout=600.0):
        assert different == []
        if answer is not None:
            expected = torch.tensor(answer)[..., :VOCABULARY]
            torch.testing.assert_close(hal_logits(tmp_path / "ours"), expected, rtol=2e-5, atol=2e-5)
