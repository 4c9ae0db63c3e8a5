"""The web server: two routes of OpenAI's API, with streaming as server-sent events and limits on all input."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ...inference.decoding import Token
from ...inference.engine import NotFinite
from .protocol import Answers, BadRequest, Completion, parse, prompts_of
from .worker import Job, Piece, Worker

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """body: maximum bytes of a request. batch: choices computed at once. seconds: timeout for receiving the head of a
    request, and its body. per_client: requests of one address that may run or wait (None: as many as of all)."""

    body: int = 1 << 20
    batch: int = 8
    seconds: float = 30.0
    per_client: int | None = None


def build_app(worker: Worker, name: str, limits: Limits, *, api_key: str | None, loopback: bool) -> FastAPI:
    """The application. api_key: the key that clients must present, or None. loopback: accept only loopback host names,
    so that a web page cannot reach the server through a host name of its own (DNS rebinding)."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="hal serve", openapi_url=None, lifespan=lifespan)
    if loopback:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"])

    @app.exception_handler(BadRequest)
    async def refused(request: Request, error: BadRequest) -> JSONResponse:
        # The queue is served in order, so that its length says when there is room.
        wait = {"Retry-After": str(worker.seconds_to_wait)} if error.status == 429 else None
        return JSONResponse(error.body(), error.status, wait)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(BadRequest(str(error.detail), None, error.status_code).body(), error.status_code)

    def admit(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise BadRequest("a wrong API key, or none", None, 401)

    @app.get("/health")
    async def health() -> Mapping[str, Any]:
        return {"status": "ok", "waiting": worker.waiting}

    @app.get("/v1/models")
    async def models(request: Request) -> Mapping[str, Any]:
        admit(request)
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "hal"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        admit(request)
        asked = parse(await _body(request, limits))
        if asked.model not in (None, name):
            raise BadRequest(f"there is no model {asked.model!r}; this server has {name!r}", "model", 404)
        model = worker.model
        context = model.config.seq_length
        prompts = prompts_of(asked, model.tokenizer, context=context, most=limits.batch)
        answers = Answers(asked, name, secrets.token_hex(12), model.tokenizer)
        pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(piece: Piece | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed because the server is shutting down
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        job = Job(prompts, asked.samples, asked.count, asked.sampling, seed, asked.stops, asked.logprobs or 0, emit)
        job.client = request.client.host if request.client else ""
        if limits.per_client is not None and worker.unfinished(job.client) >= limits.per_client:
            raise BadRequest(
                f"{limits.per_client} requests of yours are waiting, the most of one address; try again later",
                None,
                429,
            )
        if not worker.submit(job):
            raise BadRequest("too many requests are waiting; try again later", None, 429)
        echo = [model.tokenizer.decode(p) if asked.echo else "" for p in prompts for _ in range(asked.samples)]
        if asked.stream:
            events = _events(job, pieces, answers, echo)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        return await _whole(request, job, pieces, answers, asked, echo)

    return app


async def _body(request: Request, limits: Limits) -> bytes:
    """The request's body. Raises BadRequest if it is too large or too slow; never reads more than the limit."""
    said = request.headers.get("content-length", "0")
    too_large = BadRequest(f"the request is larger than {limits.body} bytes", None, 413)
    if not said.isdigit() or int(said) > limits.body:
        raise too_large

    async def read() -> bytes:
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > limits.body:
                raise too_large
        return bytes(content)

    try:
        return await asyncio.wait_for(read(), limits.seconds)
    except asyncio.TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {limits.seconds:g} s", None, 408) from None


async def _events(
    job: Job, pieces: asyncio.Queue[Piece | Exception | None], answers: Answers, echo: list[str]
) -> AsyncIterator[str]:
    """Server-sent events, one per piece, followed by [DONE]. If the client disconnects, the job is cancelled."""
    completion_tokens, echoed, offsets = 0, [False] * len(echo), [0] * len(echo)
    try:
        while (piece := await pieces.get()) is not None:
            if isinstance(piece, Exception):
                yield _event(_failure(piece).body())
                return
            text = piece.text if echoed[piece.index] else echo[piece.index] + piece.text
            echoed[piece.index] = True
            completion_tokens += len(piece.tokens)
            yield _event(answers.piece(piece.index, text, piece.tokens, offsets[piece.index], piece.reason))
            offsets[piece.index] += len(text)
        if answers.wants_usage:
            usage = answers.usage(sum(map(len, job.prompts)), completion_tokens)
            yield _event(answers.whole([], usage))
        yield "data: [DONE]\n\n"
    finally:
        job.cancelled.set()


async def _whole(
    request: Request,
    job: Job,
    pieces: asyncio.Queue[Piece | Exception | None],
    answers: Answers,
    asked: Completion,
    echo: list[str],
) -> JSONResponse:
    """All choices in one response. If the client disconnects, the job is cancelled."""
    texts = list(echo)
    tokens: list[list[Token]] = [[] for _ in echo]
    reasons: list[str | None] = [None] * len(echo)
    watch = asyncio.create_task(_gone(request, job))
    try:
        while (piece := await pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise _failure(piece)
            texts[piece.index] += piece.text
            tokens[piece.index] += piece.tokens
            reasons[piece.index] = piece.reason or reasons[piece.index]
    finally:
        watch.cancel()
        job.cancelled.set()
    choices = [answers.piece(n, texts[n], tokens[n], 0, reasons[n])["choices"][0] for n in range(len(texts))]
    usage = answers.usage(sum(map(len, job.prompts)), sum(map(len, tokens)))
    return JSONResponse(answers.whole(choices, usage))


async def _gone(request: Request, job: Job) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.25)
    job.cancelled.set()


def _failure(error: Exception) -> BadRequest:
    if isinstance(error, NotFinite):
        return BadRequest(str(error), None, 500)
    return BadRequest(f"the model failed: {type(error).__name__}; the server's log has more", None, 500)


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
