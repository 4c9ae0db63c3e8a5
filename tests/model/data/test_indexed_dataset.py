"""Indexed datasets, written by hand from the format's description: valid files, and files at the limits of validity."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest

from hal.model.config.schema import ConfigError
from hal.model.data import indexed_dataset
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer

CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of integer types; 6 and 7 are float64 and float32."""


def write(prefix: Path, ids: list[int], lengths: list[int], pointers: list[int], ends: list[int], **how: Any) -> Path:
    """how: code of the type, version, and `more` bytes at the end."""
    code = how.get("code", 8)
    numpy.array(ids, dtype=CODES.get(code, "<f4")).tofile(f"{prefix}.bin")
    header = struct.pack("<QBQQ", how.get("version", 1), code, len(lengths), len(ends))
    tables = (numpy.array(x, dtype=t).tobytes() for x, t in ((lengths, "<i4"), (pointers, "<i8"), (ends, "<i8")))
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX\x00\x00" + header + b"".join(tables) + b"\0" * how.get("more", 0))
    return prefix


@pytest.mark.parametrize("code", CODES)
def test_sequences_of_every_type(tmp_path: Path, code: int) -> None:
    width = numpy.dtype(CODES[code]).itemsize
    # Three documents: two sequences (one of them empty), no sequence, one sequence.
    prefix = write(tmp_path / "d", [5, 6, 7, 100, 101], [3, 0, 2], [0, 5 * width, 3 * width], [0, 2, 2, 3], code=code)
    index = indexed_dataset.read_index(prefix)
    assert [index.tokens(n).tolist() for n in range(3)] == [[5, 6, 7], [], [100, 101]]
    assert (
        index.dtype == CODES[code] and index.lengths.tolist() == [3, 0, 2] and index.documents.tolist() == [0, 2, 2, 3]
    )


@pytest.mark.parametrize("how", [{"code": n} for n in (0, 6, 7, 9)] + [{"version": n} for n in (0, 2)], ids=str)
def test_other_versions_and_types_are_refused(tmp_path: Path, how: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="HAL reads version 1 with integer tokens"):
        indexed_dataset.read_index(write(tmp_path / "d", [5], [1], [0], [0, 1], **how))


def test_a_multimodal_index_has_a_byte_more_per_sequence(tmp_path: Path) -> None:
    files = tmp_path / "d", [5, 6, 7], [1, 2], [0, 2], [0, 1, 2]
    for more in (0, 2):
        assert len(indexed_dataset.read_index(write(*files, more=more)).lengths) == 2
    for more in (1, 3):
        with pytest.raises(ConfigError, match="is damaged: 2 sequences need"):
            indexed_dataset.read_index(write(*files, more=more))


@pytest.mark.parametrize(
    "name, hint", [("d", r"\("), ("d.v2", r"\("), ("e.bin", "--data-path takes"), ("e.idx", "--data-path takes")]
)
def test_a_file_that_is_missing_is_named_and_a_suffix_too_many_is_pointed_out(
    tmp_path: Path, name: str, hint: str
) -> None:
    write(tmp_path / "e", [5], [1], [0], [0, 1])
    with pytest.raises(ConfigError, match=rf"{name}\.idx does not exist\. {hint}"):
        indexed_dataset.read_index(tmp_path / name)


def test_an_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [5], [1], [0], [0, 1])
    content = (tmp_path / "d.idx").read_bytes()
    for damaged in (content[:33], content[:20], b"", b"TNTIDX" + content[6:]):
        (tmp_path / "d.idx").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is not a Megatron index"):
            indexed_dataset.read_index(prefix)


