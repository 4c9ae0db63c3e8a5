"""From prompts as text to continuations as text: batches, several samples each, stop strings, pieces as they come.

A prompt's samples are a function of the seed and of the prompt's number, not of the batch it shares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hal import Rng

from .config import ConfigError
from .generate import Token, complete, stream
from .inference import Engine
from .sampling import Sampling
from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Request:
    """count: most tokens per sample. samples: continuations per prompt. stop: texts that end one (and are cut off)."""

    count: int
    sampling: Sampling
    seed: int = 0
    samples: int = 1
    stop: tuple[str, ...] = ()
    cached: bool = True


@dataclass(frozen=True)
class Answer:
    """A continuation. reason: "stop" or "length". tokens: how many were chosen."""

    text: str
    reason: str
    tokens: int


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: .jsonl has objects with "prompt" or "text", any other file has one prompt per line.

    Raises ConfigError, with the line, for what cannot be read.
    """
    try:
        # By "\n" alone: what else Python takes for the end of a line (U+2028, a form feed) may stand inside a prompt.
        *lines, last = (line.removesuffix("\r") for line in path.read_bytes().decode().split("\n"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    lines += [last] if last else []
    if path.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}") from None
        text = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f'{path}, line {number}: expected an object with a text "prompt" (or "text")')
        found.append(text)
    return found


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt; an empty one begins a document. Raises ConfigError for a text the tokenizer cannot take."""
    try:
        return tokenizer.encode(text) or [tokenizer.eod]
    except ValueError as error:
        raise ConfigError(f"the tokenizer cannot encode the prompt {text[:40]!r}: {error}") from None


def answer(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], request: Request, *, batch: int
) -> list[list[Answer]]:
    """For each prompt (ids) its samples, computed `batch` at a time."""
    jobs = [(number, sample) for number in range(len(prompts)) for sample in range(request.samples)]
    # Equal lengths together: a batch begins to continue when its shortest prompt has been read.
    order = sorted(range(len(jobs)), key=lambda j: len(prompts[jobs[j][0]]))
    found: list[list[Answer]] = [[] for _ in prompts]
    by_job = {}
    for first in range(0, len(order), batch):
        these = order[first : first + batch]
        made = complete(
            engine,
            [prompts[jobs[j][0]] for j in these],
            request.count,
            request.sampling,
            [rng_of(request.seed, *jobs[j]) for j in these],
            eod=tokenizer.eod,
            finished=stops(tokenizer, request.stop),
            cached=request.cached,
        )
        for j, one in zip(these, made):
            by_job[j] = Answer(cut(tokenizer.decode(one.ids), request.stop)[0], one.reason, len(one.ids))
    for j, (number, _) in enumerate(jobs):
        found[number].append(by_job[j])
    return found


def rng_of(seed: int, prompt: int, sample: int) -> Rng:
    """The stream that a sample is drawn from."""
    return Rng(seed).fork("generate", prompt, sample)


def stops(tokenizer: Tokenizer, stop: Sequence[str]) -> Callable[[int, list[int]], bool]:
    """What tells `stream` that a row has come to one of the texts."""
    if not stop:
        return lambda row, ids: False
    return lambda row, ids: cut(tokenizer.decode(ids), stop)[1]


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of the `stop` texts, and whether there was one."""
    places = [at for at in (text.find(s) for s in stop) if at >= 0]
    return (text[: min(places)], True) if places else (text, False)


class Pieces:
    """The text of one continuation, piece by piece: whole characters only, and nothing of a stop text.

    `add` gives what has become certain; `rest`, at the end, what was held back. `stopped`: a stop text was met.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
        self._ids: list[int] = []
        # Tokens from _start are decoded again, those before _read are told, and _told characters of those after.
        self._start = self._read = self._told = 0
        self._held, self.stopped = "", False

    def add(self, token: int) -> str:
        """One more token."""
        self._ids.append(token)
        text = self._untold()
        if text.endswith(_REPLACEMENT):  # perhaps the beginning of a character; what is before it is certain
            text = text[self._told : -1]
            self._told += len(text)
        else:
            text = text[self._told :]
            # The tokens just told are decoded along next time: the first of a text may lose a blank.
            self._start, self._read, self._told = self._read, len(self._ids), 0
        return self._release(text)

    def rest(self) -> str:
        """What is left when no token follows."""
        text = self._release(self._untold()[self._told :])
        self._start, self._read, self._told = self._read, len(self._ids), 0
        held, self._held = ("" if self.stopped else self._held), ""
        return text + held

    def _untold(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text, self.stopped = cut(self._held + text, self._stop)
        # The end may be the beginning of a stop text.
        most = 0 if self.stopped else max((len(s) - 1 for s in self._stop), default=0)
        keep = next(
            (n for n in range(min(most, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def converse(
    engine: Engine, tokenizer: Tokenizer, prompt: Sequence[int], request: Request, number: int
) -> Iterator[tuple[str, Token]]:
    """The pieces of one continuation as they come, each with the token that completed it."""
    pieces, last = Pieces(tokenizer, request.stop), None
    rng = rng_of(request.seed, number, 0)
    finished = stops(tokenizer, request.stop)
    how = {"eod": tokenizer.eod, "finished": finished, "cached": request.cached}
    for token in stream(engine, [prompt], request.count, request.sampling, [rng], **how):
        last = token
        if token.id != tokenizer.eod:
            yield pieces.add(token.id), token
    if last is not None:
        yield pieces.rest(), last
