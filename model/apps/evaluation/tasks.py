"""Megatron-LM's zero-shot tasks by its definitions: LAMBADA's cloze accuracy and WikiText's perplexity.

Source: tasks/zeroshot_gpt of Megatron-LM (until core_v0.13). Unlike there, padding ids get no probability, and
detokenisation depends on the task instead of on the file's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hal.untrusted import read_text

from ...config.schema import ConfigError
from ...data.tokenizers.tokenizer import Tokenizer
from .scoring import Example, mean, per_token, perplexity


@dataclass(frozen=True)
class Task:
    """results: computes numbers by name from the scores of `examples`; standard errors are called NAME_stderr."""

    name: str
    examples: Sequence[Example]
    results: Callable[[Tensor], dict[str, Any]]


def lambada(path: Path, tokenizer: Tokenizer, seq_length: int, *, strict: bool) -> Task:
    """Predicts the last word of each text (JSON lines with "text"). It is correct if greedy decoding gives it.

    strict: the last whitespace-separated word, tokenised with the space before it; otherwise the last token. Contexts
    are truncated on the left to seq_length. Raises ConfigError, with the line, for a text of less than two tokens.
    """
    examples, truncated = [], 0
    for number, line in enumerate(read_text(path, ConfigError).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        context, label = _cloze(_text(line, where), tokenizer, strict, where)
        whole = [*context, *label]
        if len(label) > seq_length:
            raise ConfigError(f"{where}: the last word has {len(label)} tokens, more than --seq-length {seq_length}")
        truncated += len(whole) > seq_length + 1
        examples.append(Example(tuple(whole[-seq_length - 1 :]), len(label)))
    if not examples:
        raise ConfigError(f"{path} has no texts")

    def results(scores: Tensor) -> dict[str, Any]:
        right = (scores[:, 1] == 0).double()
        accuracy, loss = mean(right), mean(scores[:, 0])
        return {
            "number correct": int(right.sum()),
            "total examples": len(examples),
            "avg accuracy": accuracy.value,
            "avg accuracy_stderr": accuracy.stderr,
            "loss per word": loss.value,
            "loss per word_stderr": loss.stderr,
            "strict": strict,
            "shortened contexts": truncated,
        }

    return Task("LAMBADA", examples, results)


def _cloze(text: str, tokenizer: Tokenizer, strict: bool, where: str) -> tuple[list[int], list[int]]:
    if strict:
        words = text.split()
        last = words[-1] if words else ""
        parts = text[: text.rfind(last)].strip(), f" {last}"
        context, label = (_encode(tokenizer, part, where) for part in parts)
    else:
        ids = _encode(tokenizer, text, where)
        context, label = ids[:-1], ids[-1:]
    if not context or not label:
        raise ConfigError(f"{where}: a text needs at least two {'words' if strict else 'tokens'}")
    return context, label


def wikitext(path: Path, tokenizer: Tokenizer, seq_length: int, *, overlapping_eval: int | None) -> Task:
    """Perplexity of a text, in windows of seq_length tokens that advance by `overlapping_eval` (default: the smaller of
    32 and seq_length). The first window counts all its labels, the others their last `overlapping_eval`, so that each
    label counts once.

    The adjusted perplexity is per word of the unprocessed file: exp(loss x tokens / words).
    """
    move = min(32, seq_length) if overlapping_eval is None else overlapping_eval
    if not 1 <= move <= seq_length:
        raise ConfigError(f"--overlapping-eval {move} must be between 1 and --seq-length {seq_length}")
    raw = read_text(path, ConfigError)
    words = len(raw.strip().split(" "))
    ids = _encode(tokenizer, detokenise_wikitext(raw), str(path))
    if len(ids) < 2 or words < 2:
        raise ConfigError(f"{path} has {len(ids)} tokens in {words} words, which is too little to measure")
    examples = []
    end = 1  # the first token that is not counted yet; token 0 is never predicted
    while end < len(ids):
        first = end == 1
        last = min(len(ids), seq_length + 1 if first else end + move)
        begin = max(0, end + move - seq_length - 1)
        examples.append(Example(tuple(ids[0 if first else begin : last]), last - end))
        end = last

    def results(scores: Tensor) -> dict[str, Any]:
        loss = per_token(scores)
        ratio = (len(ids) - 1) / (words - 1)
        plain, adjusted = perplexity(loss), perplexity(loss, ratio)
        return {
            "avg loss": loss.value,
            "avg loss_stderr": loss.stderr,
            "ppl": plain.value,
            "ppl_stderr": plain.stderr,
            "adjusted ppl": adjusted.value,
            "adjusted ppl_stderr": adjusted.stderr,
            "token ratio": ratio,
            "tokens": len(ids) - 1,
            "windows": len(examples),
        }

    return Task("WIKITEXT103", examples, results)


_WIKITEXT: tuple[tuple[str, str, bool], ...] = (
    ("s '", "s'", False),
    (r"/' [0-9]/", "/'[0-9]/", True),  # as in Megatron, where the slashes are literal, so that it almost never matches
    *((f" @{mark}@ ", mark, False) for mark in "-,."),
    *((f" {mark} ", f"{mark} ", False) for mark in ":;.!?,"),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)", True),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]", True),
    (r"{\s*([^}]*?)\s*}", r"{\1}", True),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"', True),
    (r"'\s*([^']*?)\s*'", r"'\1'", True),
    ("= = = =", "====", False),
    ("= = =", "===", False),
    ("= =", "==", False),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}", False),
    (" \n", "\n", False),
    ("\n ", "\n", False),
    (" N ", " 1 ", False),
    (" 's", "'s", False),
)
"""Megatron's rules for undoing WikiText's tokenisation: (pattern, replacement, whether it is a regular expression), in
the order of application. They are not corrected, because published perplexities depend on them."""


def detokenise_wikitext(text: str) -> str:
    """WikiText's text before its tokenisation into words, by Megatron's rules."""
    for pattern, replacement, is_regex in _WIKITEXT:
        text = re.sub(pattern, replacement, text) if is_regex else text.replace(pattern, replacement)
    return text


def _encode(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ConfigError(f'{where}: expected an object with a "text"')
    return str(row["text"])
