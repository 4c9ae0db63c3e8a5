"""Files of examples as sequences of tokens, labels and document starts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import finetuning
import numpy
import pytest

from hal.model.config.command_line import build
from hal.model.config.schema import ConfigError
from hal.model.data.finetuning import encoded_file
from hal.model.data.finetuning.example_split import open_examples
from hal.model.data.gpt_dataset import Split
from hal.model.data.tokenizers.build import build_tokenizer

pytest.importorskip("transformers", reason="needs transformers (extra: transformers)")

IGNORED, EOD = -1, 256


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens examples with the byte tokenizer."""
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))

    def open_(examples: list[Any] | None, *names: str, **options: Any) -> dict[str, Split]:
        path = str(tmp_path / "train.jsonl")
        if examples is not None:
            finetuning.write_lines(Path(path), examples)
        config = build({"sft": True, "data_path": path, "seq_length": 8, **options})
        return open_examples(config, build_tokenizer(config), list(names or ("train",)))

    return open_


def pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def test_a_sequence_holds_an_example_and_padding(opened: Any) -> None:
    split = opened([pair("ab", "cd")])["train"]
    tokens, labels = split.fetch(0, 1)
    assert tokens.tolist() == [[*b"abcd", EOD, EOD, EOD, EOD]]
    assert labels.tolist() == [[IGNORED, *b"cd", EOD, *[IGNORED] * 4]]
    assert split.starts(0, tokens).tolist() == [[0, 0, 0, 0, 4, 4, 4, 4]], "padding is a document of its own"


def test_packed_examples_are_documents_of_a_sequence(opened: Any) -> None:
    split = opened([pair("a", "b"), pair("c", "de"), pair("f", "g"), pair("hijk", "lmn")], packing=True)["train"]
    assert split.dataset.sequences == 2
    tokens, labels = split.fetch(0, 2)
    rows = {bytes(row[row != EOD].tolist()): n for n, row in enumerate(tokens)}
    assert set(rows) == {b"hijklmn", b"cdeabfg"}
    at = rows[b"cdeabfg"]
    assert tokens[at].tolist() == [*b"cdeabfg", EOD]
    assert labels[at].tolist() == [*b"de", EOD, *b"b", EOD, *b"g", EOD, IGNORED]
    assert split.starts(0, tokens)[at].tolist() == [0, 0, 0, 3, 3, 5, 5, 7]


def test_every_epoch_has_each_sequence_once_in_an_order_of_its_own(opened: Any) -> None:
    examples = [pair(chr(97 + n), "x") for n in range(20)]
    split = opened(examples)["train"]
    epochs = [split.fetch(20 * epoch, 20)[0][:, 0].tolist() for epoch in range(3)]
    assert all(sorted(epoch) == [97 + n for n in range(20)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert opened(None)["train"].fetch(13, 20)[0][:, 0].tolist() == (epochs[0] + epochs[1])[13:33]
    assert opened(None, seed=5)["train"].fetch(0, 20)[0][:, 0].tolist() not in epochs


def test_the_validation_split_is_in_the_order_of_the_file(opened: Any) -> None:
    examples = [pair(chr(97 + n), "x") for n in range(10)]
    splits = opened(examples, "train", "valid", split="7,3,0", eval_interval=1)
    assert splits["valid"].fetch(0, 4)[0][:, 0].tolist() == [*b"hijh"]
    assert sorted(splits["train"].fetch(0, 7)[0][:, 0].tolist()) == [*b"abcdefg"]
    assert opened(None)["train"].dataset.sequences == 10, "without an evaluation all examples are for training"
    assert opened(None, split="5,5,0")["train"].dataset.sequences == 5


def test_files_of_their_own_for_validation(opened: Any, tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b"), ("v", "v")):
        line = json.dumps(pair(letter, "x")).encode() + b"\n\n"
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(line))
    files = {name: str(tmp_path / f"{name}.jsonl.gz") for name in "abv"}
    given = {"train_data_path": (files["a"], files["b"]), "valid_data_path": (files["v"],), "eval_interval": 1}
    splits = opened(None, "train", "valid", data_path=(), **given)
    assert sorted(splits["train"].fetch(0, 2)[0][:, 0].tolist()) == [*b"ab"]
    assert splits["valid"].fetch(0, 1)[0][0, 0] == ord("v")


def test_examples_that_are_too_long_are_refused_or_cut(opened: Any) -> None:
    examples = [pair("abc", "defgh"), pair("abc", "defghi"), pair("abcdefghi", "j"), pair("abcdefghijk", "l")]
    with pytest.raises(ConfigError) as caught:
        opened(examples)
    assert "3 of 4 examples have more than 9 tokens, which is what --seq-length 8 holds" in str(caught.value)
    assert "train.jsonl:4, has 13. Raise --seq-length, or cut their ends off with --truncation" in str(caught.value)
    dataset = opened(None, truncation=True)["train"].dataset
    assert dataset.summary() == (
        "2 examples in 2 sequences, of which 100% are filled; 1 was cut to 9 tokens; "
        "2 more are left out, because no token of the answer remained"
    )
    labels = [dataset[n]["labels"].tolist() for n in range(2)]
    assert sorted(labels) == [[IGNORED, IGNORED, *b"defghi"], [IGNORED, IGNORED, *b"defgh", EOD]]


def test_all_wrong_lines_are_reported_at_once(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ["{", pair("a", ""), {"messages": []}, '"text"']
    with pytest.raises(ConfigError) as caught:
        opened([pair("a", "b"), *wrong, pair("c", "d")])
    lines = caught.value.text.splitlines()
    assert lines[0].startswith("4 of the 6 lines of ") and lines[0].endswith("train.jsonl are no examples:")
    assert [line.partition(".jsonl:")[2][0] for line in lines[1:]] == ["2", "3", "4", "5"]
    monkeypatch.setattr(encoded_file, "_LISTED", 3)
    with pytest.raises(ConfigError) as caught:
        opened(wrong)
    assert len(caught.value.text.splitlines()) == 5 and caught.value.text.endswith("\n  and 1 more")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_path": "gone.jsonl"}, "the examples gone.jsonl cannot be read: No such file"),
        ({"data_path": (".",)}, "the examples . cannot be read: Is a directory"),
        ({"data_path": ("0.5", "a", "0.5", "b")}, "--data-path gives weights"),
        ({"truncation": True, "seq_length": 1}, "the train split has no examples with an answer"),
    ],
)
def test_data_that_cannot_be_used_are_refused(options: dict[str, Any], message: str, opened: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        opened([pair("abc", "d")], **options)
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="has no examples: it is empty"):
        opened([])


def test_a_file_is_encoded_once_until_it_or_the_template_changes(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened([pair("a", "b")])["train"]
    with monkeypatch.context() as patch:
        patch.setattr(encoded_file, "_encode", None)
        assert opened(None)["train"].source == before.source
    assert opened([pair("a", "bc")])["train"].source != before.source
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    changed = opened([pair("a", "b")], chat_template=str(tmp_path / "t.jinja"))["train"]
    assert changed.source["files"][0]["sha256"][0] == before.source["files"][0]["sha256"][0]
    assert changed.source != before.source


def test_ids_outside_of_the_vocabulary_are_refused(opened: Any) -> None:
    split = opened([pair("a", "b")])["train"]
    split.vocabulary = 200
    with pytest.raises(ConfigError, match="token id 256"):
        split.fetch(0, 1)
    assert numpy.iinfo(numpy.int64).max > len(split.dataset) > 1 << 60
