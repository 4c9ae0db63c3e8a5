"""A resumed run is the experiment of its checkpoint, or says what differs; other data are refused."""

import json

import numpy
import pytest

from hal.model.checkpoint import reader
from hal.model.config.schema import Config
from hal.model.data.fingerprint import of_prefix
from hal.model.data.megatron_datasets import indexed_dataset
from hal.model.training import experiment
from hal.model.training.run import main

TINY = ["--backend", "cpu_ref", "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"]
TINY += ["--seq-length", "16", "--micro-batch-size", "2", "--sample-tokens", "0"]


def write(prefix, seed=0, documents=40):
    """A dataset of random bytes."""
    builder = indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    ids = numpy.random.default_rng(seed).integers(0, 256, (documents, 60)).astype(numpy.uint16)
    for row in ids:
        builder.add_document(row, [len(row)])
    builder.finalize(f"{prefix}.idx")


@pytest.fixture
def resume(tmp_path, monkeypatch, capsys):
    """Trains 2 iterations on tmp_path/d, then continues with other options; returns (exit code, output)."""
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save")]
    write(tmp_path / "d")
    data = ["--data-path", str(tmp_path / "d")]
    first = [*options, *data, "--train-iters", "2", "--seed", "5", "--lr", "1e-3"]
    assert main(first) == 0
    capsys.readouterr()

    def again(*more, data=data, seed=("--seed", "5")):
        code = main([*options, *data, *seed, "--load", str(tmp_path / "save"), "--train-iters", "3", *more])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return again


@pytest.mark.parametrize(
    "options, note",
    [
        (["--lr", "0.1"], "changed since iter_0000002: lr 0.001 -> 0.1"),
        (["--lr", "1e-3", "--hidden-dropout", "0.5"], "hidden-dropout 0.1 -> 0.5"),
        (["--lr", "1e-3", "--adam-beta2", "0.5"], "adam-beta2 0.999 -> 0.5"),
        (["--lr", "1e-3", "--global-batch-size", "4"], "global-batch-size 2 -> 4"),
    ],
)
def test_changed_hyperparameters_are_reported(resume, options, note):
    code, output = resume(*options)
    assert code == 0 and note in output


def test_the_same_options_are_no_change(resume):
    code, output = resume("--lr", "1e-3", "--log-interval", "1", "--save-interval", "1")
    assert code == 0 and output.count("changed since") == 1 and "lr-decay-iters 2 -> 3" in output


def test_the_same_data_elsewhere_are_no_change(resume, tmp_path):
    (tmp_path / "e").mkdir()
    write(tmp_path / "e" / "copy")
    code, output = resume("--lr", "1e-3", data=["--data-path", str(tmp_path / "e" / "copy")])
    assert code == 0 and "copy" not in output.replace(str(tmp_path / "run"), "")


def test_other_data_are_refused(resume, tmp_path):
    """In place of the old ones: another .bin under an unchanged .idx."""
    index = (tmp_path / "d.idx").read_bytes()
    write(tmp_path / "d", seed=1)
    assert (tmp_path / "d.idx").read_bytes() == index
    code, output = resume("--lr", "1e-3")
    assert code == 2 and "was made with other data" in output and "of the train split has other contents" in output
    code, output = resume("--lr", "1e-3", "--accept-changed-data")
    assert code == 0 and "changed since iter_0000002: " in output and "of the train split has other contents" in output


def test_new_data_are_read_from_their_first_sample_on(resume, tmp_path):
    write(tmp_path / "e", seed=1)
    save = ["--save-interval", "1", "--new-dataset"]
    code, output = resume("--lr", "1e-3", *save, data=["--data-path", str(tmp_path / "e")])
    assert code == 0 and "changed since iter_0000002: " in output and "of the train split has other contents" in output
    _, state = reader.read_state(tmp_path / "save")
    assert (state["iteration"], state["consumed_samples"]) == (3, 2)


def test_a_job_with_restarts_reads_new_data_once(resume, tmp_path, monkeypatch):
    """After a restart it continues with the samples that it has not read, also if the data were new at its start."""
    monkeypatch.setenv("HAL_RESUME", "1")  # as the launcher sets it with --max-restarts
    write(tmp_path / "e", seed=1)
    new = ["--lr", "1e-3", "--new-dataset", "--save-interval", "1"]
    code, output = resume(*new, data=["--data-path", str(tmp_path / "e")])
    assert code == 2 and "--new-dataset in a job with restarts needs a --save that is not --load" in output
    new += ["--save", str(tmp_path / "other")]
    for last, consumed in (("3", 2), ("4", 4)):
        code, output = resume(*new, "--train-iters", last, data=["--data-path", str(tmp_path / "e")])
        assert code == 0, output
        assert reader.read_state(tmp_path / "other")[1]["consumed_samples"] == consumed


