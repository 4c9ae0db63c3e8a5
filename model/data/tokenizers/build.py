"""Builds the tokenizer of a configuration, by Megatron's --tokenizer-type."""

from __future__ import annotations

from ...config.schema import Config, ConfigError
from ...config.tokenizer_options import missing_options, options_of
from .tokenizer import MAX_VOCABULARY, ByteTokenizer, NullTokenizer, Tokenizer, WhitespaceTokenizer


def build_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a config. Raises ConfigError for missing options and for invalid files."""
    missing = missing_options(config)
    if missing is not None:
        raise ConfigError(missing)
    tokenizer = _built(config)
    if not 0 <= tokenizer.eod < tokenizer.vocab_size <= MAX_VOCABULARY:
        raise ConfigError(
            f"--tokenizer-type {config.tokenizer_type}: {tokenizer.vocab_size} ids with the end of a document at "
            f"{tokenizer.eod}; at most {MAX_VOCABULARY} are supported, since the embedding has a row for each"
        )
    return tokenizer


def _built(config: Config) -> Tokenizer:
    kind, options = config.tokenizer_type, options_of(config)
    del options["tokenizer_type"]
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        return NullTokenizer(**options)
    if kind == "WhitespaceTokenizer":
        return WhitespaceTokenizer(**options)
    from . import vocabularies

    tokenizer: Tokenizer = getattr(vocabularies, kind)(**options)
    return tokenizer
