"""Preprocessing writes Megatron's files byte for byte; broken documents are named; an aborted run leaves no files."""

import bz2
import gzip
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy
import pytest
import zstandard

from hal.cli import main
from hal.model.config.schema import ConfigError
from hal.model.data.indexed_dataset import read_index, read_note
from hal.model.data.preprocess import preprocess as run
from hal.model.data.preprocess.encode import Encoding
from hal.model.data.preprocess.preprocess import Job, preprocess
from hal.model.data.tokenizers.tokenizer import ByteTokenizer

TEXTS = ["The first document.", "", "Ünïcode 字 and\na second line.", "x" * 3000, "last"]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": t, "title": f"title {n}", "id": n}) for n, t in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def job(tmp_path, *inputs, keys=("text",), language=None, newlines=False, eod=True, **options):
    encoding = Encoding({"tokenizer_type": "ByteTokenizer"}, tuple(keys), language, newlines, eod)
    return Job([str(i) for i in inputs], str(tmp_path / "out" / "data"), encoding, **options)


def make(*args, **options):
    skipped = []
    result = preprocess(job(*args, **options), lambda result, share: None, skipped.append)
    return result, skipped


def texts_of(prefix):
    """Every document's text, each of which must end with the end-of-document id."""
    index, texts = read_index(prefix), []
    for first, end in zip(index.documents, index.documents[1:]):
        ids = numpy.concatenate([index.tokens(n) for n in range(first, end)] or [numpy.array([], int)]).tolist()
        assert not ids or (ids[-1] == 256 and 256 not in ids[:-1])
        texts.append(ByteTokenizer().decode(ids))
    return texts


def as_megatron_writes(tmp_path, documents):
    """The files of Megatron's own writer. documents: lists of sequences of ids."""
    from hal.model.data.megatron_datasets import indexed_dataset

    builder = indexed_dataset().IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=numpy.uint16)
    for sequences in documents:
        builder.add_document([i for ids in sequences for i in ids], [len(ids) for ids in sequences])
    builder.finalize(str(tmp_path / "theirs.idx"))
    return [(tmp_path / f"theirs.{suffix}").read_bytes() for suffix in ("bin", "idx")]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_files_are_megatrons_byte_for_byte(jsonl, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(run, "_CHUNK_DOCUMENTS", 2)  # several chunks, so that their order matters
    result, _ = make(tmp_path, jsonl, workers=workers)
    documents = [[[*t.encode(), 256]] if t else [] for t in TEXTS]
    prefix = result.prefixes["text"]
    assert prefix == tmp_path / "out" / "data_text_document"
    ours = [(prefix.parent / f"{prefix.name}.{suffix}").read_bytes() for suffix in ("bin", "idx")]
    assert ours == as_megatron_writes(tmp_path, documents)
    assert (result.documents, result.empty, result.broken) == (5, 1, 0) and texts_of(prefix) == TEXTS
    assert result.tokens == sum(len(t.encode()) + 1 for t in TEXTS if t)


def test_megatron_reads_what_is_written(jsonl, tmp_path):
    from hal.model.data.megatron_datasets import indexed_dataset

    prefix = make(tmp_path, jsonl)[0].prefixes["text"]
    theirs = indexed_dataset().IndexedDataset(str(prefix))
    assert [ByteTokenizer().decode(theirs[n]) for n in range(len(theirs))] == [t for t in TEXTS if t]
    assert theirs.document_indices.tolist() == [0, 1, 1, 2, 3, 4]


def test_every_key_makes_a_dataset_and_the_note_travels_along(jsonl, tmp_path):
    result, _ = make(tmp_path, jsonl, keys=("text", "title"), eod=False)
    assert list(result.prefixes) == ["text", "title"]
    index = read_index(result.prefixes["title"])
    assert bytes(index.tokens(3).tolist()) == b"title 3" and len(index.lengths) == 5
    note = read_note(result.prefixes["title"])
    assert note["tokenizer"]["fingerprint"] == ByteTokenizer().fingerprint and note["tokenizer"]["eod"] == 256
    assert note["tokenizer"]["padded_vocab_size"] == 384 and (note["documents"], note["tokens"]) == (5, 35)
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()}
    assert modes == {0o640} and len(list((tmp_path / "out").iterdir())) == 6


@pytest.mark.parametrize(
    "suffix, compress", [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstandard.compress)]
)
def test_compressed_files(jsonl, tmp_path, suffix, compress):
    # Two members in sequence, as `cat a.gz b.gz` creates them.
    lines = jsonl.read_bytes().splitlines(keepends=True)
    (tmp_path / f"c.jsonl{suffix}").write_bytes(compress(b"".join(lines[:2])) + compress(b"".join(lines[2:])))
    assert texts_of(make(tmp_path, tmp_path / f"c.jsonl{suffix}")[0].prefixes["text"]) == TEXTS


