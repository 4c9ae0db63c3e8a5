"""A checkpoint of any layout loads under any other, and training goes on with the losses of one process."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from runs import GPT2, LLAMA, on, trainer
from test_layouts import DROPOUT, PP2, SP, TP2, TP4, ZBV, close

import hal
from hal.model import checkpoint
from hal.testing.processes import run_processes

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-pp2": (4, {**TP2, **PP2}),
    "tp4": (4, TP4),
    "dp4-zero3": (4, {"zero_stage": 3}),
    "tp2-sp-dp2-distributed-optimizer": (4, {**TP2, **SP, "use_distributed_optimizer": True}),
    "pp2-zero-bubble": (2, ZBV),
}


def _save(options: dict[str, Any], root: str) -> None:
    run = trainer(options)
    for _ in range(2):
        run.step()
    run.save(Path(root))


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
        pytest.param("tp2-pp2", "dp4-zero3", GPT2, marks=pytest.mark.slow),
        pytest.param("tp2-pp2", "one", GPT2, marks=pytest.mark.slow),
        pytest.param("one", "tp2-sp-dp2-distributed-optimizer", LLAMA, marks=pytest.mark.slow),
        pytest.param("dp4-zero3", "pp2-zero-bubble", GPT2, marks=pytest.mark.slow),
        pytest.param("tp2-sp-dp2-distributed-optimizer", "dp4-zero3", LLAMA, marks=pytest.mark.slow),
        pytest.param("pp2-zero-bubble", "one", GPT2),
    ],
)
def test_training_goes_on_under_another_layout(before: str, after: str, base: dict[str, Any], tmp_path: Path) -> None:
    base = {**base, **DROPOUT}
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


@pytest.mark.slow
def test_every_rank_refuses_a_damaged_checkpoint_with_the_reason(tmp_path: Path) -> None:
    _save(GPT2, str(tmp_path))
    victim = next(checkpoint.folder_of(tmp_path, 2).glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    told = run_processes(2, _damaged, {**GPT2, **TP2}, str(tmp_path))
    assert told[0] == told[1] and f"{victim} is damaged" in told[0]


@pytest.mark.slow
def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    _save(GPT2, str(tmp_path))
    told = run_processes(2, _damaged, {**GPT2, **TP2, "num_layers": 6}, str(tmp_path))
    assert "has nothing for decoder.layers.4" in told[0]
