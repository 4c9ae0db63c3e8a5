"""Requests of lm-evaluation-harness give the results of an independent computation, and its own tasks run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from model_options import LLAMA_OPTIONS, byte_model, sizes

from hal import HalError
from hal.cli.convert import main as convert
from hal.cli.eval import main as evaluate
from hal.cli.generate import main as generate_command
from hal.model.apps.convert import hal_format
from hal.model.apps.convert.weights import Weights
from hal.model.apps.evaluation import harness
from hal.model.apps.evaluation.harness import RequestHandler
from hal.model.config.schema import Config, ConfigError
from hal.model.data.tokenizers.tokenizer import ByteTokenizer
from hal.model.gpt.model import GPT
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


def _task(folder, name, kind, metrics, *lines):
    """Writes a task of documents in folder/NAME.jsonl."""
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {folder / name}.jsonl}}\n"
        f"output_type: {kind}\ntest_split: test\n"
        + "".join(f"{line}\n" for line in lines)
        + f"metric_list: [{', '.join(f'{{metric: {metric}}}' for metric in metrics)}]\n"
    )


def _rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _beginning(folder):
    """The options of a tokenizer of bytes that begins every text with <s>, as Llama's does. Its ids are 0 to 257."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(BYTES.pipeline())
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 257)]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer.json")}


@pytest.mark.nightly
@pytest.mark.parametrize("begins", [False, True])
def test_the_harness_has_the_same_results_on_the_export(begins, tmp_path, cpu_ref, monkeypatch):
    """Its Hugging Face adapter on the exported folder, and `hal eval` on the checkpoint, on tasks from local files.

    begins: the tokenizer begins every text with a token.
    """
    for package in ("lm_eval", "datasets", "transformers", "accelerate", "safetensors"):
        pytest.importorskip(package, reason=f"needs {package}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    options = {**sizes(2, 32, 4, 64), "init_method_std": 0.4, **LLAMA_OPTIONS, "hidden_dropout": 0.0}
    config = Config(**options, make_vocab_size_divisible_by=1)
    config.set_vocabulary(257 + begins)
    tensors = {name: p.detach() for name, p in GPT(config, torch.device("cpu")).named_parameters()}
    tokenizer = _beginning(tmp_path / "tokenizer") if begins else {"tokenizer_type": "ByteTokenizer"}
    hal_format.write(Weights(options, tensors, tokenizer), tmp_path / "checkpoint")
    load = ["--load", str(tmp_path / "checkpoint")]
    assert convert([*load, "--save", str(tmp_path / "exported"), "--saver", "huggingface"]) == 0

    speech = "to be or not to be that is the question whether it is nobler in the mind to suffer"
    texts = [" ".join(speech.split()[n : n + 6]) for n in range(12)]
    prompts = [f"{text}:" for text in texts]
    _rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    # Every other document expects what the model says.
    given = ["--prompt-file", str(tmp_path / "prompts.jsonl"), "--greedy", "--num-tokens-to-generate", "5"]
    assert generate_command([*load, "--backend", "cpu_ref", *given, "--output-file", str(tmp_path / "said")]) == 0
    said = [json.loads(line)["text"] for line in (tmp_path / "said").read_text().splitlines()]
    rows = [{"prompt": p, "said": s if n % 2 else "no"} for n, (p, s) in enumerate(zip(prompts, said))]
    _rows(tmp_path / "free.jsonl", rows)
    _rows(tmp_path / "cloze.jsonl", [{"context": t.rsplit(" ", 1)[0], "word": t.rsplit(" ", 1)[1]} for t in texts])
    _rows(tmp_path / "rolling.jsonl", [{"text": f"{a} {b} {a} {b}"} for a, b in zip(texts, texts[3:])])
    _rows(tmp_path / "choice.jsonl", [{"question": t, "choices": ["x", "yes", "or no"], "right": 1} for t in texts])
    _task(
        tmp_path,
        "cloze",
        "loglikelihood",
        ["perplexity", "acc"],
        'doc_to_text: "{{context}}"',
        'doc_to_target: " {{word}}"',
    )
    ppl = ["word_perplexity", "bits_per_byte"]
    _task(tmp_path, "rolling", "loglikelihood_rolling", ppl, 'doc_to_text: ""', 'doc_to_target: "{{text}}"')
    choice = ["doc_to_text: question", "doc_to_choice: choices", "doc_to_target: right"]
    _task(tmp_path, "choice", "multiple_choice", ["acc", "acc_norm", "brier_score"], *choice)
    _task(
        tmp_path,
        "free",
        "generate_until",
        ["exact_match"],
        "doc_to_text: prompt",
        "doc_to_target: said",
        "generation_kwargs: {until: ['##'], max_gen_toks: 5, do_sample: false, temperature: 0.0}",
    )
    names = ["cloze", "rolling", "choice", "free"]
    more = ["--task", "lm-eval", "--lm-eval-tasks", *names, "--lm-eval-path", str(tmp_path)]
    assert evaluate([*load, "--backend", "cpu_ref", *more, "--output-file", str(tmp_path / "ours.json")]) == 0
    ours = json.loads((tmp_path / "ours.json").read_text())
    adapter = HFLM(pretrained=str(tmp_path / "exported"), device="cpu", batch_size=1, dtype="float32")
    assert (adapter.tok_encode("a")[0] == 257) == begins
    manager = TaskManager(include_path=str(tmp_path))
    theirs = simple_evaluate(model=adapter, tasks=names, task_manager=manager, bootstrap_iters=0)["results"]
    assert ours["free"]["exact_match,none"] == 0.5 and ours["rolling"]["word_perplexity,none"] > 1.0
    for name in names:
        metrics = [m for m in theirs[name] if m.endswith(",none") and "stderr" not in m]
        assert metrics and all(m in ours[name] for m in metrics)
        for metric in metrics:
            assert ours[name][metric] == pytest.approx(theirs[name][metric], rel=1e-4), (name, metric)
