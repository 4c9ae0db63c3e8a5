"""Megatron-LM's zero-shot tasks: LAMBADA's cloze accuracy and WikiText's perplexity, by its definitions.

Source: tasks/zeroshot_gpt of Megatron-LM (until core_v0.13). Padding ids, which its softmax has and a text never, get
no probability here. How a text is detokenised follows from the task, never from the name of a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import ConfigError
from ..tokenizer import Tokenizer
from .scoring import Example, mean, per_token, perplexity

TASKS = ("LAMBADA", "WIKITEXT103")


@dataclass(frozen=True)
class Task:
    """examples: what to score. results: numbers by name, from the scores; a standard error is NAME_stderr."""

    name: str
    examples: Sequence[Example]
    results: Callable[[Tensor], dict[str, Any]]


def lambada(path: Path, tokenizer: Tokenizer, seq_length: int, *, strict: bool) -> Task:
    """The last word of each text (JSON lines with "text") from all before it; correct if all its tokens are likeliest.

    strict: the last word between blanks, tokenised with the blank before it; else the last token. A context beyond
    seq_length loses its beginning. Raises ConfigError, with the line, for what is no text of two tokens.
    """
    examples, shortened = [], 0
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        context, label = _cloze(_text(line, where), tokenizer, strict, where)
        whole = [*context, *label]
        if len(label) > seq_length:
            raise ConfigError(f"{where}: the last word has {len(label)} tokens, more than --seq-length {seq_length}")
        shortened += len(whole) > seq_length + 1
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
            "shortened contexts": shortened,
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
    """Perplexity of a whole text: windows of seq_length tokens that move by `overlapping_eval` (default: the lesser of
    32 and seq_length), of which each after the first counts its last `overlapping_eval` labels; each label counts once.

    The adjusted perplexity is per word of the file as it is: exp(loss x tokens / words).
    """
    move = min(32, seq_length) if overlapping_eval is None else overlapping_eval
    if not 1 <= move <= seq_length:
        raise ConfigError(f"--overlapping-eval {move} must be between 1 and --seq-length {seq_length}")
    raw = _read(path)
    words = len(raw.strip().split(" "))
    ids = _encode(tokenizer, detokenise_wikitext(raw), str(path))
    if len(ids) < 2 or words < 2:
        raise ConfigError(f"{path} has {len(ids)} tokens in {words} words; there is nothing to measure")
    examples = []
    end = 1  # tokens before `end` are counted, or are the first, which nothing predicts
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
    (r"/' [0-9]/", "/'[0-9]/", True),  # Megatron's own; the slashes are text, so it hardly ever matches
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
"""(what, by what, whether it is a regular expression), in this order: the rules by which Megatron undoes WikiText's
tokenisation, kept as they are because published perplexities depend on them."""


def detokenise_wikitext(text: str) -> str:
    """WikiText's text as it was before its words were cut apart."""
    for what, by, regular in _WIKITEXT:
        text = re.sub(what, by, text) if regular else text.replace(what, by)
    return text


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--valid-data {path} is not UTF-8 text: {error}") from None


def _encode(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ConfigError(f"{where}: the tokenizer cannot encode this text: {error}") from None


def _text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ConfigError(f'{where}: expected an object with a "text"')
    return str(row["text"])
