"""Token-by-token decoding with a key/value cache, for batches of prompts and any parallel layout.

Sampling uses HAL's random numbers, so that the text of a seed does not depend on the rest of the batch. The model sees
at most `seq_length` tokens; when a text exceeds that, the older half of the context is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import hal
from hal import Rng, ops

from ..config.schema import ConfigError
from ..data.tokenizers.tokenizer import Tokenizer
from ..gpt.kv_cache import KeyValueCache
from ..gpt.model import GPT
from .engine import NOT_FINITE, Engine, NotFinite
from .sampling import Sampling

_NONE = -1
"""Marks a row for which no token can be chosen."""


@dataclass(frozen=True)
class Token:
    """A token chosen for prompt number `row`. logprob: its log-probability under the model, independent of the
    sampling; top: the requested number of most likely tokens with their log-probabilities, in descending order."""

    row: int
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Continuation:
    """The continuation of a prompt. reason: "stop" (an end or `finished`) or "length"."""

    tokens: list[Token] = field(default_factory=list)
    reason: str = "length"

    @property
    def ids(self) -> list[int]:
        """The ids, without the one that ends the text."""
        return [t.id for t in self.tokens]


def context_start(length: int, limit: int) -> int:
    """The first visible token of a text of `length` tokens: 0 while it fits, then in steps of half the limit."""
    step = limit - limit // 2
    return max(0, -(-(length - limit) // step)) * step


class _Context:
    """The part of the texts that the model sees, and the cache of its keys and values."""

    def __init__(self, engine: Engine, rows: int, longest: int, cached: bool) -> None:
        self.engine, self.rows, self.longest, self.cached = engine, rows, longest, cached
        self.cache: KeyValueCache | None = None
        # The cache has the keys and values of the tokens [start, cached_length) of each text.
        self.start = self.cached_length = self.capacity = 0

    def next_logits(self, texts: Sequence[Sequence[int]], length: int) -> Tensor | None:
        """Logits [rows, v] for the token after the first `length` tokens of every text (None: this rank has none)."""
        limit = self.engine.config.seq_length
        start = context_start(length, limit)
        # When the start of the context moves, the positions of its tokens change, and therefore all keys and values.
        # So they do when the context becomes longer than the sequences for which rotary positions were extended.
        if self.cached and (self.cache is None or start != self.start or length - start > self.capacity):
            self.capacity = min(limit, self.longest - start)
            extended = self.engine.config.longest_short_rotation
            if extended is not None and length - start <= extended:
                self.capacity = min(self.capacity, extended)
            self.cache = self.engine.new_cache(self.rows, self.capacity)
            self.cached_length = start
        self.start = start
        unread = slice(self.cached_length if self.cached else start, length)
        self.cached_length = length
        return self.engine.next_logits(torch.tensor([text[unread] for text in texts]), self.cache)


def stream(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    rngs: Sequence[Rng],
    *,
    ends: Collection[int] = (),
    finished: Callable[[int, list[int]], bool] = lambda row, ids: False,
    logprobs: int = 0,
    cached: bool = True,
) -> Iterator[Token]:
    """Up to `count` tokens after each prompt (ids, not empty), yielded as they are chosen. A row ends with an id of
    `ends`, which is yielded too, or when finished(row, ids chosen so far) is true.

    rngs: a stream per prompt. logprobs: number of most likely tokens to report. All ranks make the same calls and get
    the same tokens. Raises ConfigError for an empty prompt or an id outside the vocabulary, NotFinite on every rank if
    the logits are not finite.

    Prompts of different lengths share a batch without padding or masks: at every step all rows are processed up to the
    same length, and rows whose prompt is longer than that do not choose a token yet.
    """
    _check(engine, prompts)
    if count < 1:
        return
    texts, active = [list(prompt) for prompt in prompts], set(range(len(prompts)))
    context = _Context(engine, len(texts), max(map(len, prompts)) + count, cached)
    length = min(map(len, prompts))
    while active:
        logits = context.next_logits(texts, length)
        steps = {row: length - len(prompts[row]) for row in sorted(active) if len(prompts[row]) <= length}
        # A row's stream is forked by the number of its own tokens, so that it does not depend on the other prompts.
        for token in _choose(engine, logits, sampling, {r: rngs[r].fork(n) for r, n in steps.items()}, logprobs):
            texts[token.row].append(token.id)
            yield token
            ids = texts[token.row][len(prompts[token.row]) :]
            if token.id in ends or len(ids) >= count or finished(token.row, ids):
                active.discard(token.row)
        length += 1
        for text in texts:  # rows that have ended stay in the batch; their tokens are never used
            if len(text) < length:
                text.append(0)


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    rngs: Sequence[Rng],
    *,
    ends: Collection[int] = (),
    finished: Callable[[int, list[int]], bool] = lambda row, ids: False,
    cached: bool = True,
) -> list[Continuation]:
    """Like `stream`, but returns one Continuation per prompt when all have ended."""
    continuations = [Continuation() for _ in prompts]
    for token in stream(engine, prompts, count, sampling, rngs, ends=ends, finished=finished, cached=cached):
        row = continuations[token.row]
        if token.id in ends:
            row.reason = "stop"
            continue
        row.tokens.append(token)
        if finished(token.row, row.ids):
            row.reason = "stop"
    return continuations


def generate(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], count: int, *, temperature: float, rng: Rng
) -> list[int]:
    """Up to `count` ids that continue one prompt, with an unsharded model in one process."""
    engine = Engine(model, tokenizer.vocab_size)
    (continuation,) = complete(engine, [prompt], count, Sampling(temperature), [rng], ends=tokenizer.ends)
    return continuation.ids


def _check(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {number} is empty; generation needs at least one token")
        invalid = [i for i in prompt if not 0 <= i < engine.vocabulary]
        if invalid:
            raise ConfigError(f"prompt {number} has the id {invalid[0]}; the vocabulary has {engine.vocabulary} ids")


def _choose(
    engine: Engine, logits: Tensor | None, sampling: Sampling, rngs: dict[int, Rng], logprobs: int
) -> list[Token]:
    """One token per row of `rngs`, from logits [rows, v]. The leader of the last stage chooses for all ranks."""
    if not rngs:
        return []
    # Column 0 is the chosen token, the others are the most likely ones. Ranks without logits receive both tensors.
    width = 1 + logprobs
    ids, log_p = torch.zeros(len(rngs), width, dtype=torch.int64), torch.zeros(len(rngs), width)
    if logits is not None:
        for n, (row, rng) in enumerate(rngs.items()):
            uniform = 0.0 if sampling.greedy else float(ops.philox_uniform((1,), rng, device=engine.device))
            with hal.device_errors():
                x = logits[row].float().cpu()
            if not bool(x.isfinite().all()):
                ids[n, 0] = _NONE
                continue
            ids[n, 0] = sampling.choose(x, uniform)
            model_log_p = torch.log_softmax(x, -1)
            ids[n, 1:] = model_log_p.topk(logprobs).indices
            log_p[n] = model_log_p[ids[n]]
    all_ids = engine.broadcast_from_last_stage(None if logits is None else ids, ids).tolist()
    if any(row_ids[0] == _NONE for row_ids in all_ids):
        raise NotFinite(f"no token can be chosen, because the logits are not finite{NOT_FINITE}")
    all_log_p = engine.broadcast_from_last_stage(None if logits is None else log_p, log_p).tolist()
    return [Token(row, i[0], p[0], tuple(zip(i[1:], p[1:]))) for row, i, p in zip(rngs, all_ids, all_log_p)]
