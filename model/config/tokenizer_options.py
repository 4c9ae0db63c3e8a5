"""The options that each --tokenizer-type requires and accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .schema import Config

OPTIONS = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size", "vocab_extra_ids")
"""The options of a Config that describe a tokenizer; --tokenizer-type decides which of them are read."""


@dataclass(frozen=True)
class Kind:
    """A --tokenizer-type: the options that it requires, and those that it also accepts."""

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


KINDS = {
    "ByteTokenizer": Kind(),
    "GPT2BPETokenizer": Kind(("vocab_file", "merge_file")),
    "BertWordPieceLowerCase": Kind(("vocab_file",), ("vocab_extra_ids",)),
    "BertWordPieceCase": Kind(("vocab_file",), ("vocab_extra_ids",)),
    "SentencePieceTokenizer": Kind(("tokenizer_model",), ("vocab_extra_ids",)),
    "GPTSentencePieceTokenizer": Kind(("tokenizer_model",)),
    "Llama2Tokenizer": Kind(("tokenizer_model",)),
    "HuggingFaceTokenizer": Kind(("tokenizer_model",)),
    "WhitespaceTokenizer": Kind(("vocab_file",)),
    "NullTokenizer": Kind(("vocab_size",), ("tokenizer_model",)),
}


def options_of(config: Config) -> dict[str, Any]:
    """The tokenizer's type and the options that this type reads, by name."""
    kind = KINDS[config.tokenizer_type]
    values = {name: getattr(config, name) for name in (*kind.needs, *kind.takes)}
    return {"tokenizer_type": config.tokenizer_type, **values}


def readers(option: str) -> list[str]:
    """The tokenizer types that read an option of OPTIONS."""
    return [kind for kind, spec in KINDS.items() if option in spec.needs + spec.takes]


def missing_options(config: Config) -> str | None:
    """A message that names the missing options of --tokenizer-type, or None."""
    needs = KINDS[config.tokenizer_type].needs
    if all(getattr(config, name) is not None for name in needs):
        return None
    return f"--tokenizer-type {config.tokenizer_type} needs {' and '.join(_flag(name) for name in needs)}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
