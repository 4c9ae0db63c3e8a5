"""Run by every rank of the claim "collectives": an all_reduce of 2**argument bytes, its values and its bandwidth."""

from __future__ import annotations

import json
import os
import sys

import torch

import hal


def main(exponent: int) -> None:
    """Prints, on rank 0, what was seen as JSON; rate: bytes/s that a device sends in a ring."""
    from hal.bench.npu.claims import seconds

    backend = hal.use("npu", simulate=os.environ.get("HAL_SIMULATE", "") not in ("", "0"))
    comm = backend.comm()
    x = torch.full((1 << (exponent - 2),), float(comm.rank + 1), device=backend.device(backend.local_index()))
    total = comm.all_reduce(x)
    right = bool((total == comm.size * (comm.size + 1) / 2).all())
    taken = seconds(lambda: comm.all_reduce(x), 2)
    if comm.rank == 0:
        sent = 2 * (comm.size - 1) / comm.size * x.numel() * 4
        print(json.dumps({"right": right, "bytes": x.numel() * 4, "rate": sent / taken}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
