"""Runs lm-evaluation-harness on a HAL model, on any parallel layout.

Every rank runs the harness with the same tasks, and all ranks compute each request together. The harness is imported
when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...common.optional_packages import optional_package
from ...config.schema import ConfigError
from ...inference.load import Pretrained
from ...inference.sampling import Sampling
from ...inference.text_generation import Request, answer, encode_prompt
from .scoring import Example, score


def _lm_eval() -> Any:
    with optional_package("--task lm-eval needs lm-evaluation-harness", "lm_eval"):
        import lm_eval
        import lm_eval.api.model
    return lm_eval


class RequestHandler:
    """Computes the harness's three kinds of requests (objects with `args`). Results have the order of the requests."""

    def __init__(self, model: Pretrained) -> None:
        self.model, self.seed = model, model.config.seed
        self.batch, self.limit = model.config.micro_batch_size, model.config.seq_length
        self.generated = 0
        tokenizer = model.tokenizer
        self._prefix = tokenizer.eod if tokenizer.begin is None else tokenizer.begin

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-probability, and whether greedy decoding would produce it.

        Contexts are truncated on the left to seq_length. Raises ConfigError for a continuation longer than that.
        """
        examples = [self._pair(*request.args) for request in requests]
        scored = [e for e in examples if e is not None]
        rows = iter(score(self.model.engine, scored, batch=self.batch).tolist() if scored else [])
        # An empty continuation has probability 1.
        pairs = [(0.0, True) if e is None else next(rows) for e in examples]
        return [p if len(p) == 2 else (-p[0], p[1] == 0) for p in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each full text after the token that begins texts. Texts are split into windows of
        seq_length that predict disjoint tokens; the last window has as much context as fits."""
        examples, counts = [], []
        for (text,) in (request.args for request in requests):
            ids = [self._prefix, *self._encode(text)]
            windows = _windows(ids, self.limit)
            examples += windows
            counts.append(len(windows))
        nll: Sequence[float] = score(self.model.engine, examples, batch=self.batch)[:, 0].tolist() if examples else []
        totals, start = [], 0
        for count in counts:
            totals.append(-float(sum(nll[start : start + count])))
            start += count
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continuations of (context, settings): until, max_gen_toks, do_sample, temperature, top_k, top_p."""
        texts = []
        for context, settings in (request.args for request in requests):
            request = self._request(dict(settings))
            # The context is truncated so that it and the generated tokens fit in seq_length.
            visible = max(1, self.limit - request.count)
            prompt = encode_prompt(self.model.tokenizer, context)[-visible:]
            ((continuation,),) = answer(self.model.engine, self.model.tokenizer, [prompt], request, batch=1)
            texts.append(continuation.text)
        return texts

    def _pair(self, context: str, continuation: str) -> Example | None:
        # Trailing spaces of the context are moved to the continuation, as tokenizers attach them to the next word.
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        before = self._encode(context)
        whole = self._encode(context + continuation)
        label = whole[len(before) :]
        if not before:
            label = self.model.tokenizer.encode(continuation)
            whole = [self._prefix, *label]
        if not label:
            return None
        if len(label) > self.limit:
            raise ConfigError(f"a continuation of {len(label)} tokens is longer than --seq-length {self.limit}")
        return Example(tuple(whole[-self.limit - 1 :]), len(label))

    def _encode(self, text: str) -> list[int]:
        return encode_prompt(self.model.tokenizer, text) if text else []

    def _request(self, settings: dict[str, Any]) -> Request:
        until = settings.pop("until", None) or []
        count = settings.pop("max_gen_toks", settings.pop("max_new_tokens", 256))
        sampled = settings.pop("do_sample", bool(settings.get("temperature")))
        temperature = settings.pop("temperature", 1.0 if sampled else 0.0)
        top_k, top_p = settings.pop("top_k", 0) or 0, settings.pop("top_p", 1.0) or 1.0
        if settings:
            raise ConfigError(f"the task needs the generation settings {sorted(settings)}, which HAL does not support")
        sampling = Sampling(temperature, top_k, top_p) if sampled and temperature else Sampling(0.0)
        self.generated += 1
        stop = (until,) if isinstance(until, str) else tuple(until)
        return Request(int(count), sampling, seed=self.seed + self.generated, stop=tuple(s for s in stop if s))


def _windows(ids: Sequence[int], limit: int) -> list[Example]:
    windows, end = [], 1
    while end < len(ids):
        last = min(len(ids), end + limit)
        # The first token of a window is not predicted; the last window is extended to the left up to the limit.
        windows.append(Example(tuple(ids[max(0, last - limit - 1) : last]), last - end))
        end = last
    return windows


def language_model(model: Pretrained) -> Any:
    """An `lm_eval.api.model.LM`. Raises HalError if lm-evaluation-harness is not installed."""
    base: Any = _lm_eval().api.model.LM

    class HalLM(base):  # type: ignore[misc]
        """A HAL model with the harness's interface."""

        def __init__(self) -> None:
            super().__init__()
            self.handler = RequestHandler(model)

        def loglikelihood(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return self.handler.loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return self.handler.loglikelihood_rolling(requests)

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return self.handler.generate_until(requests)

    return HalLM()


def run_tasks(
    model: Pretrained, names: Sequence[str], *, path: str | None = None, limit: int | None = None
) -> tuple[str, Mapping[str, Any]]:
    """(table, results by task) of the harness's tasks. path: a folder with more tasks. limit: documents per task."""
    library = _lm_eval()
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    manager = TaskManager(include_path=path)
    unknown = sorted(set(names) - set(manager.all_tasks))
    if unknown:
        raise ConfigError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
    evaluation = library.simple_evaluate(
        model=language_model(model), tasks=list(names), task_manager=manager, limit=limit, log_samples=False
    )
    return str(make_table(evaluation)), evaluation["results"]
