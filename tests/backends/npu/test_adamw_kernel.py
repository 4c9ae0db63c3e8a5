"""AdamW of all tensors in one launch of HAL's AscendC kernel, without a wait of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal
from hal import ops
from hal.backends.npu import Npu, kernels, simulator


def tensors(count: int, grad: torch.dtype, copies: torch.dtype | None) -> dict[str, list[torch.Tensor]]:
    torch.manual_seed(0)
    shapes = [(5 * i % 90, 1 + i % 60) for i in range(count)]  # empty ones, and some of more than a tile
    lists: dict[str, list[torch.Tensor]] = {
        "params": [torch.randn(s) for s in shapes],
        "grads": [torch.randn(s).to(grad) for s in shapes],
        "exp_avgs": [torch.randn(s) for s in shapes],
        "exp_avg_sqs": [torch.rand(s) for s in shapes],
    }
    if copies is not None:
        lists["model_params"] = [p.to(copies) for p in lists["params"]]
    return lists


@pytest.mark.parametrize(
    "grad, copies",
    [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
    ids=["float32", "bfloat16", "float16"],
)
@pytest.mark.parametrize("clip", [None, 0.3, float("inf")])
def test_a_hundred_tensors_are_one_launch(
    npu: Npu, machine: simulator.Simulator, grad: torch.dtype, copies: torch.dtype | None, clip: float | None
) -> None:
    lists = tensors(100, grad, copies)
    there = {name: [t.npu() for t in values] for name, values in lists.items()}
    how: dict[str, Any] = {"step": 3, "lr": 0.01, "weight_decay": 0.1, "grad_scale": 0.5}
    factor = None if clip is None else torch.tensor(clip)
    on_device = None if factor is None else factor.npu()
    assert hal.why(ops.adamw, **there, **how, clip_factor=on_device).chosen == "npu/adamw"
    before = machine.counters()
    ops.adamw(**there, **how, clip_factor=on_device)
    made = {name: n - before[name] for name, n in machine.counters().items()}
    assert made["operators"] <= 2 and made["host_waits"] == made["device_to_host"] == 0, made
    ops.adamw.reference(**lists, **how, clip_factor=factor)
    for name, values in lists.items():
        for got, right in zip(there[name], values):
            close = {"rtol": 8e-3, "atol": 1e-6} if right.dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(got.cpu(), right, **close)


def test_without_the_kernel_it_is_the_vendors_operator(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_missing", "cmake cannot be run")
    there = {name: [t.npu() for t in values] for name, values in tensors(2, torch.float32, None).items()}
    assert hal.why(ops.adamw, **there, step=1, lr=0.1).chosen == "npu/apply_adam_w"
