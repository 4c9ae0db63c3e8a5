"""Checkpoints: loading returns what was saved, damage is detected, and a kill at any moment loses nothing."""

import json
import subprocess
import sys

import pytest
import torch

from hal import HalError, SingleRankComm
from hal.comm.threads import run_threads
from hal.model.checkpoint import reader, writer

KILL = """
import os, shutil, signal, sys, pathlib, torch
from hal.model.checkpoint import reader, writer

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
    writer.save(root, 10, old, {"iteration": 10})
    child = os.fork()
    if child == 0:
        die_at(moments)
        saver = writer.Saver(background=sys.argv[2] == "background")
        saver.save(root, 20, new, {"iteration": 20})
        saver.wait()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    folder, state = reader.read_state(root)
    found = {"a": torch.zeros(5, 3), "b": torch.zeros(4)}
    reader.load_tensors(folder, found)
    value = {10: 1.0, 20: 2.0}[state["iteration"]]
    assert all(bool((t == value).all()) for t in found.values()), (moments, state)
    seen.add(state["iteration"])
    # whatever was left behind, the next save works
    writer.save(root, 20, new, {"iteration": 20})
    assert reader.read_state(root)[1]["iteration"] == 20
    assert not list(root.glob(".*")), list(root.iterdir())
    if os.WIFEXITED(status):
        break
    moments += 1
print(moments, sorted(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("foreground", marks=pytest.mark.nightly), "background"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path, where):
    done = subprocess.run([sys.executable, "-c", KILL, str(tmp_path / "save"), where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moments, iterations = done.stdout.split(maxsplit=1)
    assert int(moments) >= 10 and iterations.strip() == "[10, 20]"


@pytest.fixture
def saved(tmp_path):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16()}
    writer.save(tmp_path, 3, tensors, {"iteration": 3, "x": [1, 2.5]})
    return tmp_path, tensors


def test_what_is_written_is_what_is_read(saved):
    root, tensors = saved
    folder, state = reader.read_state(root)
    loaded = {name: torch.zeros_like(t) for name, t in tensors.items()}
    reader.load_tensors(folder, loaded)
    assert state == {"iteration": 3, "x": [1, 2.5]} and folder.name == "iter_0000003"
    assert all(torch.equal(loaded[n], t) for n, t in tensors.items())
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
        reader.read_state(root)
    data.unlink()
    with pytest.raises(HalError, match="missing"):
        reader.read_state(root)
    (root / "latest_checkpointed_iteration.txt").write_text("newest")
    with pytest.raises(HalError, match="iteration number"):
        reader.read_state(root)


def test_an_older_checkpoint_is_loaded_with_a_warning_if_the_newest_is_damaged(saved):
    root, tensors = saved
    writer.save(root, 4, tensors, {"iteration": 4})
    assert reader.read_state(root)[1]["iteration"] == 4
    (root / "iter_0000004" / reader.MANIFEST).write_text("{}")
    with pytest.warns(RuntimeWarning, match="iter_0000004.*cannot be read.*Loading .*iter_0000003 instead") as caught:
        assert reader.read_state(root)[1]["iteration"] == 3
    assert caught[0].filename == __file__, "the warning shows the caller"
    (root / reader.LATEST).unlink()
    with pytest.warns(RuntimeWarning, match=f"{reader.LATEST} is missing"):
        assert reader.read_state(root)[1]["iteration"] == 3


def test_another_models_checkpoint_is_refused(saved):
    root, _ = saved
    folder, _ = reader.read_state(root)
    with pytest.raises(HalError, match=r"shape \(5, 3\) for a, this model has \(5, 4\)"):
        reader.load_tensors(folder, {"a": torch.zeros(5, 4)})
    with pytest.raises(HalError, match="no tensor for c"):
        reader.load_tensors(folder, {"c": torch.zeros(2)})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"state": ["iteration", 3]}, "state should be an object with an iteration number"),
        ({"state": {}}, "state should be an object with an iteration number"),
        ({"state": {"iteration": "3"}}, "state should be an object with an iteration number"),
        ({"state": {"iteration": True}}, "state should be an object with an iteration number"),
        ({"state": {"iteration": -1}}, "state should be an object with an iteration number"),
        ({"sums": {"a": 7}}, "sha256 should contain a checksum for each file"),
        ({"sums": {"\u00e4": "text"}}, "sha256 should contain a checksum for each file"),
        ({"sums": {reader.MANIFEST: "another"}}, "is damaged"),
        ({"sums": {"absent.distcp": "text"}}, "absent.distcp is missing"),
    ],
)
def test_a_manifest_that_is_not_what_it_should_be(saved, change, words):
    """Also if its checksum is valid; in the cases about checksums, the checksums themselves are wrong."""
    root, _ = saved
    path = root / "iter_0000003" / reader.MANIFEST
    manifest = json.loads(path.read_text())
    state = change.get("state", manifest["state"])
    sums = {**manifest["sha256"], reader.MANIFEST: reader.state_checksum(state), **change.get("sums", {})}
    path.write_text(json.dumps({"state": state, "sha256": sums}))
    with pytest.raises(HalError, match=words):
        reader.read_state(root)


def test_a_manifest_that_cannot_be_read_says_why(saved, monkeypatch):
    root, tensors = saved
    (root / reader.LATEST).write_text("9")
    with pytest.warns(RuntimeWarning, match=r"iter_0000009/hal\.json cannot be read: .*No such file"):
        assert reader.read_state(root)[1]["iteration"] == 3
    (root / "iter_0000003" / reader.MANIFEST).write_text("[" * 10000)
    with pytest.raises(HalError, match=r"iter_0000003/hal\.json cannot be read: .*nested"):
        reader.read_manifest(root / "iter_0000003")
    writer.save(root, 0, tensors, {"iteration": 0})
    plain = reader.read_manifest

    def lost(folder):
        if folder.name == "iter_0000009":
            raise OSError(5, "Input/output error")
        return plain(folder)

    monkeypatch.setattr(reader, "read_manifest", lost)
    (root / reader.LATEST).write_text("9")
    with pytest.warns(RuntimeWarning, match=r"\[Errno 5\] Input/output error; .*Loading .*iter_0000000 instead"):
        assert reader.read_state(root)[1] == {"iteration": 0}


def test_the_checksum_of_a_state_does_not_depend_on_the_order_of_its_keys():
    assert reader.state_checksum({"a": 1, "b": 2}) == reader.state_checksum({"b": 2, "a": 1})


@pytest.mark.parametrize(
    "text, newest",
    [
        ("0\n", 0),
        ("12", 12),
        ("9" * 18, 10**18 - 1),
        (" 7 \n", 7),
        ("7" + " " * 99, 7),
        ("release\n", "release"),
        (None, None),
    ],
)
def test_the_tracker_names_an_iteration_or_a_release(tmp_path, text, newest):
    if text is not None:
        (tmp_path / reader.LATEST).write_text(text)
    assert reader.tracked(tmp_path) == newest
    assert reader.newest(tmp_path) == (0 if newest == "release" else newest)


@pytest.mark.parametrize(
    "text", ["", "-1", "1.0", "9" * 19, "7" + " " * 200 + "8", "7" + " " * 100, "\u0663", "\u00b2", "Release"]
)
def test_a_damaged_tracker_is_refused(tmp_path, text):
    (tmp_path / reader.LATEST).write_text(text)
    with pytest.raises(HalError, match="should contain an iteration number or 'release'"):
        reader.tracked(tmp_path)


def test_checkpoints_are_tried_from_the_one_that_the_tracker_names_on(tmp_path):
    names = [
        "iter_0000002",
        "iter_0000004",
        "iter_12345678",
        f"iter_{'9' * 18}",
        f"iter_{'9' * 19}",
        "iter_x",
        "iter_x1",
        "iter_\u0663",
    ]
    for name in (*names, "release"):
        (tmp_path / name).mkdir()
        (tmp_path / name / reader.MANIFEST).write_text("{}")
    (tmp_path / "iter_0000003").mkdir()  # without a manifest
    assert reader.iterations(tmp_path) == [2, 4, 12345678, 10**18 - 1]
    assert reader.candidates(tmp_path) == [10**18 - 1, 12345678, 4, 2, "release"]
    for text, tried in (
        ("4", [4, 2]),
        ("5", [5, 4, 2]),
        ("release", ["release"]),
        ("damaged", [10**18 - 1, 12345678, 4, 2, "release"]),
    ):
        (tmp_path / reader.LATEST).write_text(text)
        assert reader.candidates(tmp_path) == tried


def test_ranks_agree_on_what_is_read_and_one_of_them_warns(saved):
    root, _ = saved

    def read(comm):
        try:
            return reader.read_state(root, comm)[1]["iteration"]
        except HalError as error:
            return str(error)

    assert run_threads(2, read) == [3, 3]
    (root / reader.LATEST).unlink()
    with pytest.warns(RuntimeWarning, match="is missing") as caught:
        assert run_threads(2, read) == [3, 3]
    assert len(caught) == 1
    for file in (root / "iter_0000003").glob("*.distcp"):
        file.write_bytes(b"")
    one, other = run_threads(2, read)
    assert one == other and "is damaged" in one


def test_files_outside_the_folder_and_other_formats_are_refused(saved):
    root, _ = saved
    path = root / "iter_0000003" / reader.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["sha256"][f"../{reader.LATEST}"] = reader.file_checksum(root / reader.LATEST)
    path.write_text(json.dumps(manifest))
    with pytest.raises(HalError, match=f"{reader.LATEST} is missing|{reader.LATEST} is damaged"):
        reader.read_state(root)
    path.unlink()
    (path.parent / "mp_rank_00").mkdir()
    with pytest.raises(HalError, match="is in Megatron's format; convert it"):
        reader.read_state(root)


def test_numbers_and_text_are_told_as_they_are():
    assert reader.broadcast_integers(SingleRankComm(), [3, -(2**62), 0]) == [3, -(2**62), 0]
    assert reader.broadcast_text(SingleRankComm(), "\u00fcber 9000", 0) == "\u00fcber 9000"
