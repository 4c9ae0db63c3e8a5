"""The process group of the workers that make a call together."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from ..harness import machine


def join() -> None:
    """Joins the ranks' gloo group, once per process, through a shared file. Does nothing for a single process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{os.environ[machine.RENDEZVOUS]}",
            rank=int(os.environ["RANK"]),
            world_size=size,
            timeout=timedelta(seconds=300),
        )
