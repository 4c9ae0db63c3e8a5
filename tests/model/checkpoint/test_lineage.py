"""Lost and damaged checkpoints and trackers, and which checkpoints a run may remove."""

import json
import shutil

import pytest
import torch

from hal import HalError
from hal.model.checkpoint import lineage, reader, writer
from hal.model.training.run import main

TINY = ["--backend", "cpu_ref", "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"]
TINY += ["--seq-length", "16", "--micro-batch-size", "2", "--sample-tokens", "0", "--lr", "1e-3"]


def put(root, iteration, entries, **more):
    """A small checkpoint with this lineage; returns its state."""
    state = {"iteration": iteration, "lineage": entries, **more}
    writer.save(root, iteration, {"a": torch.full((3,), float(iteration))}, state)
    return state


def damage(root, iteration):
    path = next(reader.folder_of(root, iteration).glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def read(root):
    folder, state = reader.read_state(root)
    values = {"a": torch.zeros(3)}
    reader.load_tensors(folder, values)
    assert values["a"].tolist() == [state["iteration"]] * 3
    return state["iteration"]


def left(root):
    return reader.iterations(root)


@pytest.fixture
def root(tmp_path):
    for iteration in (10, 20, 30):
        put(tmp_path, iteration, [["a", 0]])
    return tmp_path


@pytest.mark.parametrize("tracker", [None, "", "garbage", "9" * 30])
def test_without_a_tracker_the_newest_is_used_and_a_warning_says_so(root, tracker):
    (root / reader.LATEST).unlink()
    if tracker is not None:
        (root / reader.LATEST).write_text(tracker)
    with pytest.warns(RuntimeWarning, match=reader.LATEST + ".*Loading .*iter_0000030 instead"):
        assert read(root) == 30


def test_the_newest_intact_checkpoint_is_used(root):
    damage(root, 30)
    with pytest.warns(RuntimeWarning, match=r"iter_0000030/\S* is damaged\. Loading .*iter_0000020 instead"):
        assert read(root) == 20
    (reader.folder_of(root, 20) / ".metadata").unlink()
    with pytest.warns(RuntimeWarning, match=r"20/\.metadata is missing\. Loading .*iter_0000010 instead"):
        assert read(root) == 10
    (reader.folder_of(root, 10) / reader.MANIFEST).write_text("{")
    with pytest.raises(HalError, match=r"iter_0000030/\S* is damaged; .*20/\.metadata is missing"):
        read(root)


def test_a_tracker_that_names_an_older_one_is_obeyed(root):
    (root / reader.LATEST).write_text("20")
    assert read(root) == 20
    damage(root, 20)
    with pytest.warns(RuntimeWarning, match="Loading .*iter_0000010 instead"):
        assert read(root) == 10


def test_a_lost_tracker_does_not_restart_a_run(tmp_path, capsys):
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save"), "--save-interval", "2"]
    assert main([*options, "--train-iters", "6"]) == 0
    (tmp_path / "save" / reader.LATEST).unlink()
    with pytest.warns(RuntimeWarning, match="iter_0000006 instead"):
        assert main([*options, "--load", str(tmp_path / "save"), "--train-iters", "8"]) == 0
    assert "iterations 7 to 8" in capsys.readouterr().out
    assert left(tmp_path / "save") == [2, 4, 6, 8]
    (tmp_path / "save" / reader.LATEST).unlink()
    assert main([*options, "--train-iters", "6"]) == 2
    assert "holds a checkpoint of iteration 8" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_replaced_when_its_iteration_is_reached_again(tmp_path, recwarn):
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save"), "--load"]
    options += [str(tmp_path / "save"), "--save-interval", "2", "--train-iters", "4"]
    assert main(options) == 0
    damage(tmp_path / "save", 4)
    assert main(options) == 0
    recwarn.clear()
    assert reader.read_state(tmp_path / "save")[1]["iteration"] == 4 and not recwarn
    before = reader.file_checksum(tmp_path / "save" / "iter_0000004" / reader.MANIFEST)
    assert main(options) == 0
    after = reader.file_checksum(tmp_path / "save" / "iter_0000004" / reader.MANIFEST)
    assert after == before, "a checkpoint from which nothing was done is not written again"


def test_a_run_with_only_damaged_checkpoints_is_refused(tmp_path, capsys):
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save"), "--train-iters", "2"]
    assert main(options) == 0
    damage(tmp_path / "save", 2)
    assert main([*options, "--load", str(tmp_path / "save")]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_resumed_run_does_not_replace_the_checkpoints_of_another(tmp_path, capsys):
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--train-iters"]
    save = tmp_path / "save"
    assert main([*options, "2", "--save", str(save)]) == 0
    assert main([*options, "4", "--save", str(tmp_path / "other")]) == 0
    shutil.copytree(tmp_path / "other" / "iter_0000004", save / "iter_0000004")
    assert main([*options, "6", "--load", str(save), "--save", str(save)]) == 2
    assert "checkpoints of another run from iteration 2 on" in capsys.readouterr().err


# Which checkpoints are removed.


@pytest.mark.parametrize("keep, expected", [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_the_newest_of_a_run_are_kept(root, keep, expected):
    lineage.prune(root, keep, put(root, 40, [["a", 0]]))
    assert left(root) == expected


def test_after_going_back_the_good_ones_are_kept_and_those_passed_are_removed(root):
    """The run went back from 30 to 10, and 20 and 30 no longer lead to its state."""
    state = put(root, 25, [["a", 0], ["b", 10]])
    lineage.prune(root, 2, state)
    assert left(root) == [10, 25, 30]
    lineage.prune(root, 2, put(root, 35, [["a", 0], ["b", 10]]))
    assert left(root) == [25, 35]


def test_checkpoints_of_other_runs_and_of_unknown_origin_stay(root):
    reader.folder_of(root, 5).mkdir()
    (root / "iter_notes").mkdir()
    put(root, 40, [["other", 0]])
    writer.save(root, 50, {"a": torch.ones(3)}, {"iteration": 50})
    lineage.prune(root, 1, put(root, 60, [["b", 0]]))
    assert left(root) == [10, 20, 30, 40, 50, 60] and reader.folder_of(root, 5).is_dir()


def test_iterations_are_numbers_and_not_words(tmp_path):
    for iteration in (9_999_999, 10_000_000, 10_000_001):
        state = put(tmp_path, iteration, [["a", 0]])
    lineage.prune(tmp_path, 2, state)
    assert left(tmp_path) == [10_000_000, 10_000_001]


@pytest.mark.parametrize("entries", [None, 5, "a", [1], [["a"]], [["a", "b"]], [[1, 2]], {"a": 1}])
def test_a_lineage_of_another_form_is_none(entries):
    state = json.loads(json.dumps({"iteration": 3, "lineage": entries}))
    assert lineage.lineage_of(state) == [] and not lineage.led_to(state, state)
    assert len(lineage.begin(state)) == 1 and lineage.begin(state)[0][1] == 3


def test_every_resumption_is_an_ancestor_of_the_next():
    state = {"iteration": 0, "lineage": lineage.begin()}
    for iteration in (10, 20, 30):
        before, state = state, {"iteration": iteration, "lineage": lineage.begin({**state, "iteration": iteration - 5})}
        assert lineage.same_run(before, state)
        assert lineage.led_to(before, state) == (before["iteration"] <= iteration - 5)
