"""A training step makes no host synchronisation; its results are read for several steps at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_helpers import HostReads

from hal.backends.cuda import Cuda
from hal.model.config.command_line import parse
from hal.model.data.gpt_dataset import Split
from hal.model.training import run as command
from hal.model.training.trainer import Trainer

NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


def trainer_of(tmp_path: Path, *words: str) -> Trainer:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    shape += " --micro-batch-size 1 --global-batch-size 2 --train-iters 9 --lr 1e-2 --backend cuda --simulate"
    trainer = command.build(parse([*shape.split(), "--text-file", str(text), *words]))[0]
    trainer.data = {"train": _Fetched(trainer.data["train"], 3 * 2)}
    return trainer


class _Fetched:
    """The first `count` samples of a split, fetched before anything is counted: data is made on the host."""

    def __init__(self, split: Split, count: int) -> None:
        self.eod, self._samples = split.eod, [split.fetch(first, 1) for first in range(count)]
        self.starts = split.starts

    def fetch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert count == 1
        return self._samples[first]


@pytest.mark.parametrize(
    "words, on_host",
    [
        ((*NO_DROPOUT, "--bf16"), []),
        # The number of a microbatch's first sample, a tensor of the host, which pipelines pass to their stages.
        (("--bf16", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"), ["_local_scalar_dense"] * 4),
        # The documents are counted on the host, once for each of two microbatches.
        (
            (*NO_DROPOUT, "--reset-attention-mask", "--reset-position-ids", "--position-embedding-type", "rope"),
            ["nonzero"] * 4,
        ),
        ((*NO_DROPOUT, "--swiglu", "--normalization", "RMSNorm", "--recompute-granularity", "selective"), []),
    ],
    ids=["plain", "dropout", "documents", "llama"],
)
def test_a_step_makes_no_host_synchronisation(
    simulated: Cuda, tmp_path: Path, words: tuple[str, ...], on_host: list[str]
) -> None:
    trainer = trainer_of(tmp_path, *words)
    trainer.step()
    with HostReads() as steps:
        trainer.advance()
        trainer.advance()
    assert steps.operations > 200
    assert steps.made == on_host, "reads of tensors that are on the host are counted, too"
    with HostReads() as read:
        assert len(list(trainer.results())) == 2
    assert read.made == ["cpu", "tolist"]  # the second one of the first one's result


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: x.cpu(),
        lambda x: bool(x[0]),
        lambda x: float(x[0]),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.arange(3).repeat_interleave(x.long()),
    ],
)
def test_a_read_is_counted(read: Callable[[torch.Tensor], object]) -> None:
    """The test above can fail."""
    with HostReads() as reads:
        read(torch.ones(3))
    assert reads.made


LLAMA = (*NO_DROPOUT, "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (*NO_DROPOUT, "--bf16"),
        pytest.param(
            (*LLAMA, "--num-query-groups", "1", "--recompute-granularity", "full", "--recompute-method", "uniform"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*LLAMA, "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--eod-mask-loss"),
            marks=pytest.mark.slow,
        ),
        pytest.param((*LLAMA, "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"), marks=pytest.mark.slow),
    ],
    ids=["gpt-2", "llama, recomputed", "llama, float8", "llama, delayed float8"],
)
def test_a_recorded_step_equals_a_plain_one_and_reads_nothing(
    simulated: Cuda, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Bit for bit, with a learning rate that changes in every step; two microbatches of two sequences each."""
    words = (*words, "--lr-decay-style", "cosine", "--eval-iters", "1")
    plain, graphed = (trainer_of(tmp_path, *words, *more) for more in ((), ("--cuda-graphs",)))
    results = []
    for trainer in (plain, graphed):
        trainer.step()
        trainer.data["valid"] = trainer.data["train"]
        trainer.evaluate()
        with HostReads() as steps:
            trainer.advance()
            trainer.advance()
        results.append([(r.loss, r.grad_norm, r.lr) for r in trainer.results()])
        assert steps.made == []
    assert results[0] == results[1] and len({loss for loss, _, _ in results[0]}) == 2
    weights = [dict(t.model.named_parameters()) for t in (plain, graphed)]
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())
