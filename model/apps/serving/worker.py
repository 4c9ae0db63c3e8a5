"""The worker that runs the model: jobs wait in a bounded queue and run one after the other on a separate thread.

On several ranks, the leader's worker broadcasts each job to the others, and all ranks compute every token together.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hal import Comm

from ...checkpoint.reader import broadcast_text
from ...inference.decoding import Token, stream
from ...inference.engine import NotFinite
from ...inference.load import Pretrained
from ...inference.sampling import Sampling
from ...inference.text_generation import IncrementalDetokenizer, rng_of

_IDLE = "idle"


@dataclass(frozen=True)
class Piece:
    """Generated text of choice `index` and its tokens. reason: the finish reason, set on a choice's last piece."""

    index: int
    text: str
    tokens: list[Token] = field(default_factory=list)
    reason: str | None = None


@dataclass
class Job:
    """prompts: token ids; each prompt gets `samples` choices. emit is called on the worker's thread with every Piece,
    then with None or with the exception that ended the job. cancelled: to be set when the client has disconnected.
    client: the address that it came from."""

    prompts: list[list[int]]
    samples: int
    count: int
    sampling: Sampling
    seed: int
    stop: tuple[str, ...]
    logprobs: int
    emit: Callable[[Piece | Exception | None], None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    client: str = ""

    def described(self) -> str:
        """The job as text for the other ranks."""
        sampling = [self.sampling.temperature, self.sampling.top_k, self.sampling.top_p]
        return json.dumps([self.prompts, self.samples, self.count, sampling, self.seed, self.stop, self.logprobs])

    @staticmethod
    def of(text: str) -> Job:
        """The job that another rank has described; its output is discarded."""
        prompts, samples, count, sampling, seed, stop, logprobs = json.loads(text)
        return Job(prompts, samples, count, Sampling(*sampling), seed, tuple(stop), logprobs, lambda piece: None)


class Worker:
    """Runs jobs. waiting: the maximum number of queued jobs in addition to the running one."""

    def __init__(self, model: Pretrained, waiting: int) -> None:
        self.model = model
        self._jobs: queue.Queue[Job | None] = queue.Queue(waiting + 1)
        self._thread = threading.Thread(target=self._run, name="hal-serve", daemon=True)
        self._unfinished: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._seconds = 0.0  # of the last job
        mesh = model.engine.mesh
        self._world: Comm | None = None if mesh.world.size == 1 else mesh.world
        # The other ranks wait in a collective, which has a timeout. An idle leader sends _IDLE before it expires.
        self._idle_seconds: float | None = None if self._world is None else mesh.timeout / 4

    def start(self) -> None:
        """Starts the worker's thread."""
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Adds a job to the queue; returns False if the queue is full."""
        with self._lock:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                return False
            self._unfinished[job.client] += 1
        return True

    def unfinished(self, client: str) -> int:
        """The number of jobs of a client that run or wait."""
        return self._unfinished[client]

    @property
    def seconds_to_wait(self) -> int:
        """About when the jobs that wait now will have run, in whole seconds, at least 1."""
        return max(1, math.ceil(self._seconds * self.waiting))

    @property
    def waiting(self) -> int:
        """The number of queued jobs."""
        return self._jobs.qsize()

    def stop(self) -> None:
        """Ends the worker and the other ranks after the running job."""
        self._jobs.put(None)
        self._thread.join(timeout=60.0)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_seconds)
            except queue.Empty:
                self._tell(_IDLE)
                continue
            self._tell("" if job is None else job.described())
            if job is None:
                return
            began = time.monotonic()
            try:
                run(self.model, job)
                job.emit(None)
            except NotFinite as error:
                print(f"hal serve: {error}", file=sys.stderr)
                job.emit(error)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                job.emit(error)
            finally:
                self._seconds = time.monotonic() - began
                with self._lock:
                    self._unfinished[job.client] -= 1
                    self._unfinished += Counter()  # drops the clients without jobs

    def _tell(self, text: str) -> None:
        if self._world is not None:
            broadcast_text(self._world, text, 0)


def follow(model: Pretrained) -> None:
    """The loop of the ranks that are not the leader: they run the leader's jobs until it ends."""
    while text := broadcast_text(model.engine.mesh.world, "", 0):
        if text != _IDLE:
            with contextlib.suppress(NotFinite):  # the leader raises it too, and reports it to the client
                run(model, Job.of(text))


def run(model: Pretrained, job: Job) -> None:
    """Runs a job, and emits pieces of text as soon as they are final."""
    tokenizer = model.tokenizer
    rows = [(p, s) for p in range(len(job.prompts)) for s in range(job.samples)]
    texts = [IncrementalDetokenizer(tokenizer, job.stop) for _ in rows]
    token_counts = [0] * len(rows)
    pending: list[list[Token]] = [[] for _ in rows]
    alone = model.engine.mesh.world.size == 1

    def finished(row: int, ids: list[int]) -> bool:
        # All ranks must end a row at the same token, but only the leader knows whether the client has disconnected.
        return texts[row].stopped or (alone and job.cancelled.is_set())

    tokens = stream(
        model.engine,
        [job.prompts[p] for p, _ in rows],
        job.count,
        job.sampling,
        [rng_of(job.seed, p, s) for p, s in rows],
        eod=tokenizer.eod,
        finished=finished,
        logprobs=job.logprobs,
    )
    for token in tokens:
        row, end = token.row, token.id == tokenizer.eod
        token_counts[row] += 1
        text = "" if end else texts[row].add(token.id)
        if not end:
            pending[row].append(token)
        reason = "stop" if end or texts[row].stopped else "length" if token_counts[row] == job.count else None
        if reason is not None:
            text += texts[row].rest()
        if text or reason is not None:
            job.emit(Piece(row, text, pending[row], reason))
            pending[row] = []
