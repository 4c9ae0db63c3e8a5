"""The data: the built-in corpus, text files, indexed datasets, and an error for every kind of invalid input."""

import struct

import numpy
import pytest
import torch

from hal import HalError
from hal.model.common.atomic_files import publish_folder
from hal.model.config.schema import Config, ConfigError
from hal.model.data import gpt_dataset, indexed_dataset, megatron_datasets, text_corpus
from hal.model.data.indexed_dataset import read_index
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer
from hal.model.parallel.document_mask import IGNORED


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))


def write(prefix, documents, dtype=numpy.uint16):
    """A .bin/.idx written by hand, from the format's description."""
    lengths = numpy.array([len(d) for d in documents], dtype=numpy.int32)
    pointers = (numpy.cumsum(lengths) - lengths).astype(numpy.int64) * numpy.dtype(dtype).itemsize
    numpy.concatenate([numpy.array(d, dtype=dtype) for d in documents]).tofile(f"{prefix}.bin")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(documents), len(documents) + 1)
    ends = numpy.arange(len(documents) + 1, dtype=numpy.int64)
    (prefix.parent / f"{prefix.name}.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + ends.tobytes())


def config(**options):
    return Config(**{"seq_length": 16, "split": "8,1,1", **options})


@pytest.fixture
def prefix(tmp_path):
    write(tmp_path / "d", [list(range(10 * n, 10 * n + 50)) for n in range(20)])
    return tmp_path / "d"


def test_samples_are_windows_of_the_documents_and_labels_the_next_token(prefix):
    splits = gpt_dataset.open_data(config(data_path=str(prefix)), NullTokenizer(300), {"train": 30, "valid": 4})
    tokens, labels = splits["train"].fetch(0, 8)
    assert tokens.shape == labels.shape == (8, 16) and tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    # 16 of the 20 documents are for training: ids of documents 16.. appear in no sample
    assert tokens.max() < 10 * 15 + 50
    # 800 tokens have 49 samples of 16, so one epoch is enough for all that is asked for.
    assert splits["train"].source["parts"] == [[0, 16, None]] and splits["valid"].source["parts"] == [[16, 18, None]]
    again = gpt_dataset.open_data(config(data_path=str(prefix)), NullTokenizer(300), {"train": 30})["train"]
    assert torch.equal(again.fetch(0, 8)[0], tokens) and torch.equal(again.fetch(4, 2)[0], tokens[4:6])


def test_a_split_is_as_large_as_its_documents(prefix):
    """16 documents of 50 tokens are 49 samples of 16 and their labels; one more needs a second epoch."""

    def train(samples, **options):
        options = config(data_path=(str(prefix),), **options)
        return gpt_dataset.open_data(options, NullTokenizer(300), {"train": samples})["train"]

    assert train(49).source["parts"] == [[0, 16, None]] and train(50).source["parts"] == [[0, 16, 50]]
    assert train(1, seq_length=799).fetch(0, 1)[0].shape == (1, 799)
    with pytest.raises(ConfigError, match="has 800 tokens in 16 sequences, fewer than one sample"):
        train(1, seq_length=800)


@pytest.mark.parametrize("options", [{}, {"text_file": "text.txt"}])
def test_all_splits_come_from_one_text(prefix, monkeypatch, options):
    monkeypatch.setattr(gpt_dataset, "text_file", lambda path, tokenizer: {"text.txt": prefix}[path])
    monkeypatch.setattr(gpt_dataset, "standard_library", lambda tokenizer: {None: prefix}[options.get("text_file")])
    splits = gpt_dataset.open_data(config(**options), NullTokenizer(300), {"train": 30, "valid": 4})
    assert [splits[name].source["parts"] for name in ("train", "valid")] == [[[0, 16, None]], [[16, 18, None]]]


def test_artificial_data_are_ascending_numbers():
    tokenizer = NullTokenizer(50)
    lengths = megatron_datasets.gpt_dataset().MockGPTLowLevelDataset(tokenizer).sequence_lengths
    options = {"mock_data": True, "split": f"{len(lengths) - 1},1,0"}  # one document is for validation
    longest = int(lengths[-1]) - 1
    splits = gpt_dataset.open_data(config(**options, seq_length=longest), tokenizer, {"train": 8, "valid": 1})
    tokens, labels = splits["train"].fetch(0, 8)
    # 50 is the end-of-document token, and also a number that occurs in the documents.
    follows, begins = labels == (tokens + 1) % 51, (tokens == 50) & (labels == 1)
    assert (follows | begins | (labels == 50)).all() and follows.float().mean() > 0.9
    assert splits["valid"].fetch(0, 1)[0].shape == (1, longest)
    with pytest.raises(ConfigError, match="the valid split of --mock-data is too small for --seq-length"):
        gpt_dataset.open_data(config(**options, seq_length=longest + 1), tokenizer, {"valid": 1})


def test_a_token_knows_where_its_document_begins():
    tokens = torch.tensor([[9, 1, 9, 2, 3]])
    assert gpt_dataset.Split([], vocabulary=10, eod=9).starts(0, tokens).tolist() == [[0, 1, 1, 3, 3]]


def test_a_split_repeats_masks_the_ends_of_documents_and_refuses_alien_ids(prefix):
    rows = [torch.tensor([1, 9, 2, 3]), torch.tensor([9, 4, 5, 9]), torch.tensor([6, 7, 8, 0])]
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    tokens, labels = gpt_dataset.Split(samples, vocabulary=10, eod=9).fetch(2, 3)
    assert tokens.tolist() == [[6, 7, 8], [1, 9, 2], [9, 4, 5]] and labels.tolist() == [[7, 8, 0], [9, 2, 3], [4, 5, 9]]
    same, masked = gpt_dataset.Split(samples, 10, 9, mask_loss=True).fetch(2, 3)
    assert same.tolist() == tokens.tolist()
    # The token after the end of a document cannot be predicted; the end token itself can.
    assert masked.tolist() == [[7, 8, 0], [9, IGNORED, 3], [IGNORED, 5, 9]]
    with pytest.raises(ConfigError, match="token id 9: the tokenizer has 9 ids"):
        gpt_dataset.Split(samples, vocabulary=9, eod=8).fetch(1, 1)
    opened = gpt_dataset.open_data(config(data_path=str(prefix)), NullTokenizer(300), {"train": 9})["train"]
    assert "attention_mask" not in opened.dataset[0], "it would have seq_length ** 2 elements"


def test_index_maps_are_cached_never_beside_the_data_and_rebuilt_when_the_data_changes(prefix, tmp_path):
    before = set(tmp_path.iterdir())
    options = config(data_path=str(prefix))
    first = gpt_dataset.open_data(options, NullTokenizer(300), {"train": 5})["train"].fetch(0, 5)[0]
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"}
    folders = list((tmp_path / "cache" / "index").iterdir())
    gpt_dataset.open_data(options, NullTokenizer(300), {"train": 6})
    assert list((tmp_path / "cache" / "index").iterdir()) == folders
    assert all(f.stat().st_mode & 0o777 == 0o640 for f in folders[0].iterdir())
    assert folders[0].stat().st_mode & 0o777 == 0o750
    write(prefix, [[7] * 50 for _ in range(21)])
    rebuilt = gpt_dataset.open_data(options, NullTokenizer(300), {"train": 5})["train"].fetch(0, 5)[0]
    assert torch.all(rebuilt == 7) and not torch.equal(first, rebuilt)


def edit(path, at, content):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda p: (p.parent / "d.idx").unlink(), "does not exist"),
        (lambda p: (p.parent / "d.bin").unlink(), "does not exist"),
        (lambda p: edit(p.parent / "d.idx", 0, b"XX"), "is not a Megatron index"),
        (lambda p: (p.parent / "d.idx").write_bytes(b"MMID"), "is not a Megatron index"),
        (lambda p: edit(p.parent / "d.idx", 9, b"\x02"), "version 2"),
        (lambda p: edit(p.parent / "d.idx", 17, b"\x07"), "token type 7"),
        (lambda p: edit(p.parent / "d.idx", 18, b"\xff"), "is damaged"),
        (lambda p: (p.parent / "d.idx").write_bytes((p.parent / "d.idx").read_bytes()[:-3]), "is damaged"),
        (lambda p: (p.parent / "d.bin").write_bytes((p.parent / "d.bin").read_bytes()[:-2]), "cut off"),
        (lambda p: edit(p.parent / "d.bin", 10, b"\xff\xff"), "token id 65535"),
    ],
)
def test_damaged_data_is_refused(prefix, damage, words):
    damage(prefix)
    with pytest.raises(ConfigError, match=words):
        gpt_dataset.open_data(config(data_path=str(prefix)), NullTokenizer(300), {"train": 5})


