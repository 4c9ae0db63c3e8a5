"""The output of `hal data inspect`, and the inputs it refuses."""

import json

import numpy
import pytest

from hal.cli import main
from hal.model.config.schema import ConfigError
from hal.model.data.indexed_dataset import note_path, read_index, require_match
from hal.model.data.preprocess.inspect import describe, histogram
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer


@pytest.fixture
def prefix(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("alpha", "", "beta gamma", "x" * 5000)))
    argv = ["data", "preprocess", "--input", str(path), "--output-prefix", str(tmp_path / "d")]
    assert main([*argv, "--tokenizer-type", "ByteTokenizer", "--append-eod"]) == 0
    return tmp_path / "d_text_document"


def test_counts_lengths_and_samples(prefix, capsys):
    capsys.readouterr()
    assert main(["data", "inspect", str(prefix), "--samples", "3"]) == 0
    out = capsys.readouterr().out
    for words in ("4 documents, 3 sequences, 5,018 tokens", "uint16 ids, 10,036 bytes", "made with ByteTokenizer"):
        assert words in out
    assert "1 documents are empty" in out and "6 to 5001" in out
    assert "document 0: 'alpha'" in out and "document 1: ''" in out and "document 2: 'beta gamma'" in out


def test_the_histogram_counts_every_length_once():
    lengths = numpy.array([0, 1, 1, 2, 3, 4, 7, 8, 1023], dtype=numpy.int32)
    rows = [line.split() for line in list(histogram(lengths))[1:]]
    counts = {(int(r[0]), int(r[2].replace(",", ""))): int(r[3]) for r in rows}
    assert counts[0, 0] == 1 and counts[1, 1] == 2 and counts[2, 3] == 2 and counts[4, 7] == 2 and counts[8, 15] == 1
    assert counts[512, 1023] == 1 and sum(counts.values()) == len(lengths)


def test_data_without_a_note_is_shown_as_ids(prefix):
    note_path(prefix).unlink()
    assert "document 0: 97 108 112 104 97 256" in list(describe(prefix, None, 1))
    assert "document 0: 'alpha'" in list(describe(prefix, ByteTokenizer(), 1))


def test_another_tokenizer_is_noticed(prefix):
    with pytest.raises(ConfigError, match=r"made with ByteTokenizer .*this run has NullTokenizer"):
        list(describe(prefix, NullTokenizer(300), 1))
    require_match(prefix, ByteTokenizer())
    require_match(prefix, NullTokenizer(256))  # ends documents with 256 too


@pytest.mark.parametrize("content", ["{", "[]", '{"tokenizer": 3}', "\x00", "[" * 100000, '{"tokenizer": {"type": 1}}'])
def test_a_damaged_note_is_refused(prefix, content):
    note_path(prefix).write_text(content)
    with pytest.raises(ConfigError, match="is not a valid note"):
        list(describe(prefix, None, 1))


def test_a_damaged_index_is_refused_by_the_command(prefix, capsys):
    idx = prefix.parent / f"{prefix.name}.idx"
    idx.write_bytes(idx.read_bytes()[:-1])
    assert main(["data", "inspect", str(prefix)]) == 2
    err = capsys.readouterr().err
    assert "is damaged" in err and err.count("\n") == 1
    with pytest.raises(ConfigError):
        read_index(prefix)
