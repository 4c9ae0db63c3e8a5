"""The protocol of OpenAI's completions endpoint: validates requests against the model's limits and builds responses.

Unsupported fields are refused by name, never ignored. Source: OpenAI's API reference, "Completions".
"""

from __future__ import annotations

import json
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...config.schema import ConfigError
from ...data.tokenizers.tokenizer import Tokenizer
from ...inference.decoding import Token
from ...inference.sampling import Sampling
from ...inference.text_generation import encode_prompt

MOST_LOGPROBS, MOST_STOPS = 5, 4


class BadRequest(Exception):
    """A request that cannot be served: the HTTP status, the problem, and the field that causes it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": None}}


class Completion(BaseModel):
    """The body of POST /v1/completions. `top_k` is an extension of HAL; the other fields are OpenAI's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: int | None = Field(16, ge=1)
    temperature: float | None = Field(1.0, ge=0.0, le=100.0)
    top_p: float | None = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(0, ge=0)
    n: int | None = Field(1, ge=1)
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = False
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    user: str | None = None
    best_of: int | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0

    @property
    def count(self) -> int:
        """Maximum number of tokens per choice."""
        return self.max_tokens or 16

    @property
    def samples(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters; at temperature 0, top_p and top_k have no effect."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0.0:
            return Sampling(0.0)
        return Sampling(temperature, self.top_k or 0, 1.0 if self.top_p is None else self.top_p)


def parse(body: bytes) -> Completion:
    """Parses and validates a request. Raises BadRequest if it is malformed or uses unsupported features."""
    try:
        asked = Completion.model_validate(json.loads(body))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            # A union reports every alternative that failed; its first element names the field.
            where = str(first["loc"][0]) if first["loc"] else None
            raise BadRequest(f"{where or 'the body'}: {first['msg']}", where) from None
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    unsupported = {
        "best_of": asked.best_of not in (None, asked.samples),
        "suffix": bool(asked.suffix),
        "logit_bias": bool(asked.logit_bias),
        "presence_penalty": bool(asked.presence_penalty),
        "frequency_penalty": bool(asked.frequency_penalty),
    }
    for name, wanted in unsupported.items():
        if wanted:
            raise BadRequest(f"{name} is not supported; leave it out", name)
    if asked.echo and asked.logprobs is not None:
        raise BadRequest("echo with logprobs is not supported: only generated tokens have log-probabilities", "echo")
    if set(asked.stream_options or ()) - {"include_usage"} or (asked.stream_options and not asked.stream):
        raise BadRequest("stream_options may contain include_usage only, and needs stream", "stream_options")
    try:
        _ = asked.sampling
    except ConfigError as error:
        raise BadRequest(str(error), "temperature") from None
    if len(asked.stops) > MOST_STOPS or not all(asked.stops):
        raise BadRequest(f"stop takes at most {MOST_STOPS} texts, none of them empty", "stop")
    return asked


def prompts_of(asked: Completion, tokenizer: Tokenizer, *, context: int, most: int) -> list[list[int]]:
    """The prompts as ids. Raises BadRequest for invalid ids, and if limits of the model or the server are exceeded."""
    prompt: Any = asked.prompt
    is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    texts = prompt if is_batch else [prompt]
    if len(texts) * asked.samples > most:
        raise BadRequest(
            f"{len(texts)} prompts x n = {asked.samples} are more than the {most} this server runs at once", "n"
        )
    encoded = []
    for text in texts:
        try:
            ids = encode_prompt(tokenizer, text) if isinstance(text, str) else list(text)
        except (ConfigError, UnicodeEncodeError) as error:
            raise BadRequest(str(error), "prompt") from None
        ids = ids or [tokenizer.eod]
        if min(ids) < 0 or max(ids) >= tokenizer.vocab_size:
            raise BadRequest(f"prompt: ids go from 0 to {tokenizer.vocab_size - 1}", "prompt")
        if len(ids) + asked.count > context:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; with max_tokens = {asked.count} that is more than the model's "
                f"context of {context}",
                "prompt",
            )
        encoded.append(ids)
    return encoded


class Answers:
    """Builds responses: complete ones (`whole`) and parts of a stream (`piece`)."""

    def __init__(self, asked: Completion, model: str, number: str, tokenizer: Tokenizer) -> None:
        self._asked, self._tokenizer, self._created = asked, tokenizer, int(time.time())
        self._head = {"id": f"cmpl-{number}", "object": "text_completion", "created": self._created, "model": model}

    def piece(self, index: int, text: str, tokens: list[Token], offset: int, reason: str | None) -> dict[str, Any]:
        """A part of choice `index`, which begins at `offset` in the text of that choice."""
        logprobs = None if self._asked.logprobs is None else self._logprobs(tokens, offset)
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **({"usage": None} if self.wants_usage else {})}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """The complete response; `choices` have the format of those in `piece`."""
        return {**self._head, "choices": choices, "usage": usage}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with an event that contains the token counts."""
        return bool((self._asked.stream_options or {}).get("include_usage"))

    def usage(self, prompt: int, completion: int) -> dict[str, int]:
        """The token counts of a request in OpenAI's format."""
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, tokens: list[Token], offset: int) -> dict[str, Any]:
        names = [self._name(t.id) for t in tokens]
        starts = [offset + sum(map(len, names[:n])) for n in range(len(names))]
        tops = [{self._name(i): p for i, p in reversed(t.top)} for t in tokens]
        return {
            "tokens": names,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": tops if self._asked.logprobs else None,
            "text_offset": starts,
        }

    def _name(self, token: int) -> str:
        return "<|endoftext|>" if token == self._tokenizer.eod else self._tokenizer.decode([token])
