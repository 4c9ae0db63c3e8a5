"""Text generation from text prompts: batches, several samples per prompt, stop strings, incremental output.

A prompt's samples depend on the seed and on the prompt's number, not on the rest of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hal import Rng
from hal.untrusted import read_text

from ..config.schema import ConfigError
from ..data.tokenizers.tokenizer import Tokenizer
from .decoding import Token, complete, stream
from .engine import Engine
from .sampling import Sampling

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Request:
    """count: maximum tokens per sample. samples: per prompt. stop: strings that end a sample, none of them empty; they
    are removed."""

    count: int
    sampling: Sampling
    seed: int = 0
    samples: int = 1
    stop: tuple[str, ...] = ()
    cached: bool = True


@dataclass(frozen=True)
class Answer:
    """A continuation. reason: "stop" or "length". tokens: number of tokens generated."""

    text: str
    reason: str
    tokens: int


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: .jsonl has objects with "prompt" or "text", any other file has one prompt per line.

    Raises ConfigError, with the line number, for invalid content.
    """
    # Split at "\n" only: other line separators of str.splitlines (U+2028, form feed) may occur inside a prompt.
    *lines, last = (line.removesuffix("\r") for line in read_text(path, ConfigError).split("\n"))
    lines += [last] if last else []
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is not valid JSON: {error}") from None
        text = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f'{path}, line {number}: expected an object with a string "prompt" (or "text")')
        prompts.append(text)
    return prompts


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt; an empty one starts a document. Raises ConfigError for a text that cannot be encoded."""
    try:
        return tokenizer.encode_prompt(text) or [tokenizer.eod]
    except ValueError as error:
        raise ConfigError(f"prompt {text[:40]!r}: {error}") from None


def answer(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], request: Request, *, batch: int
) -> list[list[Answer]]:
    """The samples of each prompt (ids), computed `batch` at a time."""
    jobs = [(number, sample) for number in range(len(prompts)) for sample in range(request.samples)]
    # Sorted by length, because every row of a batch waits until longer prompts have been processed.
    order = sorted(range(len(jobs)), key=lambda j: len(prompts[jobs[j][0]]))
    answers: list[list[Answer]] = [[] for _ in prompts]
    by_job = {}
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        continuations = complete(
            engine,
            [prompts[jobs[j][0]] for j in members],
            request.count,
            request.sampling,
            [rng_of(request.seed, *jobs[j]) for j in members],
            ends=tokenizer.ends,
            finished=stops(tokenizer, request.stop),
            cached=request.cached,
        )
        for j, continuation in zip(members, continuations):
            text, _ = cut(tokenizer.decode(continuation.ids), request.stop)
            by_job[j] = Answer(text, continuation.reason, len(continuation.ids))
    for j, (number, _) in enumerate(jobs):
        answers[number].append(by_job[j])
    return answers


def rng_of(seed: int, prompt: int, sample: int) -> Rng:
    """The random stream of a sample."""
    return Rng(seed).fork("generate", prompt, sample)


def stops(tokenizer: Tokenizer, stop: Sequence[str]) -> Callable[[int, list[int]], bool]:
    """The `finished` function of `stream` for stop strings."""
    if not stop:
        return lambda row, ids: False
    return lambda row, ids: cut(tokenizer.decode(ids), stop)[1]


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there was one."""
    positions = [n for n in (text.find(s) for s in stop) if n >= 0]
    return (text[: min(positions)], True) if positions else (text, False)


class IncrementalDetokenizer:
    """Decodes one continuation token by token. Returns only complete characters, and no part of a stop string.

    `add` returns text that later tokens cannot change; `rest` returns the remainder at the end. `stopped`: whether a
    stop string has occurred.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        # _ids[:_read] and the first _returned characters of the ids after them have been returned. Decoding starts at
        # _start < _read, because a tokenizer may drop a space before the first token it decodes.
        self._start = self._read = self._returned = 0
        self._withheld, self.stopped = "", False
        """_withheld: the end of the text, not returned yet because it may be the beginning of a stop string."""

    def add(self, token: int) -> str:
        """Appends a token and returns the text that has become final."""
        self._ids.append(token)
        text = self._undecoded()
        if text.endswith(_REPLACEMENT):  # possibly an incomplete character; the text before it is final
            text = text[self._returned : -1]
            self._returned += len(text)
        else:
            text = text[self._returned :]
            self._start, self._read, self._returned = self._read, len(self._ids), 0
        return self._release(text)

    def rest(self) -> str:
        """The remaining text, when no token follows."""
        text = self._release(self._undecoded()[self._returned :])
        self._start, self._read, self._returned = self._read, len(self._ids), 0
        withheld, self._withheld = ("" if self.stopped else self._withheld), ""
        return text + withheld

    def _undecoded(self) -> str:
        """The text of the ids from _read on."""
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]

    def _release(self, text: str) -> str:
        """The text up to a stop string, without a suffix that may be the beginning of one."""
        if self.stopped:
            return ""
        text, self.stopped = cut(self._withheld + text, self._stop)
        longest = 0 if self.stopped else max((len(s) - 1 for s in self._stop), default=0)
        ends = (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop))
        split = len(text) - next(ends, 0)
        self._withheld = text[split:]
        return text[:split]


def stream_text(
    engine: Engine, tokenizer: Tokenizer, prompt: Sequence[int], request: Request, number: int
) -> Iterator[tuple[str, Token]]:
    """The increments of the text of one continuation, each with the token that made it final. The last increment, which
    may be empty, is the remaining text, with the last token again."""
    detokenizer, last = IncrementalDetokenizer(tokenizer, request.stop), None
    rng = rng_of(request.seed, number, 0)
    finished = stops(tokenizer, request.stop)
    tokens = stream(
        engine,
        [prompt],
        request.count,
        request.sampling,
        [rng],
        ends=tokenizer.ends,
        finished=finished,
        cached=request.cached,
    )
    for token in tokens:
        last = token
        if token.id not in tokenizer.ends:
            yield detokenizer.add(token.id), token
    if last is not None:
        yield detokenizer.rest(), last