@pytest.mark.parametrize(
    "lengths, pointers, ends, words",
    [
        ([3], [0], [0, 1], None),  # up to the last byte
        ([0], [6], [0, 1], None),
        ([4], [0], [0, 1], "sequence 0 of 1 ends at byte 8, the file has 6"),
        ([3, 1], [0, 6], [0, 2], "sequence 1 of 2 ends at byte 8"),
        ([0], [8], [0, 1], "sequence 0 of 1 ends at byte 8"),
        ([1, -1], [0, 0], [0, 2], "sequence 1 has length -1 at byte 0"),
        ([0, 1, -1], [6, 0, 0], [0, 3], "sequence 2 has length -1 at byte 0"),
        ([1, 1], [0, -2], [0, 2], "sequence 1 has length 1 at byte -2"),
        ([1, 1], [0, 3], [0, 2], "begins inside a token"),
        ([1, 1], [0, 2], [], "do not increase from 0 to 2"),
        ([1, 1], [0, 2], [1, 2], "do not increase from 0 to 2"),
        ([1, 1], [0, 2], [0, 1], "do not increase from 0 to 2"),
        ([1, 1], [0, 2], [0, 2, 1, 2], "do not increase from 0 to 2"),
        ([], [], [0], "has no sequences"),
    ],
)
def test_what_lies_outside_is_refused(
    tmp_path: Path, lengths: list[int], pointers: list[int], ends: list[int], words: str | None
) -> None:
    prefix = write(tmp_path / "d", [1, 2, 3], lengths, pointers, ends)
    if words is None:
        assert indexed_dataset.read_index(prefix).lengths.tolist() == lengths
        return
    with pytest.raises(ConfigError, match=words):
        indexed_dataset.read_index(prefix)


def test_ids_fit_the_vocabulary_if_the_file_is_small_enough_to_be_looked_at(tmp_path: Path, monkeypatch: Any) -> None:
    prefix = write(tmp_path / "d", [7, 3, 5], [3], [0], [0, 1])
    index = indexed_dataset.read_index(prefix)
    indexed_dataset.check_ids(index, 8)
    for limit in (6, 5):  # bytes
        monkeypatch.setattr(indexed_dataset, "_SCAN_BYTES", limit)
        if limit == 5:
            indexed_dataset.check_ids(index, 7)
        else:
            with pytest.raises(ConfigError, match="token id 7: the tokenizer has 7 ids"):
                indexed_dataset.check_ids(index, 7)
    one = indexed_dataset.read_index(write(tmp_path / "one", [7], [1], [0], [0, 1], code=1))
    with pytest.raises(ConfigError, match="token id 7: the tokenizer has 7 ids"):
        indexed_dataset.check_ids(one, 7)  # a file of one byte
    Path(f"{prefix}.bin").write_bytes(b"")
    indexed_dataset.check_ids(index, 1)
    with pytest.raises(ConfigError, match="token id -1: it is damaged"):
        indexed_dataset.require_ids(-1, 5, 8)
    indexed_dataset.require_ids(0, 0, 1)


def note(prefix: Path, **tokenizer: Any) -> dict[str, Any]:
    content = {"tokenizer": {"type": "ByteTokenizer", "fingerprint": "f", "eod": 256, **tokenizer}, "more": 1}
    indexed_dataset.note_path(prefix).write_text(json.dumps(content))
    return content


def test_a_note_is_read_or_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    assert indexed_dataset.read_note(prefix) is None
    assert indexed_dataset.note_path(prefix) == tmp_path / "d.json"
    content = note(prefix)
    assert indexed_dataset.read_note(prefix) == content
    for wrong in ({"type": 3}, {"fingerprint": None}):
        note(prefix, **wrong)
        with pytest.raises(ConfigError, match=r"is not a valid note on how d\.bin was made"):
            indexed_dataset.read_note(prefix)


def test_data_goes_with_the_tokenizer_that_made_it(tmp_path: Path) -> None:
    prefix, own = tmp_path / "d", ByteTokenizer()
    indexed_dataset.require_match(prefix, own)
    note(prefix, fingerprint=own.fingerprint)
    indexed_dataset.require_match(prefix, own)
    # A NullTokenizer represents any tokenizer whose documents end with the same id.
    indexed_dataset.require_match(prefix, NullTokenizer(256))
    with pytest.raises(ConfigError, match=r"was made with ByteTokenizer \(fingerprint .* this run has NullTokenizer"):
        indexed_dataset.require_match(prefix, NullTokenizer(99))
    note(prefix)
    with pytest.raises(ConfigError, match=r"was made with another ByteTokenizer \(fingerprint f"):
        indexed_dataset.require_match(prefix, own)
    note(prefix, type="GPT2BPETokenizer")
    with pytest.raises(ConfigError, match=r"was made with GPT2BPETokenizer \(fingerprint f"):
        indexed_dataset.require_match(prefix, own)
