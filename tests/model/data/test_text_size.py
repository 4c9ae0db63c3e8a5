"""The bytes of text per token of a run's data."""

from types import SimpleNamespace

import pytest
import torch

from hal.model.data.text_size import text_size
from hal.model.data.tokenizers.build import build_tokenizer


class Words:
    """A tokenizer of two words; 2 ends a document."""

    eod, fingerprint = 2, "abc"

    def decode(self, ids):
        return "".join(("four", "ünf")[i] for i in ids)


class Split:
    def __init__(self, *labels):
        self.labels = labels

    def fetch(self, first, count):
        return None, torch.tensor([self.labels])


def config(**given):
    return SimpleNamespace(**{"seq_length": 4, "mock_data": False, "tokenizer_type": "X", **given})


def test_the_end_of_a_document_is_a_token_without_bytes():
    record = text_size(config(), Words(), Split(0, 1, 2, 0))
    assert record == {"type": "X", "fingerprint": "abc", "bytes_per_token": (4 + 4 + 0 + 4) / 4}
    # ids below 0 are positions that the loss ignores
    assert text_size(config(), Words(), Split(0, -100, -100, -100))["bytes_per_token"] == 4


def test_data_that_are_no_text_have_no_size():
    for given in ({"mock_data": True}, {"tokenizer_type": "NullTokenizer"}):
        assert text_size(config(**given), Words(), Split(0))["bytes_per_token"] is None


def test_bytes_are_tokens_of_one_byte(tiny):
    tokenizer = build_tokenizer(tiny())
    record = text_size(config(), tokenizer, Split(*b"text", tokenizer.eod))
    assert record["bytes_per_token"] == pytest.approx(4 / 5)
