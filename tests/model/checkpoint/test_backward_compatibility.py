"""Checkpoints of an earlier version still load and continue bit-identically, in the same and in another layout.

tests/fixtures/checkpoints/ holds two checkpoints of iteration 4 of 8, made at commit 5c929c8 with

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/model/checkpoint/test_backward_compatibility.py write

which runs `hal train --backend cpu_ref` with the options below. They are never regenerated: a new format gets an
additional fixture. Each NAME.tar.gz is the --save folder. Each NAME.json contains what that commit computed from it:
digests of the stored tensors, and the losses and final weights after four more iterations. These are compared exactly
if processor, compiler and torch are the recorded ones, and up to rounding otherwise. A change that rounds differently
on purpose records them again with `record` instead of `write`, and gives the reason in its commit message.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import hal
from hal.backends.cpu_ref import build, cpu
from hal.model.checkpoint.dcp import load_alone
from hal.model.config.command_line import parse
from hal.model.training import run as command
from hal.testing.processes import run_processes

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "checkpoints"
COMMON = (
    "--backend cpu_ref --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 4 --text-file text.txt --split 8,1,1 --seed 11 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--global-batch-size 8 --train-iters 8 --sample-tokens 0"
)
MODELS = {  # the shapes of GPT-2 and of LLaMA with a tied output layer
    "one_process": "",
    "tp2_pp2_dp2": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear",
}
LAYOUTS = {
    "one_process": (1, "--micro-batch-size 2"),
    "tp2_pp2_dp2": (
        8,
        "--micro-batch-size 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--use-distributed-optimizer",
    ),
}
SAVED, LAST = 4, 8
"""The iteration of the checkpoints, and that of the recorded continuation."""


def machine() -> str:
    """A digest of everything that determines how a step is rounded: processor, compiler, torch."""
    command = build.find_compiler()
    compiler = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    parts = (cpu.identity(), compiler, *command[1:], torch.__version__, torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by torch's own reader."""
    folder = root / f"iter_{iteration:07d}"
    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(info.size, dtype=info.properties.dtype) for name, info in index.items()}
    load_alone(tensors, dcp.FileSystemReader(folder))
    return tensors


def digest(tensor: torch.Tensor) -> str:
    header = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(header + tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:24]


def digests(root: Path, iteration: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in sorted(read(root, iteration).items())}


def _continue(argv: list[str], root: str, out: str) -> list[float]:
    """Loads the checkpoint in `root`, saves it unchanged, trains to the end and saves again; returns the losses."""
    torch.set_num_threads(1)
    hal.use("cpu_ref")
    trainer = command.build(parse(argv))[0]
    trainer.load(Path(root))
    trainer.save(Path(out) / "loaded")
    losses = [trainer.step().loss for _ in range(LAST - SAVED)]
    trainer.save(Path(out) / "continued")
    assert trainer.iteration == LAST and trainer.optimizer.steps == LAST
    return losses


def continued(model: str, layout: str, root: Path, out: Path) -> list[float]:
    world, options = LAYOUTS[layout]
    argv = f"{COMMON} {MODELS[model]} {options}".split()
    argv[argv.index("text.txt")] = str(FIXTURES / "text.txt")
    if world == 1:
        return _continue(argv, str(root), str(out))
    per_rank = run_processes(world, _continue, argv, str(root), str(out), timeout=300.0)
    assert all(losses == per_rank[0] for losses in per_rank)
    return per_rank[0]


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def recorded(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


CASES = [
    pytest.param(
        model, layout, id=f"{model}-under-{layout}", marks=pytest.mark.nightly if LAYOUTS[layout][0] > 1 else ()
    )
    for model in MODELS
    for layout in LAYOUTS
]


@pytest.mark.parametrize("model, layout", CASES)
def test_an_earlier_checkpoint_loads_and_continues(model: str, layout: str, cpu_ref: Any, tmp_path: Path) -> None:
    record, root = recorded(model), unpacked(model, tmp_path)
    assert digests(root, SAVED) == record["stored"], "the fixture itself has changed"
    losses = continued(model, layout, root, tmp_path)
    assert digests(tmp_path / "loaded", SAVED) == record["stored"], "what was loaded is not what was stored"
    ends = read(tmp_path / "continued", LAST)
    if layout == model and machine() == record["machine"]:
        assert losses == record["losses"]
        assert {name: digest(tensor) for name, tensor in ends.items()} == record["continued"]
        return
    # Another layout or processor changes only rounding, by 1e-7 where it was measured.
    assert losses == pytest.approx(record["losses"], rel=1e-6)
    assert ends.keys() == record["norms"].keys()
    for name, tensor in ends.items():
        assert float(tensor.double().norm()) == pytest.approx(record["norms"][name], rel=1e-5), name


def _write(name: str, folder: Path) -> None:
    world, layout = LAYOUTS[name]
    (folder / "text.txt").write_bytes((FIXTURES / "text.txt").read_bytes())
    # Relative paths, because the checkpoint holds the options of its run.
    where = f"--nproc-per-node {world} --exit-interval {SAVED} --save {name} --run-dir run_{name}"
    argv = f"{COMMON} {MODELS[name]} {layout} {where}".split()
    subprocess.run([sys.executable, "-m", "hal", "train", *argv], cwd=folder, check=True)
    (folder / name / "lock").unlink()
    with (
        gzip.GzipFile(FIXTURES / f"{name}.tar.gz", "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        archive.add(folder / name, arcname=name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _record(name: str, folder: Path) -> None:
    root = unpacked(name, folder)
    losses = continued(name, name, root, folder)
    ends = read(folder / "continued", LAST)
    record = {
        "machine": machine(),
        "losses": losses,
        "stored": digests(root, SAVED),
        "continued": {n: digest(ends[n]) for n in sorted(ends)},
        "norms": {n: float(ends[n].double().norm()) for n in sorted(ends)},
    }
    (FIXTURES / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    for name in MODELS:
        with tempfile.TemporaryDirectory() as written, tempfile.TemporaryDirectory() as loaded:
            if sys.argv[1] == "write":
                _write(name, Path(written))
            _record(name, Path(loaded))