def test_a_compressed_file_that_was_cut_off(jsonl, tmp_path):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:-1000])
    with pytest.raises(ConfigError, match=r"c\.jsonl\.gz:1: the rest of the file cannot be read"):
        make(tmp_path, path)
    result, skipped = make(tmp_path, jsonl, path, on_error="skip")
    assert result.documents == 5 and len(skipped) == 1


PAGES = [("Anarchism", "It is a\n\npolitical philosophy."), ("Empty", ""), ("Autism & more", "A condition.")]


def test_both_forms_of_wikiextractor_give_the_same(tmp_path):
    docs, lines = [], []
    for n, (title, text) in enumerate(PAGES):
        docs.append(f'<doc id="{n}" url="https://x?curid={n}" title="{title}">\n{title}\n\n{text}\n\n</doc>\n')
        lines.append(json.dumps({"id": n, "url": "", "title": title, "text": text}) + "\n")
    for form, content in (("docs", docs), ("json", lines)):
        folder = tmp_path / form / "AA"  # as WikiExtractor lays them out
        folder.mkdir(parents=True)
        (folder / "wiki_00").write_text("".join(content[:1]))
        (folder / "wiki_01").write_text("".join(content[1:]))
        (folder / ".hidden").write_text("no document")
    texts = [
        texts_of(preprocess(job(tmp_path / form, tmp_path / form), lambda *a: None, print).prefixes["text"])
        for form in ("docs", "json")
    ]
    assert texts[0] == texts[1] == [text for _, text in PAGES]


@pytest.mark.parametrize(
    "documents, expected",
    [
        ("line", ["a b", "c", "d"]),
        ("paragraph", ["a b\nc\n", "d"]),
        ("file", ["a b\nc\n\n\nd"]),
    ],
)
def test_plain_text(tmp_path, documents, expected):
    (tmp_path / "t.txt").write_text("a b\nc\n\n\nd")
    assert texts_of(make(tmp_path, tmp_path / "t.txt", documents=documents)[0].prefixes["text"]) == expected


def test_sentences(tmp_path):
    text = "Dr. Smith paid 3.5 dollars. He left!\nA new line? Yes.\n\nThe end."
    (tmp_path / "s.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": " \n "}) + "\n")
    result, _ = make(tmp_path, tmp_path / "s.jsonl", language="en")
    prefix = result.prefixes["text"]
    assert prefix.name == "data_text_sentence"
    index = read_index(prefix)
    sentences = [bytes(index.tokens(n).tolist() if n < 4 else index.tokens(n)[:-1].tolist()).decode() for n in range(5)]
    assert sentences == ["Dr. Smith paid 3.5 dollars.", "He left!", "A new line?", "Yes.", "The end."]
    assert index.documents.tolist() == [0, 5, 5] and index.tokens(4)[-1] == 256


def test_sentences_with_the_line_ends_between_them(tmp_path):
    (tmp_path / "s.txt").write_text("One. Two.\nThree.\n\nFour.")
    prefix = make(tmp_path, tmp_path / "s.txt", language="en", newlines=True, eod=False, documents="file")[0].prefixes[
        "text"
    ]
    index = read_index(prefix)
    assert [bytes(index.tokens(n).tolist()) for n in range(4)] == [b"One.", b"Two.\n", b"Three.\n\n", b"Four."]


BROKEN = [
    (b'{"text": "x"', r"not valid JSON"),
    (b'{"txt": "x"}', r"no field 'text'; it has 'txt'"),
    (b'{"text": 5}', r"'text' is not a string"),
    (b'["text"]', r"not a JSON object"),
    (b'{"text": "a\xffb"}', r"not UTF-8: byte 0xff at offset 11"),
    (b'{"text": "\\ud800"}', r"lone surrogate"),
    (b"[" * 100_000, r"."),
    (b'{"text": ' + b"1" * 10_000 + b"}", r"."),
    (b"\x80\x04\x95cposix system", r"not UTF-8"),
]


@pytest.mark.parametrize("line, words", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_line_is_named_and_refused_or_skipped(tmp_path, line, words, workers):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "after"}\n')
    with pytest.raises(ConfigError, match=rf"c\.jsonl:2: .*{words}.*nothing was written") as caught:
        make(tmp_path, path, workers=workers)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    result, skipped = make(tmp_path, path, on_error="skip", workers=workers)
    assert texts_of(result.prefixes["text"]) == ["good", "after"] and result.broken == 1
    assert len(skipped) == 1 and "c.jsonl:2: " in skipped[0]


