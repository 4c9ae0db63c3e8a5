"""Requests of lm-evaluation-harness give the results of an independent computation, and its own tasks run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from model_options import byte_model

from hal import HalError
from hal.model.apps.evaluation import harness
from hal.model.apps.evaluation.harness import RequestHandler
from hal.model.config.schema import ConfigError
from hal.model.data.tokenizers.tokenizer import ByteTokenizer
from hal.model.inference.decoding import generate

BYTES, LENGTH = ByteTokenizer(), 16


@pytest.fixture
def model(cpu_ref):
    return byte_model(LENGTH)


def instances(*args):
    return [SimpleNamespace(args=a) for a in args]


def log_probability(model, ids, first):
    log_probs = torch.log_softmax(model.engine.model(torch.tensor([ids[:-1]]))[:, 0, :257].double(), -1)
    return sum(log_probs[at - 1, ids[at]].item() for at in range(first, len(ids)))


def test_loglikelihood(model):
    pairs = [("the ", "cat"), ("the", " cat"), ("", "cat"), ("a context that is longer than it", " all"), ("x", "")]
    got = RequestHandler(model).loglikelihood(instances(*pairs))
    eod = BYTES.eod
    for (context, continuation), (value, greedy) in zip(pairs[:3], got):
        ids = [*([] if context else [eod]), *(context + continuation).encode()]
        first = len(ids) - len(continuation) - (context.endswith(" "))
        assert value == pytest.approx(log_probability(model, ids, first), rel=1e-5) and not greedy
    assert got[0] == got[1]  # blanks move to the continuation
    ids = list(b"a context that is longer than it all")[-LENGTH - 1 :]
    assert got[3][0] == pytest.approx(log_probability(model, ids, len(ids) - 4), rel=1e-5)
    assert got[4] == (0.0, True)
    best = int(model.engine.model(torch.tensor([[120]]))[-1, 0, :128].argmax())
    assert RequestHandler(model).loglikelihood(instances(("x", chr(best))))[0][1]
    with pytest.raises(ConfigError, match="longer than --seq-length"):
        RequestHandler(model).loglikelihood(instances(("x", "y" * 99)))


def test_rolling_windows_are_the_harnesss(model):
    text = "some text of more than two windows of sixteen"
    # The example in lm_eval's own documentation, with a context of 4.
    windows = [(e.tokens, e.count) for e in harness._windows([99, *range(10)], 4)]
    assert windows == [((99, 0, 1, 2, 3), 4), ((3, 4, 5, 6, 7), 4), ((5, 6, 7, 8, 9), 2)]
    ids = [BYTES.eod, *text.encode()]
    want, end = 0.0, 1
    while end < len(ids):
        last = min(len(ids), end + LENGTH)
        begin = max(0, last - LENGTH - 1)
        want += log_probability(model, ids[begin:last], end - begin)
        end = last
    got = RequestHandler(model).loglikelihood_rolling(instances((text,), ("",), ("ab",)))
    assert got[0] == pytest.approx(want, rel=1e-5) and got[1] == 0.0
    assert got[2] == pytest.approx(log_probability(model, [BYTES.eod, 97, 98], 1), rel=1e-5)


def test_generate_until(model):
    greedy = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    (text,) = RequestHandler(model).generate_until(instances(("to be", greedy)))
    from hal import Rng

    want = generate(model.engine.model, BYTES, list(b"to be"), 6, temperature=0.0, rng=Rng(0))
    assert text == BYTES.decode(want)
    stopped = RequestHandler(model).generate_until(instances(("to be", {**greedy, "until": text[2]})))
    assert stopped == [text[: text.index(text[2])]]
    sampling = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 0.9, "top_p": 0.9}
    assert RequestHandler(model).generate_until(instances(("a", sampling))) == RequestHandler(model).generate_until(
        instances(("a", sampling))
    )
    with pytest.raises(ConfigError, match="num_beams"):
        RequestHandler(model).generate_until(instances(("a", {**sampling, "num_beams": 3})))


def test_without_the_harness_the_error_says_what_to_install(monkeypatch, model):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(HalError, match="pip install 'lm_eval'"):
        harness.language_model(model)


def test_tasks_of_the_harness_run(model, tmp_path):
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (pip install lm_eval)")
    pytest.importorskip("datasets", reason="needs datasets, which lm_eval reads its data with")
    data = tmp_path / "data.json"
    data.write_text("".join(json.dumps({"context": f"{n} and", "word": " so"}) + "\n" for n in range(5)))
    for name, kind in (("cloze", "loglikelihood"), ("rolling", "loglikelihood_rolling"), ("free", "generate_until")):
        metric = {"loglikelihood": "acc", "loglikelihood_rolling": "word_perplexity", "generate_until": "exact_match"}
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {data}}}\n"
            f"output_type: {kind}\ntest_split: test\n"
            + ('doc_to_text: ""\n' if name == "rolling" else 'doc_to_text: "{{context}}"\n')
            + f'doc_to_target: "{"{{context}}{{word}}" if name == "rolling" else "{{word}}"}"\n'
            + ("generation_kwargs: {until: ['.'], max_gen_toks: 4, do_sample: false}\n" if name == "free" else "")
            + f"metric_list: [{{metric: {metric[kind]}}}]\n"
        )
    table, results = harness.run_tasks(model, ["cloze", "rolling", "free"], path=str(tmp_path))
    assert "cloze" in table and results["cloze"]["acc,none"] == 0.0
    rows = [f"{n} and so" for n in range(5)]
    logs = [log_probability(model, [BYTES.eod, *row.encode()], 1) for row in rows]
    want = torch.tensor(-sum(logs) / sum(len(row.split()) for row in rows)).exp().item()
    assert results["rolling"]["word_perplexity,none"] == pytest.approx(want, rel=1e-4)
    with pytest.raises(ConfigError, match="no task nothing"):
        harness.run_tasks(model, ["nothing"])
