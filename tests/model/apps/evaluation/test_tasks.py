"""Scores equal an independent computation on the same model, window by window and word by word."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.model.apps.evaluation.scoring import Example, Measured, mean, per_token, perplexity, score
from hal.model.apps.evaluation.tasks import detokenise_wikitext, lambada, wikitext
from hal.model.config.schema import Config, ConfigError
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer
from hal.model.gpt.model import GPT
from hal.model.inference.engine import Engine, NotFinite

BYTES, LENGTH = ByteTokenizer(), 24
TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "one two three four five six seven eight nine ten",
    "x yz",
    "The end. The end.",
]


@pytest.fixture
def engine(cpu_ref):
    config = Config(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=LENGTH, init_method_std=0.3)
    config.set_vocabulary(257)
    return Engine(GPT(config, torch.device("cpu")).requires_grad_(False), 257)


def reference_score(engine, ids, first):
    """Independent of batches, padding and cross entropy: one sequence, log-softmax over the real ids in float64.
    (negative log-likelihood, whether every token is the most likely) of ids[first:]."""
    logits = engine.model(torch.tensor([ids[:-1]]))[:, 0, :257].double()
    log_probs = torch.log_softmax(logits, -1)
    labels = ids[1:]
    rows = range(first - 1, len(labels))
    return -sum(log_probs[r, labels[r]].item() for r in rows), all(int(logits[r].argmax()) == labels[r] for r in rows)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_lambada_is_scored_as_defined(engine, tmp_path, strict, batch):
    # Use the model's own prediction as one of the answers, so that not all are wrong.
    with torch.no_grad():
        answer = list(BYTES.encode("a dog"))
        answer[-1] = int(engine.model(torch.tensor([answer[:-1]]))[-1, 0, :128].argmax())
    texts = [*TEXTS, bytes(answer).decode()]
    path = tmp_path / "any name"
    path.write_text("\n\n".join(json.dumps({"text": t}) for t in texts) + "\n")
    task = lambada(path, BYTES, LENGTH, strict=strict)
    got = task.results(score(engine, task.examples, batch=batch))
    right, losses = [], []
    for text in texts:
        if strict:
            last = text.split()[-1]
            context, label = list(text[: text.rindex(last)].strip().encode()), list(f" {last}".encode())
        else:
            context, label = list(text.encode())[:-1], list(text.encode())[-1:]
        ids = (context + label)[-LENGTH - 1 :]
        loss, is_right = reference_score(engine, ids, len(ids) - len(label))
        losses.append(loss)
        right.append(is_right)
    assert got["number correct"] == sum(right) and got["total examples"] == len(texts)
    assert got["avg accuracy"] == pytest.approx(sum(right) / len(texts))
    assert got["loss per word"] == pytest.approx(sum(losses) / len(texts), rel=1e-5)
    assert got["shortened contexts"] == 1 and (strict or sum(right) >= 1)


@pytest.mark.parametrize("move", [1, 5, LENGTH, None])
def test_wikitext_is_scored_as_defined(engine, tmp_path, move):
    raw = " = A title = \n\n The cat , the dog @-@ house ( and so on ) ; it costs 3 @,@ 000 . \n It 's fine .\r\n"
    path = tmp_path / "lambada.jsonl"  # the file name has no effect
    path.write_bytes(raw.encode())
    task = wikitext(path, BYTES, LENGTH, overlapping_eval=move)
    got = task.results(score(engine, task.examples, batch=4))
    ids, step = list(detokenise_wikitext(raw).encode()), move or LENGTH
    # Megatron's windows start every `step` tokens; the first counts all its labels, the others only their last `step`.
    nlls = {}
    for start in range(0, len(ids) - 1, step):
        window = ids[start : start + LENGTH + 1]
        for at in range(1 if start == 0 else LENGTH - step + 1, len(window)):
            assert start + at not in nlls
            nlls[start + at] = reference_score(engine, window[: at + 1], at)[0]
    assert sorted(nlls) == list(range(1, len(ids)))
    loss, ratio = sum(nlls.values()) / len(nlls), (len(ids) - 1) / (len(raw.strip().split(" ")) - 1)
    assert got["avg loss"] == pytest.approx(loss, rel=1e-5) and got["token ratio"] == pytest.approx(ratio)
    assert got["ppl"] == pytest.approx(math.exp(min(20, loss)), rel=1e-4)
    assert got["adjusted ppl"] == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-4)
    assert got["tokens"] == len(ids) - 1


@given(tokens=st.integers(2, 60), length=st.integers(1, 12), move=st.integers(1, 12))
def test_wikitexts_windows_are_megatrons(tmp_path_factory, tokens, length, move):
    """Token n of the text is n. Windows start every `move` tokens and count labels that no earlier window counted."""
    move = min(move, length)
    path = tmp_path_factory.mktemp("text") / "numbers"
    path.write_text(" ".join(map(str, range(tokens))))
    task = wikitext(path, NullTokenizer(100), length, overlapping_eval=move)
    counted = 1
    for number, example in enumerate(task.examples):
        window = range(tokens)[number * move : number * move + length + 1]
        assert example.tokens == tuple(window) and example.count == window.stop - counted
        counted = window.stop
    assert counted == tokens
    results = task.results(torch.ones(len(task.examples), 3, dtype=torch.float64))
    assert (results["tokens"], results["windows"], results["token ratio"]) == (tokens - 1, len(task.examples), 1.0)


def test_wikitexts_windows_move_by_32_or_a_short_sequence(tmp_path):
    path = tmp_path / "numbers"
    path.write_text(" ".join(map(str, range(200))))
    for length, move in ((40, 32), (32, 32), (8, 8)):
        examples = wikitext(path, NullTokenizer(200), length, overlapping_eval=None).examples
        assert examples == wikitext(path, NullTokenizer(200), length, overlapping_eval=move).examples


@pytest.mark.parametrize("words, length, kept, shortened", [(3, 2, 3, 0), (3, 3, 3, 0), (4, 2, 3, 1), (9, 4, 5, 1)])
def test_lambada_keeps_the_end_of_a_context_that_is_too_long(tmp_path, words, length, kept, shortened):
    """A sequence has `length` tokens and an additional last label."""
    path = tmp_path / "data"
    path.write_text(json.dumps({"text": " ".join(map(str, range(words)))}) + "\n")
    for strict in (False, True):
        task = lambada(path, NullTokenizer(100), length, strict=strict)
        assert task.examples == [Example(tuple(range(words - kept, words)), 1)]
        assert task.results(torch.zeros(1, 3, dtype=torch.float64))["shortened contexts"] == shortened


def test_lambadas_last_word_may_fill_the_sequence(tmp_path):
    path = tmp_path / "data"
    path.write_text('{"text": "some abc"}\n')
    (example,) = lambada(path, BYTES, 4, strict=True).examples
    assert (bytes(example.tokens), example.count) == (b"e abc", 4)
    with pytest.raises(ConfigError, match="line 1: the last word has 4 tokens, more than --seq-length 3"):
        lambada(path, BYTES, 3, strict=True)
    # Two tokens are enough, or two words where words are counted; all tokens of the last word count, and no others.
    path.write_text('{"text": "a b"}\n{"text": "yyb b"}')
    assert [bytes(e.tokens) for e in lambada(path, BYTES, 9, strict=True).examples] == [b"a b", b"yyb b"]
    path.write_text('{"text": "ab"}')
    assert lambada(path, BYTES, 9, strict=False).examples == [Example(tuple(b"ab"), 1)]


@pytest.mark.parametrize(
    "text, want",
    [
        (" = = Title = = \n The dogs ' house , ( which is ) red", " == Title ==\nThe dogs' house, (which is) red"),
        (
            "3 @,@ 000 @.@ 5 a @-@ b \N{DEGREE SIGN} C ; [ x ] : { y } ! z .",
            "3,000.5 a-b\N{DEGREE SIGN}C; [x]: {y}! z .",
        ),
        ('It \'s " so " , N x ? y\n', 'It\'s "so", 1 x? y\n'),
        ("an ' odd ' N one", "an 'odd' 1 one"),
        ("not @x@ a mark", "not @x@ a mark"),
        ("a/' 5/b", "a/'[0-9]/b"),  # Megatron's own
    ],
)
def test_detokenisation_is_megatrons(text, want):
    assert detokenise_wikitext(text) == want


def test_padding_gets_no_probability(engine):
    # The values of the padded rows do not affect the scores.
    examples = [Example(tuple(BYTES.encode("the cat")), 3)]
    before = score(engine, examples, batch=1)
    engine.model.embedding.word_embeddings.weight[257:] = 5.0
    assert torch.equal(score(engine, examples, batch=1), before)


@pytest.mark.parametrize(
    "content, reason",
    [
        ('{"text": "two words"}\n{"text": ', "line 2 is not valid JSON"),
        ('\n\n{"txt": "two words"}', 'line 3: expected an object with a "text"'),
        ('["text"]', 'line 1: expected an object with a "text"'),
        ('{"text": ""}', "line 1: a text needs at least two"),
        ('{"text": "x"}', "line 1: a text needs at least two"),
        ("", "has no texts"),
        (f'{{"text": "a {"b" * 99}"}}', "the last word has 100 tokens"),
        ("[" * 100_000, "line 1 is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_broken_data_is_refused_with_its_line(tmp_path, content, reason):
    path = tmp_path / "data"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=reason):
        lambada(path, BYTES, LENGTH, strict=True)


def test_texts_that_cannot_be_measured_are_refused(tmp_path):
    path = tmp_path / "data"
    path.write_text("x")
    with pytest.raises(ConfigError, match="too little to measure"):
        wikitext(path, BYTES, LENGTH, overlapping_eval=4)
    for few in ("word", "7"):
        path.write_text(few)
        with pytest.raises(ConfigError, match="in 1 words, which is too little to measure"):
            wikitext(path, BYTES if few == "word" else NullTokenizer(9), LENGTH, overlapping_eval=4)
    path.write_text("7 8")
    assert [e.tokens for e in wikitext(path, NullTokenizer(9), LENGTH, overlapping_eval=4).examples] == [(7, 8)]
    path.write_text("some words")
    with pytest.raises(ConfigError, match="a text is ids separated by blanks; found 'some'"):
        wikitext(path, NullTokenizer(5), LENGTH, overlapping_eval=4)
    for move in (0, LENGTH + 1):
        with pytest.raises(ConfigError, match="must be between 1 and"):
            wikitext(path, BYTES, LENGTH, overlapping_eval=move)


def test_standard_errors():
    values = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert mean(values).stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert mean(values[:1]).stderr is None
    # Equal counts: the error of a mean of means. Unequal: agrees with a simulation.
    nll = torch.tensor([3.0, 5.0, 4.0, 8.0], dtype=torch.float64)
    scores = torch.stack([nll, torch.zeros(4), torch.full((4,), 2.0)], 1).double()
    assert per_token(scores) == Measured(2.5, pytest.approx(mean(nll / 2).stderr))
    draw = torch.Generator().manual_seed(0)
    count = torch.randint(1, 9, (4000, 50), generator=draw).double()
    nll = count * 2.0 + count.sqrt() * torch.randn(4000, 50, generator=draw, dtype=torch.float64)
    runs = [per_token(torch.stack([n, torch.zeros(50).double(), c], 1)) for n, c in zip(nll, count)]
    spread = torch.tensor([r.value for r in runs]).std().item()
    assert sum(r.stderr for r in runs) / len(runs) == pytest.approx(spread, rel=0.05)
    assert perplexity(Measured(1.0, 0.1), 2.0) == Measured(math.exp(2), pytest.approx(0.2 * math.exp(2)))
    assert perplexity(Measured(50.0, None)).value == math.exp(20)


def test_losses_that_are_no_numbers_are_an_error(engine):
    examples = [Example((1, 2, 3), 2), Example((4, 5), 1)]
    with torch.no_grad():
        engine.model.embedding.word_embeddings.weight[4] = float("nan")
    with pytest.raises(NotFinite, match="the losses of 2 of 2 sequences are not finite"):
        score(engine, examples, batch=1)