def test_broken_pages(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(
        '<doc title="A">\nA\n\ntext\n</doc>\nstray\n<doc title="B">\n<doc title="C">\nC\n\nmore\n</doc>\n</doc>\n'
        '<doc title="D">\n'
    )
    result, skipped = make(tmp_path, path, on_error="skip")
    assert texts_of(result.prefixes["text"]) == ["text", "more"]
    lines = [message.split("wiki_00:")[1] for message in skipped]
    assert [int(m.split(":")[0]) for m in lines] == [6, 7, 13, 14] and "truncated" in lines[3]


def test_wrong_input(tmp_path, jsonl):
    with pytest.raises(ConfigError, match="names no file"):
        make(tmp_path, tmp_path / "absent-*.jsonl")
    (tmp_path / "unclear").write_text("neither this nor that")
    with pytest.raises(ConfigError, match="give --input-format"):
        make(tmp_path, tmp_path / "unclear")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="contains no text"):
        make(tmp_path, tmp_path / "empty.jsonl")
    assert not (tmp_path / "out").exists()
    make(tmp_path, tmp_path / "corp*.jsonl")
    with pytest.raises(ConfigError, match="exists; remove it"):
        make(tmp_path, jsonl)


def test_a_refused_run_leaves_no_folder_that_it_made(jsonl, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "old").mkdir()
    before = sorted(p.name for p in tmp_path.iterdir())
    for place in ("new/deep/x", "old/newdir/x", "old/x"):
        with pytest.raises(ConfigError, match="nothing was written"):
            bad_job = replace(job(tmp_path, tmp_path / "bad.jsonl"), output_prefix=str(tmp_path / place))
            preprocess(bad_job, lambda result, share: None, lambda message: None)
        assert sorted(p.name for p in tmp_path.iterdir()) == before and not list((tmp_path / "old").iterdir())


def test_a_failure_while_writing_leaves_nothing(jsonl, tmp_path, monkeypatch):
    rename = run.Path.rename

    def fail(self, target):
        if str(target).endswith(".idx"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(run.Path, "rename", fail)
    with pytest.raises(OSError):
        make(tmp_path, jsonl)
    assert not (tmp_path / "out").exists()


def test_what_a_killed_run_left_is_removed_by_the_next_and_a_running_one_is_left_alone(jsonl, tmp_path):
    target = job(tmp_path, jsonl)
    dead = tmp_path / "out" / ".data.0123456789ab.tmp"
    dead.mkdir(parents=True)
    (dead / "text.bin").write_bytes(b"half")
    with run._temporary_folder(run.Path(target.output_prefix)) as alive:
        make(tmp_path, jsonl)
        assert alive.is_dir() and not dead.exists()
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_stopped_run_leaves_nothing(tmp_path, number, workers):
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "' + "word " * 400 + '"}\n' * 1)
    line = path.read_text()
    with open(path, "w") as file:
        for _ in range(60_000):
            file.write(line)
    argv = [
        "data",
        "preprocess",
        "--input",
        str(path),
        "--output-prefix",
        str(tmp_path / "out" / "d"),
        "--workers",
        workers,
    ]
    argv += ["--tokenizer-type", "ByteTokenizer", "--log-interval", "100"]
    command = [sys.executable, "-c", "import sys; from hal.cli import main; sys.exit(main(sys.argv[1:]))", *argv]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert "documents/s" in process.stderr.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and f"stopped by {number.name}" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_leaves_nothing(jsonl, tmp_path, monkeypatch):
    from hal import HalError

    monkeypatch.setattr(run, "_work", _die)
    with pytest.raises(HalError, match="a worker was killed"):
        make(tmp_path, jsonl, workers=2)
    assert not (tmp_path / "out").exists()


def _die(raws):
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_command(jsonl, tmp_path, capsys):
    argv = ["data", "preprocess", "--input", str(jsonl), "--output-prefix", str(tmp_path / "my-gpt")]
    argv += ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--dataset-impl", "lazy"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "5 documents, 1 empty" in out and "documents/s" in out and "my-gpt_text_document.idx" in out
    assert main(argv) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--keep-newlines", "needs --split-sentences"),
        ("--lang de", "needs --split-sentences"),
        ("--split-sentences --lang english", "ISO 639"),
        ("--vocab-file x", "--vocab-file would be ignored: it needs --tokenizer-type GPT2BPETokenizer or"),
        ("--tokenizer-type GPT2BPETokenizer", "needs --vocab-file and --merge-file"),
        ("--workers 0", "must be > 0"),
        ("--json-keys a a", "twice"),
        ("--input-format json --documents line", "would be ignored"),
    ],
)
def test_wrong_usage(argv, words, jsonl, capsys):
    base = ["data", "preprocess", "--input", str(jsonl), "--output-prefix", "x", "--tokenizer-type", "ByteTokenizer"]
    with pytest.raises(SystemExit) as caught:
        main([*base, *argv.split()])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and words in err and err.count("\n") == 1
