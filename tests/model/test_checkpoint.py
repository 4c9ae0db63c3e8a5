"""Checkpoints: what is written is what is read, damage is noticed, and a kill at any moment loses nothing."""

import subprocess
import sys

import pytest
import torch

from hal import HalError
from hal.model import checkpoint, saving

KILL = """
import os, shutil, signal, sys, pathlib, torch
from hal.model import checkpoint, saving

root = pathlib.Path(sys.argv[1])
old, new = ({"a": torch.full((5, 3), v), "b": torch.full((4,), v)} for v in (1.0, 2.0))

def die_at(n):
    # Every call that changes what is on the disk counts as a moment; the process dies right before number n.
    left = [n]
    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in ("fsync", "rename", "replace", "mkdir", "chmod"):
        setattr(os, name, counted(getattr(os, name)))
    os.open = counted(os.open)

moments, seen = 0, set()
while True:
    shutil.rmtree(root, ignore_errors=True)
    saving.save(root, 10, old, {"iteration": 10})
    child = os.fork()
    if child == 0:
        die_at(moments)
        saver = saving.Saver(background=sys.argv[2] == "background")
        saver.save(root, 20, new, {"iteration": 20})
        saver.wait()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    folder, state = checkpoint.read_state(root)
    found = {"a": torch.zeros(5, 3), "b": torch.zeros(4)}
    checkpoint.load_tensors(folder, found)
    value = {10: 1.0, 20: 2.0}[state["iteration"]]
    assert all(bool((t == value).all()) for t in found.values()), (moments, state)
    seen.add(state["iteration"])
    # whatever was left behind, the next save works
    saving.save(root, 20, new, {"iteration": 20})
    assert checkpoint.read_state(root)[1]["iteration"] == 20
    assert not list(root.glob(".*")), list(root.iterdir())
    if os.WIFEXITED(status):
        break
    moments += 1
print(moments, sorted(seen))
"""


@pytest.mark.parametrize("where", ["foreground", "background"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path, where):
    done = subprocess.run([sys.executable, "-c", KILL, str(tmp_path / "save"), where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moments, seen = done.stdout.split(maxsplit=1)
    assert int(moments) >= 10 and seen.strip() == "[10, 20]"


@pytest.fixture
def saved(tmp_path):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16()}
    saving.save(tmp_path, 3, tensors, {"iteration": 3, "x": [1, 2.5]})
    return tmp_path, tensors


def test_what_is_written_is_what_is_read(saved):
    root, tensors = saved
    folder, state = checkpoint.read_state(root)
    found = {name: torch.zeros_like(t) for name, t in tensors.items()}
    checkpoint.load_tensors(folder, found)
    assert state == {"iteration": 3, "x": [1, 2.5]} and folder.name == "iter_0000003"
    assert all(torch.equal(found[n], t) for n, t in tensors.items())
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o640}
    assert folder.stat().st_mode & 0o777 == 0o750


def test_damage_is_noticed(saved):
    root, _ = saved
    data = next(p for p in (root / "iter_0000003").iterdir() if p.suffix == ".distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(HalError, match="damaged"):
        checkpoint.read_state(root)
    data.unlink()
    with pytest.raises(HalError, match="missing"):
        checkpoint.read_state(root)
    (root / "latest_checkpointed_iteration.txt").write_text("newest")
    with pytest.raises(HalError, match="iteration number"):
        checkpoint.read_state(root)


def test_another_models_checkpoint_is_refused(saved):
    root, _ = saved
    folder, _ = checkpoint.read_state(root)
    with pytest.raises(HalError, match=r"shape \(5, 3\) for a, this model \(5, 4\)"):
        checkpoint.load_tensors(folder, {"a": torch.zeros(5, 4)})
    with pytest.raises(HalError, match="nothing for c"):
        checkpoint.load_tensors(folder, {"c": torch.zeros(2)})
