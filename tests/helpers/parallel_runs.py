"""Tiny training runs under any layout, for the tests of this folder. Everything is a function of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hal
from hal.mesh import Mesh
from hal.model.arguments import build
from hal.model.checks import world_size
from hal.model.data import Split
from hal.model.gpt import GPT
from hal.model.parallel.plan import make_plan
from hal.model.parallel.trainer import ParallelTrainer
from hal.model.trainer import Trainer
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
LLAMA = {
    **COMMON,
    "swiglu": True,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 4,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


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
    """The trainer of this process: parallel where a launcher described a world."""
    hal.use("cpu_ref")
    config = build(options)
    ends = config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss
    split = Split(Tokens(config.seq_length, ends), VOCABULARY, END, config.eod_mask_loss)
    data = dict.fromkeys(("train", "valid"), split)
    plan = make_plan(config, world_size(config))
    if plan.layout.world == 1:
        return Trainer(config, GPT(config, hal.device(), layers=plan.layers[0]), data)
    mesh = Mesh(plan.layout, hal.backend(), timeout=min(60.0, 60.0 * config.distributed_timeout_minutes))
    return ParallelTrainer(config, data, mesh, plan, hal.device())


def steps(options: dict[str, Any], count: int) -> list[tuple[float, float | None]]:
    """(loss, gradient norm) of `count` iterations."""
    run = trainer(options)
    results = [run.step() for _ in range(count)]
    return [(r.loss, r.grad_norm) for r in results]


def on(world: int, options: dict[str, Any], count: int = 10) -> list[tuple[float, float | None]]:
    """`steps` on `world` processes, which must agree."""
    if world == 1:
        return steps(options, count)
    per_rank = run_processes(world, steps, options, count, timeout=180.0)
    assert all(r == per_rank[0] for r in per_rank), "the ranks report different numbers"
    return per_rank[0]