def test_other_refusals(prefix, monkeypatch):
    with pytest.raises(ConfigError, match=r"without \.bin or \.idx"):
        gpt_dataset.open_data(config(data_path=f"{prefix}.bin"), NullTokenizer(300), {"train": 5})
    with pytest.raises(ConfigError, match="fewer than one sample"):
        gpt_dataset.open_data(config(data_path=str(prefix), seq_length=4000), NullTokenizer(300), {"train": 5})
    with pytest.raises(ConfigError, match="valid split"):
        gpt_dataset.open_data(config(data_path=str(prefix), split="1,0,0"), NullTokenizer(300), {"valid": 5})
    monkeypatch.setattr(
        indexed_dataset, "_SCAN_BYTES", 0
    )  # data too large to scan at the start is checked batch by batch
    split = gpt_dataset.open_data(config(data_path=str(prefix)), NullTokenizer(100), {"train": 30})["train"]
    with pytest.raises(ConfigError, match="vocabulary is too small"):
        split.fetch(0, 30)


def test_the_built_in_corpus_is_the_standard_library_and_is_made_once(tmp_path, monkeypatch):
    tokenizer = ByteTokenizer()
    prefix = text_corpus.standard_library(tokenizer)
    lengths = read_index(prefix).lengths
    tokens = numpy.fromfile(f"{prefix}.bin", dtype=numpy.uint16)
    assert len(lengths) > 300 and len(tokens) == lengths.sum() > 5_000_000
    assert (tokens == tokenizer.eod).sum() == len(lengths)
    _, files = text_corpus.sources()
    assert len(files) == len(lengths)
    starts = numpy.cumsum(lengths) - lengths
    for n in (0, len(files) // 2, len(files) - 1):
        document = tokens[starts[n] : starts[n] + lengths[n]]
        assert document[-1] == tokenizer.eod and bytes(document[:-1].tolist()) == files[n].read_bytes()
    monkeypatch.setattr(text_corpus, "indexed_dataset", lambda: pytest.fail("built twice"))
    assert text_corpus.standard_library(tokenizer) == prefix
    for path in prefix.parent.iterdir():
        assert path.stat().st_mode & 0o777 == 0o640
    assert prefix.parent.stat().st_mode & 0o777 == 0o750


def test_a_text_file_comes_back_whole(tmp_path):
    path = tmp_path / "t.txt"
    content = "".join(f"line {n} with é and 字\n" * 3 for n in range(500))
    path.write_text(content, encoding="utf-8")
    prefix = text_corpus.text_file(str(path), ByteTokenizer())
    tokens = numpy.fromfile(f"{prefix}.bin", dtype=numpy.uint16).tolist()
    assert tokens[-1] == 256 and tokens.count(256) == 1
    assert ByteTokenizer().decode(tokens[:-1]) == content
    assert len(read_index(prefix).lengths) > 5  # several sequences, so that a split has something to distribute


@pytest.mark.parametrize(
    "content, words",
    [
        (b"ok\nbad \xff byte", r"byte 0xff at offset 7 \(line 2\)"),
        (b" \n", "contains no text"),
        (None, "cannot be read"),
    ],
)
def test_wrong_text_files(tmp_path, content, words):
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        text_corpus.text_file(str(path), ByteTokenizer())


def test_a_cache_that_cannot_be_written_says_what_to_set(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(HalError, match="set HAL_CACHE_DIR"):
        text_corpus.standard_library(ByteTokenizer())


def test_a_cache_of_index_maps_that_others_could_change_is_refused(prefix, tmp_path):
    folder = tmp_path / "maps"
    options = config(data_path=(str(prefix),), data_cache_path=str(folder))
    gpt_dataset.open_data(options, NullTokenizer(300), {"train": 2})
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=r"--data-cache-path \S* is not safe: .* writable by others"):
        gpt_dataset.open_data(options, NullTokenizer(300), {"train": 2})


def test_two_builders_at_once_and_a_crash_leave_one_whole_folder(tmp_path):
    target = tmp_path / "folder"
    with publish_folder(target) as first:
        (first / "x").write_text("1")
        assert not target.exists()
        with publish_folder(target) as second:
            (second / "x").write_text("2")
    assert (target / "x").read_text() == "2" and [p.name for p in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(RuntimeError), publish_folder(tmp_path / "other") as half:
        (half / "x").write_text("3")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
