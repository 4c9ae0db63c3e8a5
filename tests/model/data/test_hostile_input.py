"""Hostile files, most of them random, give a one-line error. Nothing is executed or read out of bounds, and no file is
left behind. An input that happens to be valid may pass, but must then be usable."""

import gzip
import json
import os
import pickle
import struct
from dataclasses import fields

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal import HalError
from hal.model.config.command_line import parse
from hal.model.config.formats import deepspeed, mindformers, mindformers_trainer, mindspeed
from hal.model.config.schema import Config, ConfigError
from hal.model.config.tokenizer_options import KINDS
from hal.model.data import gpt_dataset
from hal.model.data.indexed_dataset import read_index, read_note
from hal.model.data.preprocess.encode import Encoding
from hal.model.data.preprocess.inspect import describe
from hal.model.data.preprocess.preprocess import Job, preprocess
from hal.model.data.tokenizers.build import build_tokenizer
from hal.model.data.tokenizers.tokenizer import NullTokenizer

COMMON = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
HEADER = b"MMIDIDX\x00\x00"


class Bomb:
    """Creates a file if it is ever unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))


def index_bytes(lengths, pointers, documents, code=8, version=1, counts=None):
    sequences, ends = counts or (len(lengths), len(documents))
    header = HEADER + struct.pack("<QBQQ", version, code, sequences % 2**64, ends % 2**64)
    return header + b"".join(
        numpy.array(v, t).tobytes() for v, t in ((lengths, "i4"), (pointers, "i8"), (documents, "i8"))
    )


def whole(folder, sequences=8):
    """A valid dataset of 20 tokens per sequence."""
    (folder / "d.bin").write_bytes(numpy.arange(sequences * 20, dtype=numpy.uint16).tobytes())
    pointers = [40 * n for n in range(sequences)]
    (folder / "d.idx").write_bytes(index_bytes([20] * sequences, pointers, range(sequences + 1)))
    return folder / "d"


def use(prefix):
    """All readers of an index: its check, the training data, and the summary."""
    index = read_index(prefix)
    size = (prefix.parent / "d.bin").stat().st_size
    for n in range(len(index.lengths)):
        assert index.pointers[n] >= 0 and index.pointers[n] + index.lengths[n] * index.dtype.itemsize <= size
        assert len(index.tokens(n)) == index.lengths[n]
    list(describe(prefix, None, 3))
    config = Config(seq_length=4, split="8,1,1", data_path=str(prefix))
    gpt_dataset.open_data(config, NullTokenizer(70000), {"train": 5})["train"].fetch(0, 5)


def refused_or_usable(prefix):
    before = sorted(p.name for p in prefix.parent.iterdir())
    try:
        use(prefix)
    except ConfigError as error:
        assert "\n" not in str(error).split(" (see ")[0]
    assert sorted(p.name for p in prefix.parent.iterdir() if p.name != "cache") == [b for b in before if b != "cache"]


@COMMON
@given(cut=st.integers(0, 400))
def test_an_index_cut_off_anywhere(tmp_path, cut):
    prefix = whole(tmp_path)
    content = (tmp_path / "d.idx").read_bytes()
    (tmp_path / "d.idx").write_bytes(content[:cut])
    if cut < len(content):
        with pytest.raises(ConfigError, match=r"is not a Megatron index|is damaged"):
            use(prefix)


@COMMON
@given(cut=st.integers(0, 319))
def test_tokens_cut_off_anywhere(tmp_path, cut):
    prefix = whole(tmp_path)
    (tmp_path / "d.bin").write_bytes((tmp_path / "d.bin").read_bytes()[:cut])
    with pytest.raises(ConfigError, match="was it cut off"):
        use(prefix)


@settings(COMMON, max_examples=20)
@given(changes=st.lists(st.tuples(st.integers(0, 201), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_bytes_of_an_index_changed_at_random(tmp_path, changes):
    prefix = whole(tmp_path)
    content = bytearray((tmp_path / "d.idx").read_bytes())
    for at, new in changes:
        content[at : at + len(new)] = new
    (tmp_path / "d.idx").write_bytes(content)
    refused_or_usable(prefix)


NUMBERS = st.sampled_from([0, 1, -1, 7, 320, 2**31 - 1, -(2**31)])
FAR = st.sampled_from([0, 1, 2, -1, -2, 40, 318, 319, 320, 2**40, 2**62, 2**63 - 1, 2**63 - 2, -(2**63)])


@settings(COMMON, max_examples=30)
@given(lengths=st.lists(NUMBERS, max_size=4), draw=st.data(), code=st.integers(0, 255), dtype=st.booleans())
def test_lengths_offsets_and_ends_of_every_size(tmp_path, lengths, draw, code, dtype):
    prefix = whole(tmp_path)
    pointers = [draw.draw(FAR) for _ in lengths]
    ends = draw.draw(st.lists(FAR, max_size=5))
    (tmp_path / "d.idx").write_bytes(index_bytes(lengths, pointers, ends, code=8 if dtype else code))
    refused_or_usable(prefix)


@COMMON
@given(counts=st.tuples(*[st.sampled_from([0, 1, 8, 9, 2**31, 2**32 + 8, 2**61, 2**63, 2**64 - 1])] * 2))
def test_counts_of_every_size(tmp_path, counts):
    prefix = whole(tmp_path)
    (tmp_path / "d.idx").write_bytes(index_bytes([20] * 8, [40 * n for n in range(8)], range(9), counts=counts))
    if counts != (8, 9):
        with pytest.raises(ConfigError):
            use(prefix)


@pytest.mark.parametrize(
    "lengths, pointers, documents, words",
    [
        ([20], [-8], [0, 1], "length 20 at byte -8"),
        ([-1], [0], [0, 1], "length -1"),
        ([2], [2**63 - 4], [0, 1], "was it cut off"),  # pointer + length wraps around
        ([2**31 - 1], [0], [0, 1], "was it cut off"),
        ([2], [1], [0, 1], "inside a token"),
        ([2], [0], [0, 2], "document ends"),
        ([2], [0], [0, -1, 1], "document ends"),
        ([2], [0], [0, 2**62 + 9, -(2**62) - 9, 1], "document ends"),  # their difference wraps around
        ([2], [0], [], "document ends"),
        ([], [], [0], "no sequences"),
    ],
)
def test_impossible_indexes_say_why(tmp_path, lengths, pointers, documents, words):
    prefix = whole(tmp_path)
    (tmp_path / "d.idx").write_bytes(index_bytes(lengths, pointers, documents))
    with pytest.raises(ConfigError, match=words):
        use(prefix)


def test_negative_ids_are_refused(tmp_path):
    numpy.array([5, -7, 3] * 20, dtype=numpy.int32).tofile(tmp_path / "d.bin")
    (tmp_path / "d.idx").write_bytes(index_bytes([60], [0], [0, 1], code=4))
    config = Config(seq_length=4, split="1,0,0", data_path=str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="token id -7"):
        gpt_dataset.open_data(config, NullTokenizer(100), {"train": 5})


@pytest.mark.parametrize("which", ["d.idx", "d.bin", "d.json"])
def test_a_pickle_in_place_of_a_file_of_the_data(tmp_path, which):
    prefix = whole(tmp_path)
    (tmp_path / which).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(ConfigError):
        use(prefix)
        read_note(prefix)
    assert not (tmp_path / "exploded").exists()


# Configuration


def laughs():
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi")]
    return "\n".join(lines)


HOSTILE_YAML = {
    "billion laughs": laughs(),
    "recursive": "&a [*a]",
    "recursive mapping": "num-layers: &x {y: *x}",
    "object": "!!python/object/apply:os.system ['touch exploded']",
    "object value": "run-dir: !!python/object/apply:os.system ['touch exploded']",
    "name": "run-dir: !!python/name:os.system",
    "new object": "a: !!python/object/new:subprocess.Popen [[touch, exploded]]",
    "twice": "num-layers: 2\nnum-layers: 3",
    "deep": "[" * 50000,
    "deep mapping": "{a: " * 5000,
    "large": "# " + "x" * (1 << 20),
    "long number": "num-layers: " + "9" * 10000,
    "very large number": "num-layers: " + "9" * 400,
    "infinite": "lr: .inf",
    "not a number": "num-layers: .nan",
    "hexadecimal": "num-layers: 0xffffffffffffffffff",
    "date": "num-layers: 2001-01-01",
    "no date": "num-layers: 2001-99-99",
    "mapping key": "{a: 1}: 2",
    "list key": "? [a]\n: 2",
    "null": "~",
    "number": "5",
    "nested option": "num-layers: {a: 1}",
    "list in list": "pin: [[a]]",
    "control character": "run-dir: \x00",
    "two documents": "num-layers: 2\n---\nnum-layers: 3",
    "binary": "num-layers: !!binary aGVsbG8=",
    "set": "pin: !!set {a}",
    "no truth": "lr: !!bool x",
    "no time": "lr: !!timestamp x",
    "no integer": 'lr: !!int ""',
    "no float": 'lr: !!float ""',
    "time beyond float64": f"lr: 1{':0' * 190}.5",
    "long time": f"lr: 1{':1' * 500_000}",
    "long hexadecimal": f"num-layers: 0x{'f' * 390}",
    "longer hexadecimal": f"num-layers: 0x{'f' * 6000}",
    "byte 0 in a path": 'run-dir: "a\\0b"',
    "byte 0 in a list": 'data-path: ["a\\0b"]',
    "half a character": 'run-dir: "\\ud800"',
    "endless layers": "num-layers: 4611686018427387904",
}


@pytest.mark.parametrize("kind", HOSTILE_YAML)
@pytest.mark.parametrize("option", ["--config", "--deepspeed-config"])
def test_hostile_yaml(kind, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(HOSTILE_YAML[kind])
    with pytest.raises(ConfigError) as caught:
        parse([option, "c.yaml"], {})
    assert len(str(caught.value)) < 2000 and "\n" not in str(caught.value).split(" (see ")[0]
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"num-layers: \xff", pickle.dumps({"num-layers": 3}), b"\x1f\x8b"]
)
def test_files_that_are_no_text(content, tmp_path):
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError):
        parse(["--config", str(tmp_path / "c.yaml")], {})


def test_a_configuration_that_is_a_pickle_is_not_opened(tmp_path):
    (tmp_path / "c.yaml").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(ConfigError):
        parse(["--config", str(tmp_path / "c.yaml")], {})
    assert not (tmp_path / "exploded").exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*mindspeed.SECTIONS, *mindformers.SECTIONS, *(f.name for f in fields(Config))])


@COMMON
@given(content=st.dictionaries(KEYS | st.text(max_size=6), VALUES, max_size=4), option=st.booleans())
def test_configurations_drawn_at_random(tmp_path, content, option):
    (tmp_path / "c.json").write_text(json.dumps(content))
    try:
        parse(["--deepspeed-config" if option else "--config", str(tmp_path / "c.json")], {})
    except ConfigError as error:
        assert "Traceback" not in str(error)


FRONTS = {
    "sections": {**mindspeed.rules(), **mindformers.rules()},
    "trainer": mindformers_trainer.rules(),
    "deepspeed": deepspeed.rules(),
}


@COMMON
@pytest.mark.parametrize("option", FRONTS)
@given(draw=st.data())
def test_keys_of_other_systems_with_any_values(tmp_path, option, draw):
    content = {"runner_wrapper": {"type": "MFTrainOneStepCell"}} if option == "trainer" else {}
    keys = st.sampled_from(sorted(FRONTS[option]))
    likely = st.sampled_from(
        [0, 1, 2, 8, 1e9, 0.1, True, False, "rope", "x", [1, 2], [[1], [2]], {"device": "cpu"}, {}]
    )
    for key, value in draw.draw(st.dictionaries(keys, VALUES | likely, max_size=6)).items():
        *folders, last = key.split(".")
        node = content
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                return  # a rule for the whole section was drawn first
        node[last] = value
    (tmp_path / "c.json").write_text(json.dumps(content))
    try:
        parse(["--deepspeed-config" if option == "deepspeed" else "--config", str(tmp_path / "c.json")], {})
    except ConfigError as error:
        assert all("\n" not in problem.text for problem in error.problems)


# Text and vocabularies


def run(tmp_path, name, format=None, on_error="skip", documents="paragraph"):
    encoding = Encoding({"tokenizer_type": "ByteTokenizer"}, ("text",), None, False, True)
    job = Job([str(tmp_path / name)], str(tmp_path / "out" / "d"), encoding, format, documents, 1, on_error)
    return preprocess(job, lambda result, share: None, lambda message: None)


@COMMON
@given(
    content=st.binary(max_size=300)
    | st.lists(
        st.sampled_from([b'{"text": "x"}', b"<doc id=1>", b"</doc>", b"{", b"\xff", b"", b'{"text": "\\ud800"}']),
        max_size=8,
    ).map(b"\n".join),
    format=st.sampled_from([None, "json", "wiki", "text"]),
    suffix=st.sampled_from(["", ".gz", ".bz2", ".zst"]),
)
def test_text_drawn_at_random(tmp_path, content, format, suffix):
    (tmp_path / f"c{suffix}").write_bytes(content)
    try:
        result = run(tmp_path, f"c{suffix}", format)
        read_index(result.prefixes["text"])
        for path in (tmp_path / "out").iterdir():
            path.unlink()
    except HalError:
        assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_compressed_bomb_is_not_unpacked_into_memory(tmp_path, monkeypatch):
    from hal.model.data.preprocess import sources

    monkeypatch.setattr(sources, "_LONGEST", 1 << 16)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b" " * (1 << 22)))
    with pytest.raises(ConfigError, match="a line of more than"):
        run(tmp_path, "c.jsonl.gz", on_error="refuse")


@COMMON
@given(
    content=st.binary(max_size=200),
    kind=st.sampled_from([k for k in KINDS if KINDS[k].needs not in ((), ("vocab_size",))]),
)
def test_vocabularies_drawn_at_random(tmp_path, content, kind):
    (tmp_path / "v").write_bytes(content)
    try:
        tokenizer = build_tokenizer(
            Config(tokenizer_type=kind, **dict.fromkeys(KINDS[kind].needs, str(tmp_path / "v")))
        )
        assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode("some text"))
    except ConfigError as error:
        assert "\n" not in str(error).split(" (see ")[0]


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k].needs not in ((), ("vocab_size",))])
def test_a_pickle_in_place_of_a_vocabulary(tmp_path, kind):
    (tmp_path / "v").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(ConfigError):
        build_tokenizer(Config(tokenizer_type=kind, **dict.fromkeys(KINDS[kind].needs, str(tmp_path / "v"))))
    assert os.listdir(tmp_path) == ["v"]
