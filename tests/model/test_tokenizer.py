"""Tokenizers: what goes in comes out, and every id fits the vocabulary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.model import corpus
from hal.model.config import Config, ConfigError
from hal.model.data import check_index
from hal.model.tokenizer import ByteTokenizer, GPT2BPETokenizer, NullTokenizer, build_tokenizer


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory):
    """A small byte-level BPE in GPT-2's two files."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    lines = [f"the cat {n} sat on the mat, über {n % 7} 字" for n in range(200)]
    trained.train_from_iterator(lines, vocab_size=320, special_tokens=["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("bpe")
    trained.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_come_back(text):
    ids = ByteTokenizer().encode(text)
    assert ByteTokenizer().decode(ids) == text and all(0 <= i < 256 for i in ids)


def test_any_bytes_decode():
    assert ByteTokenizer().decode([0xFF, 65, 256]) == "\ufffdA"


def test_gpt2_bpe(bpe_files):
    tokenizer = build_tokenizer(
        Config(tokenizer_type="GPT2BPETokenizer", vocab_file=bpe_files[0], merge_file=bpe_files[1])
    )
    assert isinstance(tokenizer, GPT2BPETokenizer)
    ids = tokenizer.encode("the cat sat, über 字 <new>")
    assert tokenizer.decode(ids) == "the cat sat, über 字 <new>" and max(ids) < tokenizer.vocab_size
    assert len(tokenizer.encode("the cat")) < 7  # merges are used
    assert tokenizer.eod == 0


def test_a_text_file_in_bpe(bpe_files, tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "t.txt"
    path.write_text("the cat sat on the mat\n" * 50)
    tokenizer = GPT2BPETokenizer(*bpe_files)
    prefix = corpus.text_file(str(path), tokenizer)
    assert check_index(prefix, tokenizer.vocab_size).sum() == len(tokenizer.encode(path.read_text())) + 1
    assert corpus.text_file(str(path), ByteTokenizer()) != prefix  # another tokenizer, another cache entry


def test_wrong_files_are_named(bpe_files, tmp_path):
    with pytest.raises(ConfigError, match="absent does not exist"):
        GPT2BPETokenizer("absent", bpe_files[1])
    broken = tmp_path / "vocab.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="no GPT-2 vocabulary"):
        GPT2BPETokenizer(str(broken), bpe_files[1])
    broken.write_text('{"a": 0}')
    empty = tmp_path / "merges.txt"
    empty.write_text("#version: 0.2\n")
    with pytest.raises(ConfigError, match="endoftext"):
        GPT2BPETokenizer(str(broken), str(empty))


def test_null_tokenizer():
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10) and tokenizer.decode(tokenizer.encode("3 4")) == "3 4"
