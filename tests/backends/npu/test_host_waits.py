"""The host never waits for the device within a training step.

The simulator counts the waits: calls of AscendCL that wait for a stream, an event or the device, and copies from the
device. `.item()`, `.tolist()`, `.cpu()`, a copy from ordinary host memory and a tensor made of numbers of the host all
appear there, whichever layer of torch or torch_npu makes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hal import ops
from hal.backends.npu import Npu, simulator
from hal.model.config.command_line import parse
from hal.model.training import run as command
from hal.model.training.trainer import Trainer


@contextmanager
def counted(machine: simulator.Simulator) -> Iterator[dict[str, int]]:
    """Yields a dictionary that holds, afterwards, what was counted inside."""
    result: dict[str, int] = {}
    before = machine.counters()
    yield result
    result.update({name: value - before[name] for name, value in machine.counters().items()})


def trainer_of(tmp_path: Path, *words: str) -> Trainer:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
    shape += " --micro-batch-size 2 --global-batch-size 4 --train-iters 5 --lr 1e-2 --backend npu --simulate"
    return command.build(parse([*shape.split(), "--text-file", str(text), *words]))[0]


NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
EXPERTS = (
    *("--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001"),
)


@pytest.mark.parametrize(
    "words",
    [
        NO_DROPOUT,
        ("--bf16", "--attention-dropout", "0", "--hidden-dropout", "0.1"),
        (*NO_DROPOUT, "--reset-attention-mask", "--reset-position-ids", "--position-embedding-type", "rope"),
        (*NO_DROPOUT, "--recompute-granularity", "full", "--recompute-method", "uniform", "--swiglu"),
        (*NO_DROPOUT, *EXPERTS),
        (*NO_DROPOUT, *EXPERTS, "--bf16", "--moe-grouped-gemm", "--moe-shared-expert-intermediate-size", "32"),
    ],
    ids=["plain", "dropout in bf16", "documents", "recompute", "experts", "experts in bf16"],
)
def test_a_step_does_not_wait(machine: simulator.Simulator, tmp_path: Path, words: tuple[str, ...]) -> None:
    """The optimizer's kernel reads the clip factor on the device; loss and norm of all steps are read together."""
    trainer = trainer_of(tmp_path, *words)
    trainer.step()  # the first step makes what is kept, such as the compressed mask
    with counted(machine) as steps:
        trainer.advance()
        trainer.advance()
        _ = (
            torch.npu.current_stream().npu_stream
        )  # returns when torch_npu's queue is empty, without a wait of the device
    assert steps["operators"] > 200
    assert steps["device_to_host"] == steps["host_waits"] == 0, steps
    with counted(machine) as read:
        assert len(list(trainer.results())) == 2
    assert read["device_to_host"] == 1 and read["host_waits"] == 1, read


def test_fp16_reads_once_a_step_whether_gradients_overflowed(machine: simulator.Simulator, tmp_path: Path) -> None:
    """The host decides by it on the loss scale and on the number of steps (ADR 0050); nothing else is read."""
    trainer = trainer_of(tmp_path, *NO_DROPOUT, "--fp16", "--initial-loss-scale", "1024")
    trainer.step()
    with counted(machine) as steps:
        trainer.advance()
        trainer.advance()
        _ = torch.npu.current_stream().npu_stream
    assert steps["device_to_host"] == steps["host_waits"] == 2, steps


def test_a_hidden_read_is_counted(machine: simulator.Simulator) -> None:
    """The test above can fail: each of these statements waits."""
    x = torch.ones(3).npu()
    for wait in (
        lambda: x.tolist(),
        lambda: x[0].item(),
        lambda: x.cpu(),
        lambda: torch.tensor([1.0], device=x.device),
    ):
        with counted(machine) as one:
            wait()
        assert one["host_waits"] >= 1, one


def test_packed_attention_reads_the_lengths_of_a_batch_once(npu: Npu, machine: simulator.Simulator) -> None:
    """Four layers, forward and backward, over one cu_seqlens: one wait; after a change in place, one more."""
    starts = torch.tensor([0, 3, 9], dtype=torch.int32).npu()
    other = torch.tensor([0, 5, 9], dtype=torch.int32).npu()
    q = torch.randn(9, 2, 8).npu().requires_grad_()

    def layers() -> torch.Tensor:
        out = q
        for _ in range(4):
            out = ops.flash_attention(out, q, q, layout="TND", next_tokens=0, cu_seqlens_q=starts, cu_seqlens_k=starts)
        out.sum().backward()
        return out

    layers_before = layers().detach()  # makes the compressed mask
    fresh = starts.clone()
    starts = fresh
    with counted(machine) as first:
        layers()
    assert first["device_to_host"] == 1, first
    starts.copy_(other)
    with counted(machine) as changed:
        after = layers().detach()
    assert changed["device_to_host"] == 1, changed
    assert not torch.equal(after.cpu(), layers_before.cpu())
