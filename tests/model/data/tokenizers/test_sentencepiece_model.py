"""The tables of a SentencePiece model are checked before the library reads them: each of these models ended the process
or took any amount of memory or time."""

import io

import pytest
from sentencepiece_messages import DENORMALIZER, NORMALIZER, PIECES, REPLACED, TRAINER, A, charsmap, field, inner

from hal.model.config.schema import Config, ConfigError
from hal.model.data.tokenizers.build import build_tokenizer
from hal.model.data.tokenizers.sentencepiece_model import require_safe


def symbols(count):
    return b"".join(field(PIECES, field(1, b"q" * (n + 1)) + field(3, 4)) for n in range(count))


NESTED = {0: inner(256), 256 ^ A: inner(A, A, value=True)}
"""The trie of rules for "a", "aa", "aaa" and so on without an end."""
ENDLESS = {0: inner(256), 256 ^ A: inner(A, A)}
"""A trie that a text of "a" never leaves, so that its normalization would take quadratic time."""

HOSTILE = {
    "offset outside the trie": (field(NORMALIZER, charsmap({0: inner(1 << 20)})), "an offset outside it"),
    "value outside the replacements": (
        field(NORMALIZER, charsmap({**REPLACED, 256 ^ 511: 1 << 31 | 2})),
        "an offset outside it",
    ),
    "a replacement without an end": (field(NORMALIZER, charsmap(replacements=b"b")), "2053 bytes with a trie of 2048"),
    "a trie that is cut off": (field(NORMALIZER, field(2, b"\0\4\0\0abc")), "has 7 bytes with a trie of 1024"),
    "nested rules": (field(NORMALIZER, charsmap(NESTED)), "more than 32 rules for the beginnings of one text"),
    "a long replacement": (field(NORMALIZER, charsmap(replacements=b"b" * 1025 + b"\0")), "can write 1025 bytes"),
    "a long replacement in decoding": (
        field(DENORMALIZER, charsmap(replacements=b"b" * 1025 + b"\0")),
        "can write 1025 bytes",
    ),
    "an endless rule": (field(NORMALIZER, charsmap(ENDLESS)), "a text of more than 256 bytes"),
    "nested symbols": (symbols(65), "more than 64 user-defined symbols begin with one another"),
    "a symbol with the character 0": (
        field(PIECES, field(1, b"a\0b") + field(3, 4)),
        "a user-defined symbol contains the character 0",
    ),
    "a long piece": (field(PIECES, field(1, b"y" * 4097)), "a piece, or the text of unknown ones, has 4097 bytes"),
    "a long text of unknown pieces": (field(TRAINER, field(44, b"y" * 4097)), "has 4097 bytes; at most 4096 are read"),
    "a group": (b"\x0b", "a field of the kind 3"),
    "a field that is cut off": (b"\x0a\x05abc", "it is cut off"),
    "an endless integer": (b"\xff" * 11, "has an integer of more than 64 bits"),
    "a large file": (bytes([1 << 3 | 5, 0, 0, 0, 0]) * (1 << 22), "more than 16 MiB"),
}


@pytest.fixture(scope="module")
def model():
    """A model of the library's trainer, with its usual normalizer."""
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    lines = iter([f"the cat {n} sat on the mat" for n in range(50)])
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=written, vocab_size=24, minloglevel=2)
    return written.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_is_refused(name, model, tmp_path):
    more, words = HOSTILE[name]
    (tmp_path / "a.model").write_bytes(model + more)
    with pytest.raises(ConfigError, match=words) as caught:
        build_tokenizer(Config(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(tmp_path / "a.model")))
    assert "a.model is not a SentencePiece model" in str(caught.value)


def test_models_at_the_bounds_are_accepted(model):
    for more in (
        b"",
        symbols(64),
        field(NORMALIZER, charsmap({**REPLACED, 256 ^ 511: 1 << 31 | 1}, b"b" * 1024 + b"\0")),
        field(NORMALIZER, field(2, b"")),
        field(PIECES, field(1, b"y" * 4096)),
    ):
        require_safe(model + more)


def test_a_rule_is_applied(model, tmp_path):
    """The tables of these tests mean to the library what they mean to the check."""
    table = charsmap({**REPLACED, 256 ^ 511: 1 << 31}, b"the\0")
    (tmp_path / "a.model").write_bytes(model + field(NORMALIZER, table))
    options = {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": str(tmp_path / "a.model")}
    tokenizer = build_tokenizer(Config(**options))
    assert tokenizer.encode("a") == tokenizer.encode("the") != tokenizer.encode("t")
