"""Text from a model, token by token, with a cache of keys and values, for several prompts at once, on any layout.

Sampled with HAL's random numbers: the same seed gives the same text, whatever else is in the batch. The model sees the
last tokens of a text: all of them up to `seq_length`, and when these are full, the newer half is kept and it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hal import Rng, ops

from .config import ConfigError
from .gpt import GPT
from .inference import NOT_FINITE, Engine, NotFinite
from .sampling import Sampling
from .tokenizer import Tokenizer

_NONE = -1
"""In place of an id where none can be chosen."""


@dataclass(frozen=True)
class Token:
    """A token that was chosen for prompt number `row`. logprob: its log-probability as the model has it, whatever the
    sampling; top: the likeliest tokens with theirs, likeliest first (as many as were asked for)."""

    row: int
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Continuation:
    """What follows a prompt. reason: "stop" (end of document, or `finished` said so) or "length"."""

    tokens: list[Token] = field(default_factory=list)
    reason: str = "length"

    @property
    def ids(self) -> list[int]:
        """The ids, without the end-of-document id."""
        return [t.id for t in self.tokens]


def context_start(length: int, limit: int) -> int:
    """The first token that the model sees of a text of `length`: 0 while it fits, then in steps of half the limit."""
    step = limit - limit // 2
    return max(0, -(-(length - limit) // step)) * step


def stream(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    rngs: Sequence[Rng],
    *,
    eod: int | None,
    finished: Callable[[int, list[int]], bool] = lambda row, ids: False,
    logprobs: int = 0,
    cached: bool = True,
) -> Iterator[Token]:
    """Up to `count` tokens after each prompt (ids, not empty), as they are chosen; a row ends with `eod`, which is
    yielded too, or when finished(row, ids chosen so far) says so.

    rngs: a stream per prompt. logprobs: how many of the likeliest tokens to tell. All ranks call this alike and get the
    same tokens. Prompts of different lengths share a batch: shorter ones begin to continue while the longer ones are
    still read, so nothing is padded or masked. Raises ConfigError for an empty prompt or an id outside the vocabulary,
    NotFinite on every rank if the model's logits are not numbers to choose by.
    """
    _check(engine, prompts)
    if count < 1:
        return
    limit, total = engine.config.seq_length, max(map(len, prompts)) + count
    texts, open_rows = [list(p) for p in prompts], set(range(len(prompts)))
    length, start, fed = min(map(len, prompts)), 0, 0
    cache = None
    while open_rows:
        begin = context_start(length, limit)
        if cached and (cache is None or begin != start):
            cache, fed = engine.new_cache(len(texts), min(limit, total - begin)), begin
        start, columns = begin, slice(fed if cached else begin, length)
        batch = torch.tensor([text[columns] for text in texts])
        logits = engine.next_logits(batch, cache)
        fed = length
        choosing = [row for row in sorted(open_rows) if len(prompts[row]) <= length]
        steps = {row: length - len(prompts[row]) for row in choosing}
        for token in _choose(engine, logits, sampling, {r: rngs[r].fork(steps[r]) for r in choosing}, logprobs):
            texts[token.row].append(token.id)
            yield token
            made = texts[token.row][len(prompts[token.row]) :]
            if token.id == eod or len(made) >= count or finished(token.row, made):
                open_rows.discard(token.row)
        length += 1
        for text in texts:  # a row that has ended goes on with anything: nobody looks at it
            if len(text) < length:
                text.append(0)


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    rngs: Sequence[Rng],
    *,
    eod: int | None,
    finished: Callable[[int, list[int]], bool] = lambda row, ids: False,
    cached: bool = True,
) -> list[Continuation]:
    """As `stream`, all at once: a Continuation per prompt."""
    found = [Continuation() for _ in prompts]
    for token in stream(engine, prompts, count, sampling, rngs, eod=eod, finished=finished, cached=cached):
        row = found[token.row]
        if token.id == eod:
            row.reason = "stop"
            continue
        row.tokens.append(token)
        if finished(token.row, row.ids):
            row.reason = "stop"
    return found


def generate(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], count: int, *, temperature: float, rng: Rng
) -> list[int]:
    """Up to `count` ids that continue one prompt, by a whole model of one process."""
    engine = Engine(model, tokenizer.vocab_size)
    (made,) = complete(engine, [prompt], count, Sampling(temperature), [rng], eod=tokenizer.eod)
    return made.ids


def _check(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {number} is empty; a model continues at least one token")
        wrong = [i for i in prompt if not 0 <= i < engine.vocabulary]
        if wrong:
            raise ConfigError(f"prompt {number} has the id {wrong[0]}; the vocabulary has {engine.vocabulary}")


def _choose(
    engine: Engine, logits: torch.Tensor | None, sampling: Sampling, rngs: dict[int, Rng], logprobs: int
) -> list[Token]:
    """One token for each row of `rngs`; the leader of the last stage chooses for all ranks."""
    if not rngs:
        return []
    width = 1 + logprobs
    ids, logs = torch.zeros(len(rngs), width, dtype=torch.int64), torch.zeros(len(rngs), width)
    if logits is not None:
        for at, (row, rng) in enumerate(rngs.items()):
            uniform = 0.0 if sampling.greedy else float(ops.philox_uniform((1,), rng, device=engine.device))
            x = logits[row].float().cpu()
            if not bool(x.isfinite().all()):
                ids[at, 0] = _NONE
                continue
            ids[at, 0] = sampling.choose(x, uniform)
            known = torch.log_softmax(x, -1)
            ids[at, 1:] = known.topk(logprobs).indices
            logs[at] = known[ids[at]]
    told_ids = engine.agree(None if logits is None else ids, ids).tolist()
    if any(i[0] == _NONE for i in told_ids):
        raise NotFinite(f"no token can be chosen, because the logits are not finite{NOT_FINITE}")
    told_logs = engine.agree(None if logits is None else logs, logs).tolist()
    return [Token(row, i[0], p[0], tuple(zip(i[1:], p[1:]))) for row, i, p in zip(rngs, told_ids, told_logs)]
