"""Tiny training runs under any layout. Results depend only on the arguments."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model_options import DEEPSEEK_OPTIONS, LATENT_OPTIONS, LLAMA_OPTIONS, SCALED_OPTIONS
from torch import Tensor

import hal
from hal.mesh import Mesh
from hal.model.config.command_line import build
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.validation import world_size
from hal.model.data.gpt_dataset import Split
from hal.model.training.trainer import Trainer
from hal.testing import Spy
from hal.testing.processes import run_processes

VOCABULARY, END = 120, 119  # padded to 128
COMMON = {
    "backend": "cpu_ref",
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY,
    "data_path": "unused",
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 100,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,  # far from the flat start at log(vocabulary), so that mistakes show in the loss
}
GPT2 = {**COMMON}
LLAMA = {**COMMON, **LLAMA_OPTIONS, "ffn_hidden_size": 48, "num_query_groups": 4}

MIXTRAL = {
    **LLAMA,
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": ("0.05",),
    "lr": 3e-3,  # rounding errors grow faster than in a dense model, since each decides a little about the next choice
    "adam_eps": 1e-6,  # with 1e-8, the rounding error of a gradient near zero changes a step by a tenth
}
DEEPSEEK = {
    **MIXTRAL,
    **DEEPSEEK_OPTIONS,
    "moe_layer_freq": "[0]+[1]*3",
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_z_loss_coeff": 0.01,
}
"""Mixtures of experts, of which the second has the options of DeepSeek-V3 but for latent attention."""
LATENT = {**DEEPSEEK, **LATENT_OPTIONS}
"""All of DeepSeek-V3's options: latent attention, and experts in all layers but the first."""
LATENT_DENSE = {**LLAMA, **LATENT_OPTIONS, "lr": 1e-3}  # norms of small vectors amplify rounding errors as experts do

SCALED = {**COMMON, **SCALED_OPTIONS, "lr": 1e-3}
"""The options of Gemma 2, Granite and SmolLM3."""


@dataclass
class Tokens:
    """A dataset whose sample n is `length` random tokens drawn from n; with `ends`, one in six ends a document."""

    length: int
    ends: bool

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(n))
        if self.ends:
            ids[ids >= VOCABULARY * 5 // 6] = END
        return {"tokens": ids[:-1], "labels": ids[1:]}


def trainer(options: dict[str, Any]) -> Trainer:
    """The trainer of this process, in the world described by a launcher or as a single process."""
    hal.use(options["backend"])
    config = build(options)
    ends = config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss
    split = Split(Tokens(config.seq_length, ends), VOCABULARY, END, config.eod_mask_loss)
    data = dict.fromkeys(("train", "valid"), split)
    layout = make_parallel_layout(config, world_size(config))
    mesh = Mesh(layout.layout, hal.backend(), timeout=min(60.0, 60.0 * config.distributed_timeout_minutes))
    return Trainer(config, data, mesh, layout)


def stored_values(run: Trainer) -> dict[str, Tensor]:
    """Copies of the tensors of a checkpoint of one process, by name."""
    whole = {name: torch.empty(shard.shape, dtype=shard.dtype) for name, shard in run.tensors().items()}
    for name, shard in run.tensors().items():
        shard.copy_to(whole[name])
    return whole


def steps(options: dict[str, Any], count: int) -> list[tuple[float, float | None]]:
    """(loss, gradient norm) of `count` iterations."""
    run = trainer(options)
    results = [run.step() for _ in range(count)]
    return [(r.loss, r.grad_norm) for r in results]


def on(world: int, options: dict[str, Any], count: int = 10) -> list[tuple[float, float | None]]:
    """`steps` on `world` processes, whose results must agree."""
    if world == 1:
        return steps(options, count)
    per_rank = run_processes(world, steps, options, count, timeout=180.0)
    assert all(r == per_rank[0] for r in per_rank), "the ranks report different numbers"
    return per_rank[0]


DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
SP, CP2 = {"sequence_parallel": True}, {"context_parallel_size": 2}
ULYSSES = {**CP2, "context_parallel_algo": "ulysses"}
HYBRID = {"context_parallel_size": 4, "context_parallel_algo": "hybrid", "ulysses_degree_in_cp": 2}
INTERLEAVED, ZBV = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}, {**PP2, "pipeline_schedule": "zbv"}
DISTRIBUTED_OPTIMIZER = {"use_distributed_optimizer": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
"""Options of the layouts that several tests use."""


WIDE_OVERLAP = {
    **COMMON,
    **TP2,
    **SP,
    "tp_comm_overlap": True,
    "bf16": True,
    "num_layers": 2,
    "hidden_size": 512,
    "ffn_hidden_size": 512,
    "init_method_std": 0.02,
    "lr": 1e-3,
    "global_batch_size": 2,
}
"""Sizes that fused operators take: the products of every layer sum 256 products or more on each of two ranks."""


def fused_steps(options: dict[str, Any], count: int) -> tuple[list[Any], Counter[tuple[str, str]]]:
    """`steps` on the backend's simulator, and how often each implementation of all_gather_linear and
    linear_reduce_scatter ran; the composition is not counted."""
    os.environ["HAL_SIMULATE"] = "1"
    run = trainer(options)
    with hal.activated(Spy(hal.backend())) as spy:
        results = [run.step() for _ in range(count)]
    counts = Counter(c for c in spy.calls if c[0] in ("all_gather_linear", "linear_reduce_scatter"))
    return [(r.loss, r.grad_norm) for r in results], counts


def fused_counts(implementation: str, count: int) -> Counter[tuple[str, str]]:
    """What `fused_steps` counts for WIDE_OVERLAP where every call of the two ops runs on `implementation`."""
    products = count * WIDE_OVERLAP["global_batch_size"] * WIDE_OVERLAP["num_layers"] * 2
    logits = count * WIDE_OVERLAP["global_batch_size"]
    names = {"all_gather_linear": 2 * products + logits, "linear_reduce_scatter": products}
    return Counter({(name, implementation): calls for name, calls in names.items()})


def close(got: list[Any], want: list[Any], losses: float, norms: float) -> None:
    assert [n is None for _, n in got] == [n is None for _, n in want], "different steps were skipped"
    for step, ((loss, norm), (loss_one, norm_one)) in enumerate(zip(got, want)):
        assert loss == pytest.approx(loss_one, rel=losses), f"loss of step {step + 1}"
        if norm is not None:
            assert norm == pytest.approx(norm_one, rel=norms), f"gradient norm of step {step + 1}"