def test_another_text_is_refused(resume, tmp_path):
    (tmp_path / "text").write_text("other words\n" * 200)
    code, output = resume("--lr", "1e-3", data=["--text-file", str(tmp_path / "text")])
    assert code == 2 and "was made with other data" in output


def test_artificial_data_are_other_data(resume):
    code, output = resume("--lr", "1e-3", "--mock-data", data=[])
    assert code == 2 and "was made with other data: the train split has a different number of files" in output


def test_other_weights_of_the_same_files_are_refused(resume, tmp_path):
    write(tmp_path / "e", seed=1)
    options = [*TINY, "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "blend"), "--train-iters", "2"]
    options += ["--load", str(tmp_path / "blend"), "--lr", "1e-3"]

    def blend(first, second):
        return [*options, "--data-path", first, str(tmp_path / "d"), second, str(tmp_path / "e")]

    assert main(blend("0.3", "0.7")) == 0
    assert main(blend("3", "7")) == 0
    assert main(blend("0.7", "0.3")) == 2
    assert main([*blend("0.7", "0.3"), "--accept-changed-data"]) == 0


def test_another_order_or_part_of_the_same_files_is_reported(resume):
    # An epoch has 39 x 60 tokens in samples of 16. A longer run shuffles its last epochs together.
    code, output = resume("--lr", "1e-3", "--train-iters", "100", "--exit-interval", "1")
    assert code == 0 and "[[0, 39, null]] -> [[0, 39, 200]]" in output
    code, output = resume("--lr", "1e-3", "--split", "1,1,0")
    assert code == 0 and "[[0, 39, 200]] -> [[0, 20, null]]" in output


def test_another_tokenizer_is_refused(resume):
    code, output = resume("--lr", "1e-3", "--tokenizer-type", "NullTokenizer", "--vocab-size", "300")
    assert code == 2 and "the tokenizer of the train split" in output


def test_another_seed_is_reported_if_it_was_given_and_else_it_is_the_checkpoints(resume):
    code, output = resume("--lr", "1e-3", seed=())
    assert code == 0 and "--seed 5" in output and "seed 5 ->" not in output
    code, output = resume("--lr", "1e-3", seed=("--seed", "6"))
    assert code == 0 and "seed 5 -> 6" in output


def test_a_checkpoint_without_fingerprints_continues(resume, tmp_path):
    folder = tmp_path / "save" / "iter_0000002"
    manifest = json.loads((folder / reader.MANIFEST).read_text())
    del manifest["state"]["data"]
    manifest["sha256"][reader.MANIFEST] = reader.state_checksum(manifest["state"])
    (folder / reader.MANIFEST).write_text(json.dumps(manifest))
    assert resume("--lr", "1e-3")[0] == 0


def test_every_option_is_either_compared_or_listed():
    options = {f for f in Config.__dataclass_fields__ if f != "given"}
    assert set(experiment._NOT_COMPARED) <= options


def test_a_large_file_is_sampled_and_its_time_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("hal.model.common.atomic_files._BLOCK", 16)
    monkeypatch.setattr("hal.model.common.atomic_files._BLOCKS", 4)
    write(tmp_path / "d")
    before = of_prefix(tmp_path / "d")
    content = bytearray((tmp_path / "d.bin").read_bytes())
    assert not before["complete"] and len(content) > 64
    for at, seen in ((0, True), (len(content) - 1, True), (100, False)):
        changed = bytearray(content)
        changed[at] ^= 1
        (tmp_path / "d.bin").write_bytes(changed)
        after = of_prefix(tmp_path / "d")
        assert (after["sha256"] != before["sha256"]) == seen and after["modified"] != before["modified"]


def test_data_that_are_only_sampled_and_were_modified_are_reported():
    old = {"prefix": "d", "bytes": 9, "modified": 1, "sha256": "x", "complete": False}
    split = type("Split", (), {"source": {"tokenizer": "t", "files": [{**old, "modified": 2}]}})()
    saved = {"data": {"train": {"tokenizer": "t", "files": [old]}}}
    assert experiment._data(saved, {"train": split}) == (
        [],
        ["d was modified or copied; the sampled parts of it are the same"],
    )
