"""A checkpoint of any layout loads under any other, and training continues with the losses of one process."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from parallel_runs import (
    DEEPSEEK,
    DROPOUT,
    EP2,
    ETP1,
    GPT2,
    LATENT,
    LATENT_DENSE,
    LLAMA,
    PP2,
    SP,
    TP2,
    TP4,
    ZBV,
    close,
    on,
    trainer,
)
from torch.distributed.checkpoint import filesystem

import hal
from hal.model.checkpoint import reader
from hal.model.checkpoint.writer import SaveFailed
from hal.testing.processes import run_processes

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-pp2": (4, {**TP2, **PP2}),
    "tp4": (4, TP4),
    "dp4-zero3": (4, {"zero_stage": 3}),
    "tp2-sp-dp2-distributed-optimizer": (4, {**TP2, **SP, "use_distributed_optimizer": True}),
    "pp2-zero-bubble": (2, ZBV),
    "ep2": (2, EP2),
    "ep2-etp2": (4, {**TP2, **SP, **EP2}),
    "ep2-tp2-pp2": (4, {**TP2, **SP, **PP2, **EP2, **ETP1}),
    "ep2-zero3": (4, {**EP2, "zero_stage": 3}),
}


def _save(options: dict[str, Any], root: str) -> None:
    run = trainer(options)
    for _ in range(2):
        run.step()
    run.save(Path(root))
    run.step()  # with async_save, while the state after two steps is being written
    run.saver.wait()


def _continue(options: dict[str, Any], root: str) -> list[tuple[float, float | None]]:
    run = trainer(options)
    run.load(Path(root))
    return [(r.loss, r.grad_norm) for r in (run.step() for _ in range(2))]


def _on(world: int, function: Any, *args: Any) -> Any:
    return function(*args) if world == 1 else run_processes(world, function, *args)[0]


@pytest.mark.parametrize(
    "before, after, base",
    [
        pytest.param("tp2-pp2", "tp4", LLAMA, marks=pytest.mark.slow),
        pytest.param("tp2-pp2", "dp4-zero3", GPT2, marks=pytest.mark.nightly),
        pytest.param("tp2-pp2", "one", GPT2, marks=pytest.mark.nightly),
        pytest.param("one", "tp2-sp-dp2-distributed-optimizer", LLAMA, marks=pytest.mark.slow),
        pytest.param("dp4-zero3", "pp2-zero-bubble", GPT2, marks=pytest.mark.slow),
        pytest.param("tp2-sp-dp2-distributed-optimizer", "dp4-zero3", LLAMA, marks=pytest.mark.nightly),
        pytest.param("dp4-zero3", "tp2-pp2", {**GPT2, "async_save": True}, marks=pytest.mark.slow),
        pytest.param("pp2-zero-bubble", "one", GPT2),
        pytest.param("pp2-zero-bubble", "one", {**LLAMA, "async_save": True}, marks=pytest.mark.nightly),
        pytest.param("ep2", "one", DEEPSEEK),
        pytest.param("ep2-tp2-pp2", "ep2-zero3", LATENT, marks=pytest.mark.slow),
        pytest.param("tp2-pp2", "tp4", LATENT_DENSE, marks=pytest.mark.nightly),
        pytest.param("one", "ep2-zero3", DEEPSEEK, marks=pytest.mark.slow),
        pytest.param("ep2-zero3", "ep2-etp2", DEEPSEEK, marks=pytest.mark.nightly),
        pytest.param("ep2-etp2", "ep2-tp2-pp2", DEEPSEEK, marks=pytest.mark.nightly),
        pytest.param("ep2-tp2-pp2", "ep2", DEEPSEEK, marks=pytest.mark.nightly),
    ],
)
def test_training_goes_on_under_another_layout(before: str, after: str, base: dict[str, Any], tmp_path: Path) -> None:
    base = {**base, **DROPOUT, "save": str(tmp_path)}
    (w1, o1), (w2, o2) = LAYOUTS[before], LAYOUTS[after]
    _on(w1, _save, {**base, **o1}, str(tmp_path))
    close(_on(w2, _continue, {**base, **o2}, str(tmp_path)), on(1, base, 4)[2:], 1e-5, 1e-4)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o640}
    assert not list(tmp_path.glob(".*")) and (tmp_path / "iter_0000002").is_dir()


def _damaged(options: dict[str, Any], root: str) -> str:
    with pytest.raises(hal.HalError) as error:
        trainer(options).load(Path(root))
    return str(error.value)


def _one_disk_is_full(options: dict[str, Any], root: str) -> tuple[str, list[str], int]:
    run = trainer({**options, "save": root, "async_save": True})
    run.step()
    run.save(Path(root))
    run.saver.wait()
    if run.mesh.rank == 1:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        filesystem._write_item = fail
    run.step()
    run.save(Path(root))
    with pytest.raises(SaveFailed) as error:
        run.saver.wait()
    run.mesh.world.barrier()  # until rank 0 has cleaned up
    again = trainer({**options, "load": root})
    again.load(Path(root))
    return str(error.value), sorted(os.listdir(root)), again.iteration


def test_all_ranks_learn_that_one_could_not_write_in_the_background(tmp_path: Path) -> None:
    results = run_processes(2, _one_disk_is_full, {**GPT2, **TP2}, str(tmp_path))
    assert results[0] == results[1]
    text, names, iteration = results[0]
    assert "iter_0000002 could not be written" in text and "No space left on device (rank 1)" in text
    assert names == ["iter_0000001", reader.LATEST] and iteration == 1


@pytest.mark.slow
def test_every_rank_refuses_a_damaged_checkpoint_with_the_reason(tmp_path: Path) -> None:
    _save(GPT2, str(tmp_path))
    victim = next(reader.folder_of(tmp_path, 2).glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    messages = run_processes(2, _damaged, {**GPT2, **TP2}, str(tmp_path))
    assert messages[0] == messages[1] and f"{victim} is damaged" in messages[0]


@pytest.mark.slow
def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    _save(GPT2, str(tmp_path))
    messages = run_processes(2, _damaged, {**GPT2, **TP2, "num_layers": 6}, str(tmp_path))
    assert "was made with num-layers 4, this run has 6" in messages[0]
