"""One rank of `hal bench train` with a layout: trains on random tokens and reports speed and every rank's peak memory.

Every process of the job runs this module with the options of `hal train`. Rank 0 writes the file HAL_BENCH_OUTPUT.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hal
from hal.model.apps.planning.search import set_vocabulary
from hal.model.config.command_line import build, read
from hal.model.config.flops import flops_per_token
from hal.model.config.schema import Config
from hal.model.training.trainer import peak_memory_bytes

from .layout import VOCABULARY, trainer_of

OUTPUT, STEPS = "HAL_BENCH_OUTPUT", "HAL_BENCH_STEPS"
WARM_UP = 2
"""Warm-up steps, in which kernels are compiled, caches are filled and buffers are allocated."""


def main(argv: Sequence[str]) -> int:
    """Measures this rank's share of the job that the options describe."""
    config = config_of(argv)
    pins = dict(pin.split("=", 1) for pin in config.pin)
    assert config.backend is not None
    hal.use(config.backend, fallback=config.fallback, pin=pins, **({"simulate": True} if config.simulate else {}))
    record = measure(config, int(os.environ[STEPS]))
    if record is not None:
        Path(os.environ[OUTPUT]).write_text(json.dumps(record) + "\n")
    return 0


def config_of(argv: Sequence[str]) -> Config:
    """The validated config. Without a tokenizer or data in the options, VOCABULARY token ids and random tokens."""
    values: dict[str, Any] = read(argv)
    if "tokenizer_type" not in values:
        values |= {"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY}
    if values["tokenizer_type"] == "NullTokenizer":
        values.setdefault("data_path", ("random tokens",))
    config = build(values)
    set_vocabulary(config)
    return config


def measure(config: Config, steps: int) -> dict[str, Any] | None:
    """The report of `steps` steps on rank 0; None on other ranks."""
    trainer = trainer_of(config)
    for _ in range(WARM_UP):
        trainer.step()
    hal.backend().synchronize()
    seconds = [trainer.step().seconds for _ in range(steps)]
    world, layout = trainer.world, trainer.mesh.layout
    peak = torch.tensor([peak_memory_bytes()], dtype=torch.int64, device=world.device)
    peaks = world.all_gather(peak).tolist()
    ranks = [{"rank": r, **layout.coordinates(r), "peak_memory_bytes": n} for r, n in enumerate(peaks)]
    parameters = trainer.parameter_count()
    if not trainer.lead:
        return None
    assert config.global_batch_size
    per_step = config.global_batch_size * config.seq_length
    tokens = per_step / statistics.median(seconds)
    backend = hal.backend()
    return {
        "name": "training",
        "backend": backend.name,
        "simulated": backend.simulated,
        "layout": asdict(layout),
        "parameters": parameters,
        "steps": steps,
        "seconds_per_step": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "tokens_per_second": tokens,
        "model_flops_per_second": tokens * flops_per_token(config),
        "ranks": ranks,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
